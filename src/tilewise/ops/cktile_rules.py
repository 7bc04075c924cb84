"""What CK Tile's GEMM and convolution kernels share: traits, and the rules of where they run.

CK Tile is AMD's own tile-kernel library. Its kernels are described, learned and ranked here and
built there, so the rules are those its public sources enforce when a kernel is generated or
launched. Where those sources disagree with each other or with published measurements, the rule
here says which side it takes and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any, ClassVar

from tilewise.core.arch import Arch, Triple
from tilewise.core.dtypes import dtype
from tilewise.core.kernel import Kernel, trait
from tilewise.errors import KernelError

DTYPES = ("fp16", "bf16", "fp32", "fp8", "bf8", "int8")
TILE = ("tile_m", "tile_n", "tile_k")
WAVE = ("wave_m", "wave_n", "wave_k")
WARP_TILE = ("warp_tile_m", "warp_tile_n", "warp_tile_k")

COMPUTE_PIPELINES = ("compv3", "compv4", "compv5", "compv6", "comp_async")
CONV_PIPELINES = ("basic_v1", "basic_v2", "mem", *COMPUTE_PIPELINES, "basic_async_v1")
PRESHUFFLE = ("preshufflev1", "preshufflev2")
GEMM_PIPELINES = (*CONV_PIPELINES, *PRESHUFFLE)
INTERWAVE = ("mem", "basic_v1", "basic_v2")
ALWAYS_TWO_BUFFERS = ("compv4", "comp_async", "preshufflev2")
ALWAYS_ONE_BUFFER = ("basic_v1", "basic_v2", "basic_async_v1")
LEAST_PRESHUFFLED = (64, 64, 32)

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CkTileKernel(Kernel):
    """Traits of every CK Tile kernel. A tile is cut into `wave_*` waves of `warp_tile_*` steps."""

    engine: ClassVar[str] = "ck_tile"
    keeps_values: ClassVar[bool] = False

    dtype: str = trait("", DTYPES)
    tile_m: int = trait("", (16, 32, 64, 128, 256))
    tile_n: int = trait("", (16, 32, 64, 128, 256))
    tile_k: int = trait("", (16, 32, 64, 128, 256))
    wave_m: int = trait("", (1, 2, 4, 8))
    wave_n: int = trait("", (1, 2, 4))
    wave_k: int = trait("", (1, 2))
    warp_tile_m: int = trait("", (4, 16, 32, 64))
    warp_tile_n: int = trait("", (4, 16, 32, 64))
    warp_tile_k: int = trait("", (4, 8, 16, 32, 64, 128))
    pipeline: str = trait("", GEMM_PIPELINES)
    scheduler: str = trait("", ("intrawave", "interwave", "default"), default="intrawave")
    epilogue: str = trait("", ("cshuffle", "default"), default="cshuffle")
    pad_m: bool = trait("", (False, True), default=True)
    pad_n: bool = trait("", (False, True), default=True)
    pad_k: bool = trait("", (False, True), default=True)
    vector_a: int = trait("", (1, 2, 4, 8, 16), default=0)
    vector_b: int = trait("", (1, 2, 4, 8, 16), default=0)
    vector_c: int = trait("", (1, 2, 4, 8, 16), default=0)

    def __post_init__(self) -> None:
        self.check_choices()
        if min(self.tile) < 1:
            raise KernelError(f"the tile is {text(self.tile)}; its sides must be positive")
        for what, group in (
            ("the waves and the warp tile", (*self.wave, *self.warp_tile)),
            ("the vectors", (self.vector_a, self.vector_b, self.vector_c)),
        ):
            if 0 in group and any(group):
                raise KernelError(f"{what} are {group}; give all of them or none")

    @property
    def tile(self) -> Triple:
        return (self.tile_m, self.tile_n, self.tile_k)

    @property
    def wave(self) -> Triple:
        """Waves along m, n and k; zeros where the name does not say."""
        return (self.wave_m, self.wave_n, self.wave_k)

    @property
    def warp_tile(self) -> Triple:
        """What one wave computes at a time; zeros where the name does not say."""
        return (self.warp_tile_m, self.warp_tile_n, self.warp_tile_k)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: `check` gives the broken rule or None, once any trait of `after` is set.

    While a config is expanded, the traits behind the last one set are still missing.
    """

    check: Callable[[Values, Arch], str | None]
    after: frozenset[str]


def rule(check: Callable[[Values, Arch], str | None], *after: str) -> Rule:
    return Rule(check, frozenset(after))


def text(triple: Iterable[int]) -> str:
    """A triple as CK Tile writes it, 128x64x32."""
    return "x".join(map(str, triple))


@cache
def _names(kind: type[Kernel]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def values_of(kernel: Kernel) -> dict[str, Any]:
    """Field -> value."""
    return {name: getattr(kernel, name) for name in _names(type(kernel))}


def first_broken(rules: Iterable[Rule], kernel: Kernel, arch: Arch) -> str | None:
    """The first rule that the kernel breaks on the architecture, or None."""
    values = values_of(kernel)
    for r in rules:
        why = r.check(values, arch)
        if why is not None:
            return why
    return None


def by_trait(rules: Iterable[Rule]) -> dict[str, tuple[Rule, ...]]:
    """Trait -> the rules to look at once it is set."""
    every = tuple(rules)
    return {name: tuple(r for r in every if name in r.after) for r in every for name in r.after}


def is_dead_end(rules: Mapping[str, tuple[Rule, ...]], values: dict[str, Any], arch: Arch) -> bool:
    """Whether the trait set last breaks a rule already, whatever the traits behind it will be."""
    newest = next(reversed(values))
    return any(r.check(values, arch) is not None for r in rules.get(newest, ()))


def _lds_bytes(v: Values) -> int:
    staged = (v["tile_m"] + v["tile_n"]) * v["tile_k"] * dtype(v["dtype"]).bytes
    pipeline = v["pipeline"]
    if pipeline in ALWAYS_TWO_BUFFERS:
        return int(2 * staged)
    doubled = v.get("double_smem_buffer", False) and pipeline not in ALWAYS_ONE_BUFFER
    return int(staged * (2 if doubled else 1))


def _arch(v: Values, arch: Arch) -> str | None:
    if arch.vendor != "amd" or not arch.warp_splits:
        return f"CK Tile's kernels run on AMD's matrix cores, not on {arch.name}"
    if v["dtype"] not in arch.matrix_instructions:
        have = ", ".join(arch.matrix_instructions)
        return f"{arch.name} has no matrix instructions for {v['dtype']}; it has {have}"
    return None


def _least_tile(v: Values, least: Triple) -> str | None:
    if v.get("pipeline") in PRESHUFFLE:
        least = LEAST_PRESHUFFLED
    for axis, size in zip(TILE, least, strict=True):
        if axis in v and v[axis] < size:
            return f"{axis} is {v[axis]}; it must be at least {size}"
    return None


def _waves(v: Values, arch: Arch) -> str | None:
    given = tuple(v[axis] for axis in WAVE if axis in v)
    if not any(given) or any(split[: len(given)] == given for split in arch.warp_splits):
        return None
    return (
        f"{arch.name} has no wave split {text(given)}; "
        f"it has {', '.join(map(text, arch.warp_splits))}"
    )


def _warp_tile(v: Values, arch: Arch) -> str | None:
    given = tuple(v[axis] for axis in WARP_TILE if axis in v)
    if not any(given):
        return None
    tiles = warp_tiles(arch, v["dtype"], v.get("pipeline", ""))
    if any(tile[: len(given)] == given for tile in tiles):
        return None
    return (
        f"{arch.name} has no warp tile {text(given)} for {v['dtype']}; "
        f"it has {', '.join(map(text, tiles))}"
    )


def warp_tiles(arch: Arch, element: str, pipeline: str = "") -> tuple[Triple, ...]:
    """Warp tiles of an element type; without a pipeline, those of any."""
    tiles = arch.matrix_instructions.get(element, ())
    if pipeline and pipeline not in PRESHUFFLE:
        return tiles
    # Preshuffled operands have two more on gfx950 and cannot use the flattest one.
    more: tuple[Triple, ...] = ()
    if arch.name == "gfx950" and element in ("fp16", "bf16"):
        more = ((32, 32, 32), (16, 16, 64))
    if not pipeline:
        return (*tiles, *more)
    return tuple(t for t in (*tiles, *more) if t != (4, 64, 16))


def _divides(v: Values, arch: Arch) -> str | None:
    for tile, wave, step in zip(TILE, WAVE, WARP_TILE, strict=True):
        part = v.get(wave, 0) * v.get(step, 1)
        if part and v[tile] % part:
            return f"{tile} is {v[tile]}, which {wave} x {step} = {part} does not divide"
    return None


def _some_split(v: Values, arch: Arch) -> str | None:
    if v.get("wave_m", 1) or _fits(arch, v["dtype"], tuple(v[axis] for axis in TILE)):
        return None
    return f"no wave split and warp tile of {arch.name} divides {text(v[axis] for axis in TILE)}"


@lru_cache(maxsize=4096)
def _fits_parts(parts: tuple[Triple, ...], tile: Triple) -> bool:
    return any(all(t % p == 0 for t, p in zip(tile, part, strict=True)) for part in parts)


def _fits(arch: Arch, element: str, tile: tuple[int, ...]) -> bool:
    parts = tuple(
        (wave[0] * step[0], wave[1] * step[1], wave[2] * step[2])
        for wave in arch.warp_splits
        for step in arch.matrix_instructions.get(element, ())
    )
    return _fits_parts(parts, (tile[0], tile[1], tile[2]))


def _scheduler(v: Values, arch: Arch) -> str | None:
    # CK Tile's generator of May 2026 lets basic_async_v1 through; its later sources, and
    # every published kernel list, have interwave for mem and basic alone.
    if v["scheduler"] == "interwave" and v["pipeline"] not in INTERWAVE:
        return f"interwave is for {', '.join(INTERWAVE)}, not for {v['pipeline']}"
    return None


def _lds(v: Values, arch: Arch) -> str | None:
    # The architecture's own size: a fixed 64 KiB would refuse what fits gfx950's 160.
    need = _lds_bytes(v)
    if need > arch.smem_per_block_bytes:
        return f"it needs {need} bytes of LDS; {arch.name} has {arch.smem_per_block_bytes}"
    return None


def _vectors(v: Values, arch: Arch) -> str | None:
    for name in ("vector_a", "vector_b", "vector_c"):
        if v.get(name, 0) > 1 and v[name] % 2:
            return f"{name} is {v[name]}; vectors are 1 or even"
    return None


def common_rules(least: Triple) -> tuple[Rule, ...]:
    """The rules of all kernels; of those that preshuffle nothing, no tile is below `least`."""
    return (
        rule(_arch, "dtype"),
        rule(lambda v, arch: _least_tile(v, least), *TILE, "pipeline"),
        rule(_some_split, "wave_m"),
        rule(_waves, *WAVE),
        rule(_warp_tile, *WARP_TILE, "pipeline"),
        rule(_divides, *WAVE, *WARP_TILE),
        rule(_lds, "pipeline", "double_smem_buffer"),
        rule(_scheduler, "scheduler"),
        rule(_vectors, "vector_a", "vector_b", "vector_c"),
    )
