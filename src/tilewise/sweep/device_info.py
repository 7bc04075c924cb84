"""What a worker says about where it runs, so that the orchestrator never has to look."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.errors import InputError


def kernels_of(op: str, family: str = "") -> str:
    """What an engine's kernels of an op go by, or those of one of its families."""
    return f"{op} {family}" if family else op


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A worker's device with its live figures, and the toolchain behind each engine."""

    arch: Arch
    toolchains: Mapping[str, Mapping[str, str]]
    """Engine -> `kernels_of` -> what these are compiled by and from."""
    unavailable: Mapping[str, str]
    """Engine -> why it cannot run there."""

    @property
    def name(self) -> str:
        return self.arch.device or self.arch.name

    def toolchain(self, kernel: Kernel) -> str:
        """What a kernel is compiled by and from there."""
        known, family = self.toolchains[kernel.engine], getattr(kernel, "family", "")
        return known.get(kernels_of(kernel.op, family)) or known[kernel.op]

    def to_dict(self) -> dict[str, Any]:
        return {
            "arch": self.arch.to_dict(),
            "toolchains": {name: dict(by_op) for name, by_op in self.toolchains.items()},
            "unavailable": dict(self.unavailable),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            arch=Arch.from_dict(values["arch"]),
            toolchains=values["toolchains"],
            unavailable=values["unavailable"],
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


def visible_gpus(root: Path = Path("/")) -> list[dict[str, str]]:
    """For each GPU that this process may use, the variables that show it alone.

    Known from the environment and the files that drivers leave under `root`: no driver is touched.
    """
    drivers = [root / "dev" / name for name in ("nvidiactl", "dxg")]
    count = len(list((root / "dev").glob("nvidia[0-9]*"))) or any(d.exists() for d in drivers)
    if count:
        chosen = _listed("CUDA_VISIBLE_DEVICES")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in _of(count, chosen)]
    # HIP counts what ROCR leaves over, and heeds CUDA's variable where its own is not set.
    left = _of(_amd_gpus(root), _listed("ROCR_VISIBLE_DEVICES"))
    chosen = _listed("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return [{"HIP_VISIBLE_DEVICES": gpu} for gpu in _of(len(left), chosen)]


def _listed(*names: str) -> list[str] | None:
    """The devices that the first variable set names; an empty one, and what follows -1, is none."""
    text = next((os.environ[name] for name in names if name in os.environ), None)
    if text is None:
        return None
    listed = [gpu.strip() for gpu in text.split(",")]
    end = next((at for at, gpu in enumerate(listed) if gpu in ("", "-1")), len(listed))
    return listed[:end]


def _of(count: int, chosen: list[str] | None) -> list[str]:
    """The chosen devices, or all where none is chosen; there is nothing to choose among none."""
    return [str(at) for at in range(count)] if chosen is None else chosen if count else []


def _amd_gpus(root: Path) -> int:
    """AMD's driver lists processors too; those have no GPU id."""
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(node.read_text().strip() not in ("", "0") for node in nodes)


def lock_path(kind: str, ending: str = "") -> Path:
    """The file that is locked while this user's device is measured on, or compiled for."""
    folder = Path(tempfile.gettempdir()) / f"tilewise-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "it belongs to somebody else", str(folder))
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    visible = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    name = "cpu" if kind == "cpu" else f"gpu-{visible.replace('/', '_')}"
    return folder / f"{name}{ending}.lock"


def open_lock(kind: str, ending: str = "") -> int:
    """The open file of `lock_path`; raises where it cannot be had."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(lock_path(kind, ending), flags, 0o600)
    except OSError as error:
        raise InputError(
            f"cannot lock the device: {error.filename}: {error.strerror}; remove it, or set TMPDIR "
            "to a folder of your own (the same for all sweeps of this machine)"
        ) from None
