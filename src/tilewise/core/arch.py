"""Architectures: the figures of a chip, read from one data file each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.errors import ArchError

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture, or with `device` set one product built on it.

    On a GPU a compute unit is a multiprocessor (SM, CU) and a warp a warp or wave; on a CPU a
    compute unit is a core, `warp_size` its fp32 vector lanes and `smem_bytes` its first-level
    data cache.
    """

    name: str
    device: str = ""
    vendor: str
    kind: str
    """`gpu` or `cpu`."""
    compute_units: int
    clock_mhz: int
    """The highest sustained clock."""
    warp_size: int
    simds_per_cu: int
    """Independent issue units of a compute unit; vector FMA ports of a core."""
    max_warps_per_cu: int
    max_threads_per_block: int
    registers_per_cu: int
    """32-bit registers of a compute unit; on a CPU the named vector registers of a core."""
    max_registers_per_thread: int
    smem_bytes: int
    smem_per_block_bytes: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int = 0
    shader_engines: int = 1
    num_xcd: int = 1
    """Chiplets with an L2 of their own."""
    memory_bytes: int
    memory_gb_s: float
    launch_us: float
    """What starting one kernel costs."""
    peak_tflops: Mapping[str, float] = field(hash=False)
    """Dense peak per operand dtype."""
    matrix_instructions: Mapping[str, tuple[Triple, ...]] = field(default_factory=dict, hash=False)
    """Warp tiles (m, n, k) of the matrix units, or of CK Tile's wrappers over them, per dtype."""
    warp_splits: tuple[Triple, ...] = ()
    """Legal ways to lay the warps of a block over a tile."""
    features: frozenset[str] = frozenset()
    """Instruction-set features, for example `avx2` or `tma`."""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.device})" if self.device else self.name

    def has(self, feature: str) -> bool:
        return feature in self.features

    def with_figures(self, **figures: Any) -> Arch:
        """The same architecture with live figures in place of the file's."""
        return replace(self, **figures)


_FIELDS = {f.name for f in fields(Arch)}
_OPTIONAL = {
    "device",
    "l3_bytes",
    "shader_engines",
    "num_xcd",
    "matrix_instructions",
    "warp_splits",
    "features",
}


@cache
def known_archs() -> tuple[str, ...]:
    """Names of every architecture with a data file."""
    folder = resources.files("tilewise") / "archs"
    return tuple(
        sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    )


@cache
def load_arch(name: str, device: str = "") -> Arch:
    """The architecture called `name`, as a given `device` if the file lists several."""
    if name not in known_archs():
        raise ArchError(f"architecture {name!r} is unknown; known: {', '.join(known_archs())}")
    text = (resources.files("tilewise") / "archs" / f"{name}.toml").read_text()
    return parse_arch(text, name, device)


def parse_arch(text: str, name: str, device: str = "") -> Arch:
    """An architecture from the text of its data file; an inconsistent one is refused.

    The file has `[figures]` whose entries are `{ value = ..., source = "..." }`, and optional
    `[devices.NAME]` tables of the same form that override them; the first device is the default.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArchError(f"{name}.toml is not TOML: {error}") from None
    devices: dict[str, Any] = data.get("devices", {})
    if device and device not in devices:
        raise ArchError(f"{name} has no device {device!r}; known: {', '.join(devices) or 'none'}")
    device = device or next(iter(devices), "")
    raw = {**data.get("figures", {}), **devices.get(device, {})}
    unknown = set(raw) - _FIELDS
    missing = _FIELDS - _OPTIONAL - set(raw) - {"name"}
    if unknown or missing:
        raise ArchError(
            f"{name}.toml: unknown figures {sorted(unknown)}, missing {sorted(missing)}"
        )
    unsourced = [k for k, v in raw.items() if not (isinstance(v, dict) and v.get("source"))]
    if unsourced:
        raise ArchError(f"{name}.toml: figures without value and source: {sorted(unsourced)}")
    values = {k: _frozen(v["value"]) for k, v in raw.items()}
    arch = Arch(name=name, device=device, **values)
    broken = inconsistencies(arch)
    if broken:
        raise ArchError(f"{name}.toml contradicts itself: " + "; ".join(broken))
    return arch


def sources(name: str) -> dict[str, str]:
    """Figure -> where it comes from."""
    data = tomllib.loads((resources.files("tilewise") / "archs" / f"{name}.toml").read_text())
    return {k: v["source"] for k, v in data.get("figures", {}).items()}


def inconsistencies(arch: Arch) -> list[str]:
    """Every rule that the figures break; empty for a sound file."""
    broken = []
    for f in fields(Arch):
        value = getattr(arch, f.name)
        if isinstance(value, int | float) and value < (0 if f.name == "l3_bytes" else 1e-9):
            broken.append(f"{f.name} is {value}")
    if arch.kind not in ("gpu", "cpu"):
        broken.append(f"kind is {arch.kind!r}, not gpu or cpu")
    if arch.smem_per_block_bytes > arch.smem_bytes:
        broken.append("a block cannot have more shared memory than its compute unit")
    if arch.kind == "gpu" and arch.max_threads_per_block > arch.warp_size * arch.max_warps_per_cu:
        broken.append("a block cannot have more threads than its compute unit")
    unknown = (set(arch.peak_tflops) | set(arch.matrix_instructions)) - set(DTYPES)
    if unknown:
        broken.append(f"unknown dtypes {sorted(unknown)}")
    if "fp32" not in arch.peak_tflops:
        broken.append("peak_tflops lacks fp32")
    for split in arch.warp_splits:
        if split[0] * split[1] * split[2] * arch.warp_size > arch.max_threads_per_block:
            broken.append(f"warp split {split} has more threads than a block may")
    return broken


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    if isinstance(value, list):
        items = tuple(_frozen(v) for v in value)
        return frozenset(items) if items and isinstance(items[0], str) else items
    return value
