"""What a worker says about where it runs, so that the orchestrator never has to look."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from tilewise.core.arch import Arch, load_arch
from tilewise.engines.contract import Engine
from tilewise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A worker's device with its live figures, and the toolchain behind each engine."""

    arch: Arch
    toolchains: Mapping[str, str]
    unavailable: Mapping[str, str]
    """Engine -> why it cannot run there."""

    @property
    def name(self) -> str:
        return self.arch.device or self.arch.name

    def to_dict(self) -> dict[str, Any]:
        return {
            "arch": arch_to_dict(self.arch),
            "toolchains": dict(self.toolchains),
            "unavailable": dict(self.unavailable),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            arch=arch_from_dict(values["arch"]),
            toolchains=values["toolchains"],
            unavailable=values["unavailable"],
        )


def arch_to_dict(arch: Arch) -> dict[str, Any]:
    """JSON-ready figures."""
    values = {f.name: getattr(arch, f.name) for f in fields(Arch)}
    return {**values, "features": sorted(arch.features)}


def arch_from_dict(values: Mapping[str, Any]) -> Arch:
    """The architecture that `arch_to_dict` wrote."""
    instructions = {
        name: tuple((int(m), int(n), int(k)) for m, n, k in tiles)
        for name, tiles in values["matrix_instructions"].items()
    }
    return Arch(
        **{
            **values,
            "matrix_instructions": instructions,
            "warp_splits": tuple((int(m), int(n), int(k)) for m, n, k in values["warp_splits"]),
            "features": frozenset(values["features"]),
        }
    )


LIVE_FIGURES = (
    *("device", "compute_units", "clock_mhz", "memory_bytes", "memory_gb_s"),
    *("l1_bytes", "l2_bytes", "l3_bytes"),
)


def as_arch(live: Arch, name: str) -> Arch:
    """The live device as the architecture called `name`, which it must be able to stand in for."""
    if not name or name == live.name:
        return live
    wanted = load_arch(name)
    if wanted.vendor != live.vendor or not wanted.features <= live.features:
        raise InputError(
            f"--arch is {name}; the device here is {live.label}, which cannot run its kernels"
        )
    return wanted.with_figures(**{figure: getattr(live, figure) for figure in LIVE_FIGURES})


def toolchain(engine: Engine) -> str:
    """What turns an engine's kernels into machine code, with versions.

    An engine may say so itself in a `toolchain` method.
    """
    own = getattr(engine, "toolchain", None)
    if own is not None:
        return str(own())
    if engine.name == "cpu":
        from tilewise.engines.toolchain import find_compiler

        compiler = find_compiler()
        return compiler.version if compiler else "no compiler"
    if engine.name == "triton":
        return _versions("triton", "torch")
    return _versions("numpy", "torch")


def _versions(*packages: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def lock_path(kind: str) -> Path:
    """The file that whoever measures on, or compiles for, this user's device holds locked."""
    folder = Path(tempfile.gettempdir()) / f"tilewise-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "0"
    name = "cpu" if kind == "cpu" else f"gpu-{visible.replace('/', '_')}"
    return folder / f"{name}.lock"
