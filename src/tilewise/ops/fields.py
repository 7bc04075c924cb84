"""The raw values that features are built from: a problem's, a kernel's and an architecture's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from tilewise.core.arch import Arch, load_arch
from tilewise.core.dtypes import DTYPES
from tilewise.core.features import Field
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import json_object
from tilewise.core.problem import Problem
from tilewise.errors import ArchError
from tilewise.ops.vendor import LIBRARIES, TACTIC

ENGINES = ("cpu", "triton", "vendor", "ck_tile", "cuda", "ck")
DERIVED = ("tile_m", "tile_n", "tile_k", "efficiency", "lanes", "accumulators")
"""What kernels say about themselves beside their traits, where they do."""
SAID = (*DERIVED[3:], "load_warps")
"""The same without tiles, and traits of some kinds that follow from the others in other kinds."""
COMMON = (
    *("split_k", "stages", "warps", "blocks", "wave_m", "wave_n", "wave_k"),
    *("num_groups_to_merge", "block_per_cu", "double_smem_buffer", "two_stage", "group_m"),
)
"""Traits that shared helpers use, whether or not a kind of kernel has them."""
COMMON_TEXT = ("pipeline", "family")
ARCH_FIGURES = (
    *("compute_units", "clock_mhz", "warp_size", "simds_per_cu", "max_warps_per_cu"),
    *("registers_per_cu", "smem_bytes", "smem_per_block_bytes", "l1_bytes", "l2_bytes", "l3_bytes"),
    *("shader_engines", "num_xcd", "memory_gb_s", "launch_us"),
)
PEAKS = tuple(name for name in DTYPES if name != "int32")


def problem_fields(kind: type[Problem], words: Mapping[str, Sequence[str]]) -> tuple[Field, ...]:
    """One field per field of the problem; `words` lists the values of those that are text."""
    names = _problem_names(kind)
    return tuple(Field(name=f"p_{name}", words=tuple(words.get(name, ()))) for name in names)


def problem_values(problem: Problem, tactic: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Field -> value of one problem, and of what the vendor's library says about it."""
    values = {f"p_{name}": getattr(problem, name) for name in _problem_names(type(problem))}
    return values | {f"v_{name}": value for name, value in (tactic or {}).items()}


def tactic_fields() -> tuple[Field, ...]:
    """What a vendor's library can be asked; absent where it was not."""
    return tuple(Field(name=f"v_{name}") for name in TACTIC)


@cache
def _problem_names(kind: type[Problem]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def kernel_fields(kinds: Iterable[type[Kernel]]) -> tuple[Field, ...]:
    """Engine, derived values and every trait of every kind of kernel; text with all its words."""
    text: dict[str, dict[str, None]] = {name: {} for name in COMMON_TEXT}
    numbers: dict[str, None] = dict.fromkeys((*DERIVED, *COMMON))
    for kind in kinds:
        for trait in kind.traits():
            choices = trait.metadata["choices"]
            if choices and isinstance(choices[0], str):
                text.setdefault(trait.name, {}).update(dict.fromkeys(map(str, choices)))
            elif trait.name not in text:
                numbers.setdefault(trait.name)
    text["library"] = dict.fromkeys(LIBRARIES)
    return (
        Field(name="k_engine", words=ENGINES),
        *(Field(name=f"k_{name}") for name in numbers if name not in text),
        *(Field(name=f"k_{name}", words=tuple(words)) for name, words in text.items()),
    )


def kernel_values(kernel: Kernel) -> dict[str, Any]:
    """Field -> value of one kernel; traits of other kinds are left out."""
    values: dict[str, Any] = {"k_engine": kernel.engine}
    values |= dict(zip(("k_tile_m", "k_tile_n", "k_tile_k"), kernel.tile, strict=True))
    for name in SAID:
        if hasattr(kernel, name):
            values[f"k_{name}"] = getattr(kernel, name)
    for trait in kernel.traits():
        values[f"k_{trait.name}"] = getattr(kernel, trait.name)
    return values


def arch_fields() -> tuple[Field, ...]:
    """The figures that features use."""
    return (
        Field(name="a_kind", words=("cpu", "gpu")),
        *(Field(name=f"a_{name}") for name in ARCH_FIGURES),
        *(Field(name=f"a_peak_{name}") for name in PEAKS),
    )


def arch_values(arch: Arch) -> dict[str, Any]:
    """Field -> figure; a dtype without a peak of its own runs at that of fp32."""
    values: dict[str, Any] = {"a_kind": arch.kind}
    values |= {f"a_{name}": getattr(arch, name) for name in ARCH_FIGURES}
    fallback = arch.peak_tflops.get("fp32", 1.0)
    return values | {f"a_peak_{n}": arch.peak_tflops.get(n, fallback) for n in PEAKS}


def figures(arch: Arch) -> dict[str, Any]:
    """The figures that features use, JSON-ready, as `Arch.with_figures` takes them back."""
    return {
        **{name: getattr(arch, name) for name in ARCH_FIGURES},
        "peak_tflops": dict(arch.peak_tflops),
    }


def recorded_arch(name: str, device: str, text: str) -> Arch:
    """An architecture with the figures that a row of the store carries, checked."""
    given = json_object(text, "the figures of a row")
    known = {*ARCH_FIGURES, "peak_tflops"}
    if not set(given) <= known:
        strange = ", ".join(sorted(set(given) - known))
        raise ArchError(f"a row's figures have no {strange}; they have {', '.join(sorted(known))}")
    return Arch.from_dict({**load_arch(name).to_dict(), **given, "device": device})
