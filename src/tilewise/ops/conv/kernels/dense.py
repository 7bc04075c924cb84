"""Dense convolution kernels in CUDA C++ for Hopper: what one is, and what it can serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.conv.kernels import dense_rules
from tilewise.ops.conv.kernels.directed import CudaConvKernel
from tilewise.ops.conv.problem import ConvProblem

FAMILIES = ("im2col", "rows", "gather", "halo", "taps")
DTYPES = ("bf16", "fp16", "tf32")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConvKernel(CudaConvKernel):
    """One warp-specialised product: load warps fill a ring of stages, math groups multiply.

    How the load warps find the pixels:
    im2col  TMA walks the pixels of the convolution, padding and strides included
    rows    TMA copies rows of a matrix: 1x1 filters over all pixels
    gather  every thread of the load warps computes its addresses; serves any channels and strides
    taps    as im2col, several taps of up to 32 channels in a step
    halo    TMA copies patches of the image with their rim once, and the taps read them shifted

    A tile is pixels x channels of the result; of the gradient of the filter, filters x entries
    (taps and channels in one row), or with halo filters x channels for all taps at once.
    """

    family: str = trait("", FAMILIES, doc="how load warps find the pixels")
    dtype: str = trait("", DTYPES, doc="operand type")
    tile_m: int = trait("m", (64, 128, 192, 256))
    tile_n: int = trait("n", (32, 64, 96, 128, 192, 256))
    tile_k: int = trait("k", (32, 64, 128, 256), default=64, doc="of the reduction in a step")
    stages: int = trait("s", (2, 3, 4, 5, 6, 7, 8), doc="steps of the reduction in flight")
    math_groups: int = trait("g", (1, 2, 3), default=2, doc="groups of four math warps")
    load_warps: int = trait("l", (1, 2, 4, 8), default=1)
    pingpong: bool = trait(
        "pingpong", (False, True), default=False, doc="math groups take turns, a tile each"
    )
    cluster: int = trait("c", (1, 2), default=1, doc="blocks that send each other what they share")
    share: str = trait("", ("filter", "pixels"), default="filter", doc="what a cluster shares")
    persistent: bool = trait(
        "persistent", (False, True), default=False, doc="as many blocks as run at once"
    )
    blocks: int = trait("b", (1, 2, 3), default=1, doc="blocks a multiprocessor holds")
    fill: int = trait(
        "f", (0, 1, 2, 4), default=0, doc="waves that slices of the reduction fill; 0: no slices"
    )
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")

    def rules(self) -> dict[str, Any]:
        return dense_rules.rules(self)

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done in a step."""
        return self.tile_m, self.tile_n, self.tile_k

    @property
    def warps(self) -> int:
        """Math warps of a block."""
        return 4 * self.math_groups

    @property
    def threads(self) -> int:
        """Load warps come as a whole group where registers move from them to the math groups."""
        load_groups = -(-self.load_warps // 4)
        moves = load_groups + self.math_groups > 2
        return 128 * self.math_groups + (128 * load_groups if moves else 32 * self.load_warps)

    @property
    def sums(self) -> int:
        """Registers that a thread's sums take; of halo gradients, for three taps of a line."""
        if self.family == "halo" and self.is_weight:
            return 3 * self.tile_n // 2
        groups = 1 if self.pingpong else self.math_groups
        return -(-self.tile_m * self.tile_n // (128 * groups))

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + dense_rules.filter_rows(self)) * dense_rules.ROW_BYTES

    def alignment(self, problem: ConvProblem) -> tuple[int, ...]:
        """TMA copies rows of multiples of 16 bytes; other counts of channels are padded."""
        return dense_rules.alignment(self) if problem.layout == "nhwc" else ()


def why_unusable(kernel: DenseConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    reason = dense_rules.why_not_on(kernel, arch)
    return reason or (dense_rules.why_not_for(kernel, problem, arch) if problem else None)
