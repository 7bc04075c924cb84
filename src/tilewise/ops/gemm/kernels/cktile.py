"""CK Tile's GEMM kernels, by the names its tile engine and dispatcher give them.

    gemm_universal_fp16_rcr_compv4_cshuffle_intrawave_False_False_False_False_256x256x64_2x2x1_32x32x16

is family, dtype, layout, pipeline, epilogue, scheduler, padding of m, n and k, persistence, tile,
waves and warp tile; `_vecA_B_C` and `_preshuffle` may follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.errors import KernelError
from tilewise.ops.cktile_rules import (
    DTYPES,
    GEMM_PIPELINES,
    PRESHUFFLE,
    CkTileKernel,
    Values,
    by_trait,
    common_rules,
    first_broken,
    is_dead_end,
    rule,
    text,
)
from tilewise.ops.gemm.problem import LAYOUTS, GemmProblem

FAMILIES = ("gemm_universal", "gemm", "gemm_preshuffle")
"""First word of a name: the tile engine's two, and the dispatcher's."""

_FLAGS = ("pad_m", "pad_n", "pad_k", "persistent")
_NAME = re.compile(
    rf"(?P<family>{'|'.join(FAMILIES)})_(?P<dtype>{'|'.join(DTYPES)})_(?P<layout>{'|'.join(LAYOUTS)})"
    rf"_(?P<pipeline>{'|'.join(GEMM_PIPELINES)})_(?P<epilogue>cshuffle|default)"
    r"_(?P<scheduler>intrawave|interwave|default)"
    + "".join(rf"_(?P<{flag}>True|False)" for flag in _FLAGS)
    + "".join(
        rf"_(?P<{what}_m>\d+)x(?P<{what}_n>\d+)x(?P<{what}_k>\d+)"
        for what in ("tile", "wave", "warp_tile")
    )
    + r"(?:_vec(?P<vector_a>\d+)_(?P<vector_b>\d+)_(?P<vector_c>\d+))?(?P<preshuffled>_preshuffle)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CkTileGemmKernel(CkTileKernel):
    """One GEMM kernel of CK Tile; vectors of 0 are the pipeline's own choice."""

    layout: str = trait("", LAYOUTS)
    persistent: bool = trait("", (False, True), default=False)
    family: str = trait("", FAMILIES, default="gemm_universal")
    preshuffled: bool = trait("", (False, True), default=False)

    def __post_init__(self) -> None:
        CkTileKernel.__post_init__(self)
        if 0 in self.wave:
            raise KernelError("a CK Tile GEMM has waves and a warp tile; both are missing")

    @property
    def problem_layout(self) -> str:
        return self.layout

    @classmethod
    def only_op(cls) -> str:
        return "gemm"

    @classmethod
    def prefix(cls, op: str) -> str:
        return "gemm_universal_"

    @property
    def name(self) -> str:
        words = [self.family, self.dtype, self.layout, self.pipeline, self.epilogue, self.scheduler]
        words += [str(getattr(self, flag)) for flag in _FLAGS]
        words += [text(self.tile), text(self.wave), text(self.warp_tile)]
        if self.vector_a:
            words.append(f"vec{self.vector_a}_{self.vector_b}_{self.vector_c}")
        if self.preshuffled:
            words.append("preshuffle")
        return "_".join(words)

    @classmethod
    def from_name(cls, name: str) -> Self:
        found = _NAME.fullmatch(name)
        if not found:
            raise KernelError(
                f"{name!r} is not the name of a CK Tile GEMM: {'|'.join(FAMILIES)}, dtype, layout, "
                "pipeline, epilogue, scheduler, four True or False, tile, waves, warp tile"
            )
        values: dict[str, Any] = {}
        for key, part in found.groupdict().items():
            if part is None:
                continue
            values[key] = int(part) if part.isdigit() else part
            if key in _FLAGS:
                values[key] = part == "True"
        values["preshuffled"] = found["preshuffled"] is not None
        return cls.spelled(name, values)

    @classmethod
    def is_dead_end(cls, values: dict[str, Any], arch: Arch) -> bool:
        return is_dead_end(_RULES_BY_TRAIT, values, arch)


def _preshuffle(v: Values, arch: Arch) -> str | None:
    if v["pipeline"] == "preshufflev1":
        return "CK Tile builds preshufflev2 only"
    wants = v.get("preshuffled", False) or v.get("family") == "gemm_preshuffle"
    if wants and v["pipeline"] not in PRESHUFFLE:
        return f"a preshuffled operand needs preshufflev2, not {v['pipeline']}"
    return None


RULES = (*common_rules((16, 16, 8)), rule(_preshuffle, "pipeline", "family", "preshuffled"))
_RULES_BY_TRAIT = by_trait(RULES)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps a CK Tile kernel from `problem` on `arch`, or None."""
    assert isinstance(kernel, CkTileGemmKernel)
    broken = first_broken(RULES, kernel, arch)
    if broken or not isinstance(problem, GemmProblem):
        return broken
    if problem.batch != 1:
        return f"it computes one product, not a batch of {problem.batch}"
    for what in ("dtype", "layout"):
        if getattr(problem, what) != getattr(kernel, what):
            return f"its {what} is {getattr(kernel, what)}, not {getattr(problem, what)}"
    return _misfit(kernel, problem)


def _misfit(kernel: CkTileGemmKernel, problem: GemmProblem) -> str | None:
    """Only the contiguous side of each matrix must fill its tile, or be padded by the kernel."""
    order = kernel.layout
    sides = (
        ("m" if order[0] == "c" else "k", kernel.vector_a),
        ("n" if order[1] == "r" else "k", kernel.vector_b),
        ("m" if order[2] == "c" else "n", kernel.vector_c),
    )
    for side, vector in sides:
        size = getattr(problem, side)
        whole = getattr(kernel, f"tile_{side}") * (problem.split_k if side == "k" else 1)
        if size % whole and not getattr(kernel, f"pad_{side}"):
            return f"{side.upper()} is {size}, no multiple of {whole}, and pad_{side} is off"
        if vector and size % vector:
            return f"{side.upper()} is {size}, no multiple of the vector of {vector}"
    return None
