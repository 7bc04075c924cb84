"""Launches of our own passes over tensors: compiled when first asked for, or collected before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.core.arch import Arch
from tilewise.dispatch import live_arch
from tilewise.engines.gpu.bound import BoundLaunch
from tilewise.engines.gpu.triton_build import why_no_triton
from tilewise.ops.launch import Launch
from tilewise.torch_ops.collecting import COLLECTOR, clear


def why_no_kernels(device: torch.device) -> str | None:
    """Why none of our passes run on a device, or None."""
    return why_no_triton() if device.type == "cuda" else f"there are none for {device.type}"


class Launchers:
    """Launches on the device of a tensor; `name` is what messages call them."""

    def __init__(self, like: Tensor, name: str) -> None:
        self._like, self._name = like.new_empty(0), name
        self._found: dict[str, Callable[..., None]] = {}

    def get(
        self, what: str, make: Callable[[Arch], tuple[Launch, tuple[int, ...]]]
    ) -> Callable[..., None]:
        """`launch(result, *tensors)` of a launch with the order of its tensors."""
        found = self._found.get(what)
        if found is None:
            arch = live_arch(self._like)
            launch, order = make(arch)
            if COLLECTOR.is_open:
                COLLECTOR.add(launch.sources)
                return clear
            with torch.cuda.device(self._like.get_device()):
                bound = BoundLaunch(launch, arch, f"{self._name} ({what})", order)
            found = self._found[what] = bound.launcher()
        return found
