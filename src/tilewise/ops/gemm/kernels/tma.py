"""GEMM kernels in Triton whose tiles Hopper's tensor memory accelerator copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.gemm.kernels.gpu import (
    GpuGemmKernel,
    why_not_along_k,
    why_not_copied,
    why_not_multiplied,
    why_not_pipelined,
)
from tilewise.ops.gemm.problem import GemmProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaGemmKernel(GpuGemmKernel):
    """One GEMM by Triton's own TMA pipeline."""

    copies_by_tma: ClassVar[bool] = True

    family: str = trait("", ("tma",))

    def swaps(self, problem: GemmProblem) -> bool:
        """Of tf32 an operand across K must be the one in registers."""
        return self.dtype == "tf32" and problem.layout == "rrr"

    def why_not_on(self, arch: Arch) -> str | None:
        return why_not_multiplied(self, arch) or why_not_pipelined(self, arch)

    def why_not_for(self, problem: GemmProblem, arch: Arch) -> str | None:
        return why_not_copied(problem) or why_not_along_k(problem, free_bytes=(2, 4))
