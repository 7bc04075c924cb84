"""GEMM kernels in Triton that load tiles through pointers: any stride, any GPU."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.gemm.kernels.gpu import (
    GpuGemmKernel,
    flag,
    sliced,
    why_not_held,
    why_not_multiplied,
    why_not_pipelined,
)
from tilewise.ops.gemm.problem import GemmProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerGemmKernel(GpuGemmKernel):
    """One GEMM through pointers.

    `pointer` takes whole tiles; `splitk` cuts the reduction; `streamk` hands out equal shares of
    all steps; `skinny` puts the longer of M and N on the matrix unit's rows.
    """

    family: str = trait(
        "", ("pointer", "splitk", "streamk", "skinny"), doc="how work is handed out"
    )
    split_k: int = sliced()
    atomic: bool = flag("atomic", "slices added by atomics")

    def broken(self) -> str | None:
        if self.family in ("pointer", "streamk") and self.split_k > 1:
            return f"split_k is {self.split_k}; it is for splitk and skinny kernels"
        if self.atomic and self.split_k == 1:
            return "atomic is for kernels with split_k above 1"
        return None

    def swaps(self, problem: GemmProblem) -> bool:
        return self.family == "skinny" and problem.m < problem.n

    @property
    def usual(self) -> GemmProblem:
        m = self.tile_n if self.family == "skinny" else 4096
        return GemmProblem(m=m, n=4096, k=max(4096, self.tile_k), dtype=self.dtype)

    def why_not_on(self, arch: Arch) -> str | None:
        return why_not_multiplied(self, arch) or why_not_pipelined(self, arch)

    def why_not_for(self, problem: GemmProblem, arch: Arch) -> str | None:
        p = problem
        rows, columns = self.tiles(p)
        if self.family == "streamk" and rows * columns * p.batch * -(-p.k // self.tile_k) >= 2**31:
            return "the steps cannot be counted in 31 bits"
        if self.family == "skinny" and min(p.m, p.n) > self.tile_n:
            return f"min(M, N) is {min(p.m, p.n)}, above tile_n={self.tile_n}"
        return why_not_held(self, p, arch)
