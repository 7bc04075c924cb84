"""GEMM kernels in Triton for short reductions."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import trait
from tilewise.ops.gemm.kernels.gpu import (
    GpuGemmKernel,
    flag,
    held_stages,
    why_not_held,
    why_not_multiplied,
    why_not_stored,
)
from tilewise.ops.gemm.problem import GemmProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallKGemmKernel(GpuGemmKernel):
    """One GEMM that takes all of K in one step and keeps a tile of B while A streams past."""

    family: str = trait("", ("smallk",))
    swap: bool = flag("swap", "computes the transpose")

    @property
    def usual(self) -> GemmProblem:
        m = self.tile_n if self.swap else 4096
        return GemmProblem(m=m, n=4096, k=self.tile_k, dtype=self.dtype)

    def why_not_on(self, arch: Arch) -> str | None:
        if self.dtype == "fp32":
            return "exact fp32 products of all of K at once spill"
        row, held = self.tile_k * element(self.dtype).bytes, held_stages(self, arch)
        needed = (held * self.tile_m + self.tile_n) * row  # the tile of B stays
        return why_not_multiplied(self, arch) or why_not_stored(needed, held, arch)

    def why_not_for(self, problem: GemmProblem, arch: Arch) -> str | None:
        return self._why_not_whole(problem) or why_not_held(self, problem, arch)

    def _why_not_whole(self, problem: GemmProblem) -> str | None:
        """All of K must fit in a step, and what a thread holds of narrow rows in its registers."""
        p, lanes = problem, 32 * self.warps
        if p.k > self.tile_k:
            return f"K is {p.k}; all of it must fit in one step of {self.tile_k}"
        if self.swap != (p.m < p.n):
            return "the longer of M and N streams past the shorter"
        size = element(p.dtype).bytes
        rows = (p.k if p.layout[0] == "r" else p.m, p.n if p.layout[1] == "r" else p.k)
        stored = p.n * element(p.out_dtype).bytes
        is_whole = stored % 16 == 0 and not any(r * size % 16 for r in rows)
        if self.tile_m * self.tile_n > 64 * lanes and not is_whole:
            return "so wide a tile would spill where rows are no multiples of 16 bytes"
        held = self.tile_m * (self.tile_n + self.tile_k) // lanes
        if held > 80 and p.layout != "rcr" and not is_whole:
            return (
                f"{held} values a lane would spill where rows across K are no multiples of 16 bytes"
            )
        return None
