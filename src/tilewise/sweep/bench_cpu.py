"""A bench on the CPU: NumPy arrays, or PyTorch's where NumPy lacks the dtype."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype
from tilewise.core.measurement import Policy
from tilewise.core.problem import Problem
from tilewise.core.tensors import is_torch, numpy_dtype, torch_dtype
from tilewise.engines.contract import Engine
from tilewise.engines.cpu import CpuEngine
from tilewise.ops.contract import get_op
from tilewise.sweep.bench import (
    GUARD_BYTES,
    Bench,
    Workpiece,
    input_seed,
    random_values,
    stored_shape,
)
from tilewise.sweep.timing import CpuTimer

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT = 64


class CpuBench(Bench):
    """Measures kernels of the CPU and vendor engines."""

    def __init__(self, arch: Arch, policy: Policy, engines: Mapping[str, Engine]) -> None:
        super().__init__(arch, policy, engines)
        self.timer = CpuTimer(policy, max(arch.l2_bytes, arch.l3_bytes, 1 << 20))
        self._scratch: Array = np.empty(0)
        self._share_threads()

    def _share_threads(self) -> None:
        """Has kernels run where calls on tensors have them run, if PyTorch's take turns with them:
        two teams whose threads spin after their work would slow each other down.
        """
        kernels = self.engines.get("cpu")
        if self.policy.threads == 1 or "vendor" not in self.engines:
            return  # one thread is the caller's own
        if isinstance(kernels, CpuEngine) and find_spec("torch"):
            kernels.share_with_pytorch()

    def lay_out(self, problem: Problem) -> Workpiece:
        op = get_op(problem.op)
        shapes, storages = op.shapes(problem), op.storage(problem)
        # Random values, the reference in float64 and what it is computed from lie beside them.
        needed, room = problem.bytes + 24 * sum(map(prod, shapes)), memory_bytes()
        if needed > room:  # before half of it is filled, and the system kills someone
            raise MemoryError(f"tensors and reference need {needed:,} bytes; there are {room:,}")
        as_torch = {problem.dtype, problem.out_dtype} & {"bf16", "fp8", "bf8"}
        operands, exact = [], []
        for index, shape in enumerate(shapes[:-1]):
            values = random_values(shape, problem.dtype, input_seed(self.policy, problem, index))
            place, _ = _buffer(shape, storages[index].axes, problem.dtype, bool(as_torch))
            place[...] = _torch_from(values) if as_torch else values
            operands.append(place)
            exact.append(_as_float64(place))
        expected = op.reference(problem, *exact)
        out, buffer = _buffer(shapes[-1], storages[-1].axes, problem.out_dtype, bool(as_torch))
        axes = storages[-1].axes
        stored = (out.permute(axes) if as_torch else out.transpose(axes)).reshape(-1)
        flat = np.ascontiguousarray(np.reshape(expected, shapes[-1]).transpose(axes)).reshape(-1)
        return Workpiece(tuple(operands), out, stored, buffer, flat)

    def errors(self, piece: Workpiece) -> tuple[float, float]:
        if not piece.expected.size:
            return 0.0, 0.0
        if self._scratch.size < piece.expected.size:
            self._scratch = np.empty(piece.expected.size)
        found = piece.stored.float().numpy() if is_torch(piece.stored) else piece.stored
        apart = self._scratch[: piece.expected.size]
        # No dot products: BLAS would leave threads spinning beside the kernel that is timed next.
        size = np.sqrt(np.square(piece.expected, out=apart).sum()) or 1.0
        most = max(piece.expected.max(), -piece.expected.min()) or 1.0
        np.subtract(found, piece.expected, out=apart)
        worst = max(apart.max(), -apart.min())
        return float(np.sqrt(np.square(apart, out=apart).sum()) / size), float(worst / most)

    def synchronize(self) -> None:
        """Calls on the CPU are over when they return."""

    def is_sound(self) -> bool:
        """A CPU has no context to lose; a spoilt heap shows in the guards or as a crash."""
        return True


def memory_bytes() -> int:
    """Of this machine, or as much of it as a container may use."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(here, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # none, or "max"
        return here


def _buffer(
    shape: Sequence[int], axes: Sequence[int], element: str, as_torch: bool
) -> tuple[Any, Array]:
    """A tensor stored as asked inside guarded, aligned memory, and that memory as bytes."""
    stored, back = stored_shape(shape, axes)
    size = prod(stored) * dtype(element).bytes
    raw = np.empty(size + 2 * GUARD_BYTES + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    buffer = raw[start : start + size + 2 * GUARD_BYTES]
    inside = buffer[GUARD_BYTES : GUARD_BYTES + size]
    if not as_torch:
        return inside.view(numpy_dtype(element)).reshape(stored).transpose(back), buffer
    import torch

    tensor = torch.from_numpy(inside).view(torch_dtype(element, "cpu"))
    return tensor.reshape(stored).permute(back), buffer


def _torch_from(values: Array) -> Any:
    import torch

    return torch.from_numpy(values)


def _as_float64(tensor: Any) -> Array:
    if is_torch(tensor):
        return np.asarray(tensor.float().numpy(), np.float64)
    return np.asarray(tensor, np.float64)
