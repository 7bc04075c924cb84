"""GEMM kernels in Triton for a few vectors, on the vector units."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel, sliced
from tilewise.ops.gemm.problem import GemmProblem

MAX_VECTORS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvKernel(GpuGemmKernel):
    """One product of a matrix with up to four vectors; the longer of M and N is the matrix's."""

    family: str = trait("", ("gemv",))
    split_k: int = sliced()

    def swaps(self, problem: GemmProblem) -> bool:
        return problem.m < problem.n

    @property
    def usual(self) -> GemmProblem:
        return GemmProblem(m=1, n=4096, k=max(4096, self.tile_k), dtype=self.dtype)

    def why_not_on(self, arch: Arch) -> str | None:
        return None

    def why_not_for(self, problem: GemmProblem, arch: Arch) -> str | None:
        p = problem
        if min(p.m, p.n) > MAX_VECTORS or p.dtype == "int8":
            return f"min(M, N) is {min(p.m, p.n)} in {p.dtype}; gemv takes up to {MAX_VECTORS}"
        return None
