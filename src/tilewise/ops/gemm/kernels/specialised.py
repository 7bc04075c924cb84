"""GEMM kernels in Gluon for Hopper: a warp of its own copies tiles by TMA, the others multiply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import trait
from tilewise.ops.gemm.kernels.gpu import (
    MAX_SWAPPED_ROWS,
    GpuGemmKernel,
    flag,
    sliced,
    why_not_along_k,
    why_not_copied,
)
from tilewise.ops.gemm.problem import GemmProblem

RESERVED_SMEM = 1024
"""What the system keeps of shared memory for every block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialisedGemmKernel(GpuGemmKernel):
    """What kernels with a copying warp have in common."""

    copies_by_tma: ClassVar[bool] = True

    swap: bool = flag("swap", "computes the transpose")

    @property
    def groups(self) -> int:
        """Groups of math warps that share a tile."""
        return 1

    @property
    def columns(self) -> tuple[int, int]:
        """tile_n as a power of two and the rest, which is 0 for most kernels."""
        wide = 1 << max(0, self.tile_n.bit_length() - 1) if self.tile_n else 0
        return wide, self.tile_n - wide

    def why_not_on(self, arch: Arch) -> str | None:
        if self.dtype == "fp32":
            return "warpgroup products have no exact fp32"
        if self.tile_m % (16 * self.warps * self.groups):
            warps = self.warps * self.groups
            return f"tile_m must be a multiple of 16 rows for each of {warps} warps"
        if reason := self.why_not_grouped():
            return reason
        if self.dtype == "int8" and self.tile_n > 128:
            return "int8 warpgroup products are at most 128 columns wide"
        if self.warps > 4 and self.blocks > 1:
            return "two groups of math warps fill a multiprocessor's registers"
        if self.tile_k * element(self.dtype).bytes < 64:
            return "a step is shorter than a row of swizzled shared memory"
        room = {1: 192, 2: 128, 3: 64, 4: 32}.get(self.blocks, 0)
        if self.tile_m * self.tile_n // (32 * self.warps * self.groups) > room:
            return f"{self.blocks} blocks leave {room} accumulators per thread"
        if staging(self, 2, arch) is None:
            return f"{self.stages} stages of {self.stage_bytes} bytes do not fit in shared memory"
        return None

    def why_not_grouped(self) -> str | None:
        """Whether the math warps are cut into groups as the family wants."""
        return None

    def why_not_for(self, problem: GemmProblem, arch: Arch) -> str | None:
        p = problem
        if self.swap and p.m > MAX_SWAPPED_ROWS and not self.columns[1]:
            return f"swapping pays for few rows; M={p.m} is above {MAX_SWAPPED_ROWS}"
        return why_not_copied(p) or why_not_along_k(p, free_bytes=(2,))


@dataclass(frozen=True, slots=True, kw_only=True)
class WsGemmKernel(SpecialisedGemmKernel):
    """One GEMM whose math warps share a tile in step; a reduction may be cut."""

    powers: ClassVar[tuple[str, ...]] = ("tile_m", "tile_k", "warps")

    family: str = trait("", ("ws",))
    tile_n: int = trait("n", (16, 32, 64, 80, 96, 128, 144, 160, 192, 256, 320))
    split_k: int = sliced()
    fill: bool = flag("fill", "cuts the last wave's tiles")

    def broken(self) -> str | None:
        wide, extra = self.columns
        if wide < 1 or extra & (extra - 1) or 0 < extra < 16:
            return f"tile_n is {self.tile_n}; it must be a sum of two powers of two from 16 on"
        if self.fill and self.split_k > 1:
            return "fill is for kernels with split_k=1"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoGroupGemmKernel(SpecialisedGemmKernel):
    """One GEMM of two groups of four math warps each, which do not wait for each other.

    Those of a `duo` share each tile; those of `pingpong` alternate.
    """

    family: str = trait("", ("duo", "pingpong"), doc="what the two groups share")

    @property
    def groups(self) -> int:
        return 2 if self.family == "duo" else 1

    def why_not_grouped(self) -> str | None:
        return "each of the two groups has 4 warps" if self.warps != 4 else None


def staging(kernel: SpecialisedGemmKernel, out_bytes: int, arch: Arch) -> tuple[int, int] | None:
    """(parts, buffers) of the shared memory a tile of C passes through, or None if none fits.

    A whole tile drains while the next is computed; less memory means more, smaller parts.
    """
    rings = 2 if kernel.family == "pingpong" else 1  # a duo's two rings hold half a tile each
    room = min(arch.smem_per_block_bytes, arch.smem_bytes // kernel.blocks - RESERVED_SMEM)
    room -= kernel.stages * (kernel.stage_bytes + 16) + 512
    _, extra = kernel.columns
    if extra:
        for narrow, buffers in ((extra, 2), (extra // 2, 2), (extra, 1), (extra // 2, 1)):
            if narrow >= 16 and kernel.tile_m * narrow * out_bytes * buffers <= room:
                return kernel.tile_n // narrow, buffers
        return None
    whole = kernel.tile_m * kernel.tile_n * out_bytes * rings
    for parts, buffers in ((1, 1), (4, 2), (2, 1), (8, 2), (4, 1), (8, 1)):
        if kernel.tile_n // parts >= min(16, kernel.tile_n) and whole * buffers // parts <= room:
            return parts, buffers
    return None
