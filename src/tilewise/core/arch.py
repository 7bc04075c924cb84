"""Architectures: the figures of a chip, read from one data file each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from math import isfinite
from typing import Any

from tilewise.core.dtypes import DTYPES
from tilewise.errors import ArchError, nearest

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
    """First-level data cache of a compute unit."""
    l2_bytes: int
    """Second-level cache within reach of a compute unit: a core's own, an XCD's, or the GPU's."""
    l3_bytes: int = 0
    """Last-level cache that compute units share, 0 where there is none."""
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
        """The same architecture with live figures in place of the file's.

        Peaks not given follow the compute units, their issue units and the clock.
        """
        live = replace(self, **figures)
        if "peak_tflops" in figures:
            return live
        scale = _issue_rate(live) / _issue_rate(self)
        return replace(live, peak_tflops={k: v * scale for k, v in self.peak_tflops.items()})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every figure."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **values,
            "peak_tflops": dict(self.peak_tflops),
            "matrix_instructions": {
                k: [list(t) for t in v] for k, v in self.matrix_instructions.items()
            },
            "warp_splits": [list(t) for t in self.warp_splits],
            "features": sorted(self.features),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Arch:
        """The architecture that `to_dict` wrote."""
        try:
            held = {name: _frozen(value) for name, value in values.items()}
            held |= {"features": frozenset(held.get("features", ()))}
            for name, value in held.items():
                wrong = wrong_type(name, value)
                if wrong:
                    raise TypeError(f"{name} is {str(value)[:60]!r}; it must be {wrong}")
            arch = cls(**held)
        except (TypeError, AttributeError) as error:
            raise ArchError(f"not an architecture written by to_dict: {error}") from None
        broken = inconsistencies(arch)
        if broken:
            raise ArchError(f"{arch.name} contradicts itself: " + "; ".join(broken))
        return arch


def _issue_rate(arch: Arch) -> float:
    # Issue units differ between cores of one CPU family; on a GPU they belong to the architecture.
    units = arch.simds_per_cu if arch.kind == "cpu" else 1
    return arch.compute_units * arch.clock_mhz * units


_FIELDS = {f.name: f for f in fields(Arch) if f.name not in ("name", "device")}
_NEEDED = {
    name for name, f in _FIELDS.items() if f.default is MISSING and f.default_factory is MISSING
}
FIGURES = (*(name for name, f in _FIELDS.items() if f.type in ("int", "float")), "peak_tflops")
"""What is a number, or a number per dtype."""
_TEXT = {f.name for f in fields(Arch) if f.type == "str"}
_REAL = {name for name, f in _FIELDS.items() if f.type == "float"}
_OWN_WORD = ("derived", "estimate", "measured")
"""Sources that are no document: computed from the others, guessed, or read off a machine."""


@cache
def known_archs() -> tuple[str, ...]:
    """Names of every architecture with a data file."""
    folder = resources.files("tilewise") / "archs"
    return tuple(
        sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    )


@cache
def load_arch(name: str, device: str = "") -> Arch:
    """The architecture called `name`, as a given `device` if the file lists several.

    `sm_90:H200` names both.
    """
    name, _, product = name.partition(":")
    return parse_arch(_text(name), name, device or product)


def amd_name(properties: Any) -> str:
    """The name that ROCm gives a device, less its modes (`:sramecc+:xnack-`); empty on CUDA."""
    name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return name if name.startswith("gfx") else ""  # on CUDA PyTorch puts the product's name there


def devices(name: str) -> tuple[str, ...]:
    """The products that an architecture's file lists; the first is the default."""
    return tuple(_read(_text(name), name).get("devices", {}))


def device_named(name: str, product: str) -> str:
    """The first of these that a product's name contains, word by word; empty where none is."""
    words = product.replace(" ", "-").upper()
    return next((d for d in devices(name) if all(w in words for w in d.upper().split("-"))), "")


def sources(name: str, device: str = "") -> dict[str, str]:
    """Figure -> where it comes from, titles spelled out."""
    data = _read(_text(name), name)
    titles: Mapping[str, str] = data.get("sources", {})
    return {
        figure: _spelled_out(str(entry["source"]), titles)
        for figure, entry in _entries(data, name, device).items()
    }


def parse_arch(text: str, name: str, device: str = "") -> Arch:
    """An architecture from the text of its data file; an inconsistent one is refused.

    The file has `[figures]` whose entries are `{ value = ..., source = "..." }`, and optional
    `[devices.NAME]` tables of the same form that override them; the first device is the default.
    A source is `KEY: where`, with KEY in the file's `[sources]` or one of derived, estimate and
    measured. Every device of the file must be sound, not only the one asked for.
    """
    data = _read(text, name)
    listed: Mapping[str, Any] = data.get("devices", {})
    chosen = device or next(iter(listed), "")
    _entries(data, name, device)
    archs = {each: _build(data, name, each) for each in (listed or ("",))}
    return archs[chosen]


def inconsistencies(arch: Arch) -> list[str]:
    """Every rule that the figures break; empty for a sound file."""
    return [*_bad_sizes(arch), *_bad_peaks(arch), *_bad_tiles(arch)]


def _text(name: str) -> str:
    if name not in known_archs():
        labels = {each: f"{arch}:{each}" for arch in known_archs() for each in devices(arch)}
        product = next((labels[each] for each in labels if each.lower() == name.lower()), "")
        meant = f"; did you mean {product!r}?" if product else nearest(name, known_archs())
        raise ArchError(
            f"architecture {name!r} is unknown; known: {', '.join(known_archs())}{meant}"
        )
    return (resources.files("tilewise") / "archs" / f"{name}.toml").read_text()


def _read(text: str, name: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, too
        raise ArchError(f"{name}.toml is not TOML: {error}") from None
    extra = set(data) - {"sources", "figures", "devices"}
    if extra:
        raise ArchError(
            f"{name}.toml: unknown tables {sorted(extra)}; a file has sources, figures, devices"
        )
    listed = data.get("devices", {})
    tables = [data.get("sources", {}), data.get("figures", {}), listed]
    tables += listed.values() if isinstance(listed, dict) else []
    if not all(isinstance(table, dict) for table in tables):
        raise ArchError(
            f"{name}.toml: sources, figures and each [devices.NAME] are tables, in single brackets"
        )
    return data


def _entries(data: Mapping[str, Any], name: str, device: str) -> dict[str, Any]:
    """Figure -> entry of the chosen device, checked for names and sources but not for values."""
    listed: Mapping[str, Any] = data.get("devices", {})
    if device and device not in listed:
        raise ArchError(f"{name} has no device {device!r}; known: {', '.join(listed) or 'none'}")
    raw = {**data.get("figures", {}), **listed.get(device or next(iter(listed), ""), {})}
    unknown, missing = set(raw) - set(_FIELDS), _NEEDED - set(raw)
    if unknown or missing:
        raise ArchError(
            f"{name}.toml: unknown figures {sorted(unknown)}, missing {sorted(missing)}"
        )
    titles = data.get("sources", {})
    for figure, entry in raw.items():
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            raise ArchError(f"{name}.toml: {figure} needs a value and a source, and nothing else")
        key, _, where = str(entry["source"]).partition(": ")
        if key not in (*titles, *_OWN_WORD) or not where:
            raise ArchError(
                f"{name}.toml: the source of {figure} is {entry['source']!r}; write 'KEY: where' "
                f"with one of {', '.join([*titles, *_OWN_WORD])} as KEY"
            )
    return raw


def _build(data: Mapping[str, Any], name: str, device: str) -> Arch:
    values = {}
    for figure, entry in _entries(data, name, device).items():
        value = _frozen(entry["value"])
        if figure in _REAL and type(value) is int:
            value = float(value)
        wrong = wrong_type(figure, value)
        if wrong:
            raise ArchError(f"{name}.toml: {figure} is {entry['value']!r}; it must be {wrong}")
        values[figure] = value
    arch = Arch(name=name, device=device, **values)
    broken = inconsistencies(arch)
    if broken:
        raise ArchError(f"{name}.toml contradicts itself ({arch.label}): " + "; ".join(broken))
    return arch


def wrong_type(figure: str, value: Any) -> str:
    """What the figure must be, where it is not; empty where it is."""
    if figure in _TEXT:
        return "" if isinstance(value, str) and value.isprintable() else "text of one line"
    if figure in _REAL:
        return "" if type(value) in (int, float) and isfinite(value) else "a number"
    if figure == "features":
        sound = isinstance(value, frozenset) and all(isinstance(word, str) for word in value)
        return "" if sound else "a list of words"
    if figure == "warp_splits":
        return "" if _are_triples(value) else "a list of [m, n, k]"
    if figure == "peak_tflops":
        sound = isinstance(value, dict) and all(
            type(v) in (int, float) and isfinite(v) for v in value.values()
        )
        return "" if sound else "a number per dtype"
    if figure == "matrix_instructions":
        sound = isinstance(value, dict) and all(_are_triples(v) for v in value.values())
        return "" if sound else "a list of [m, n, k] per dtype"
    return "" if type(value) is int and abs(value) < 2**53 else "an integer"


def _are_triples(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(t, tuple) and len(t) == 3 and all(type(x) is int and x > 0 for x in t)
        for t in value
    )


def _bad_sizes(arch: Arch) -> Iterator[str]:
    for name in _FIELDS:
        value = getattr(arch, name)
        least = 0 if name == "l3_bytes" else 1e-9
        if isinstance(value, int | float) and value < least:
            yield f"{name} is {value}"
    if arch.kind not in ("gpu", "cpu"):
        yield f"kind is {arch.kind!r}, not gpu or cpu"
    if arch.warp_size & (arch.warp_size - 1):
        yield f"warp_size is {arch.warp_size}, not a power of two"
    if arch.smem_per_block_bytes > arch.smem_bytes:
        yield "a block cannot have more shared memory than its compute unit"
    if arch.kind == "gpu" and arch.max_threads_per_block > arch.warp_size * arch.max_warps_per_cu:
        yield "a block cannot have more threads than its compute unit"
    lanes = arch.warp_size if arch.kind == "gpu" else 1
    if arch.max_registers_per_thread * lanes > arch.registers_per_cu:
        yield "one warp cannot have more registers than its compute unit"
    if not arch.l1_bytes <= arch.l2_bytes <= (arch.l3_bytes or arch.l2_bytes) < arch.memory_bytes:
        yield "caches must grow from l1_bytes over l2_bytes and l3_bytes to memory_bytes"
    if arch.compute_units % max(1, arch.num_xcd):
        yield f"{arch.num_xcd} chiplets do not divide {arch.compute_units} compute units"
    if arch.has("avx512f") and not arch.has("avx2"):
        yield "avx512f implies avx2, which features lacks"


def _bad_peaks(arch: Arch) -> Iterator[str]:
    unknown = set(arch.peak_tflops) - set(DTYPES)
    if unknown:
        yield f"peak_tflops has unknown dtypes {sorted(unknown)}"
    yield from (f"peak_tflops of {k} is {v}" for k, v in arch.peak_tflops.items() if v <= 0)
    if "fp32" not in arch.peak_tflops:
        yield "peak_tflops lacks fp32"
    elif arch.kind == "cpu":
        # A core's peak is no independent figure: two operations per lane, port and cycle.
        rate = 2e-6 * _issue_rate(arch) * arch.warp_size
        if abs(arch.peak_tflops["fp32"] - rate) > 0.01 * rate:
            yield f"peak_tflops of fp32 is {arch.peak_tflops['fp32']}, the core figures give {rate}"


def _bad_tiles(arch: Arch) -> Iterator[str]:
    without_peak = set(arch.matrix_instructions) - set(arch.peak_tflops)
    if without_peak:
        yield f"matrix_instructions has dtypes without a peak: {sorted(without_peak)}"
    for split in arch.warp_splits:
        if split[0] * split[1] * split[2] * arch.warp_size > arch.max_threads_per_block:
            yield f"warp split {split} has more threads than a block may"
    for what, tiles in (("warp_splits", arch.warp_splits), *arch.matrix_instructions.items()):
        if len(set(tiles)) != len(tiles):
            yield f"{what} lists a tile twice"


def _spelled_out(source: str, titles: Mapping[str, str]) -> str:
    key, _, where = source.partition(": ")
    return f"{titles.get(key, key)}: {where}"


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    if isinstance(value, list):
        items = tuple(_frozen(v) for v in value)
        return frozenset(items) if items and all(isinstance(i, str) for i in items) else items
    return value
