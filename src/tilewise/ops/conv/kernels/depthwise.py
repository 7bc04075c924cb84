"""CUDA kernels for depthwise convolutions on the matrix units: what one is, what it can serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.conv.kernels.directed import CudaConvKernel
from tilewise.ops.conv.kernels.few_channels import (
    MOST_BOX,
    MOST_COUNTED,
    why_not_counted,
    why_not_shared,
    why_not_tma,
    why_not_typed,
)
from tilewise.ops.conv.patches import corners, extent, why_not_backward
from tilewise.ops.conv.problem import ConvProblem

WARP_CHANNELS = 8
MOST_REGISTERS = 248
MOST_WORK = 390
"""Rows of a patch, columns of products and taps: each product is an instruction of its own, and a
compiler that unrolls more takes minutes or spills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseConvKernel(CudaConvKernel):
    """One kernel whose products are diagonal in the channel and Toeplitz in the rows.

    A tile is `tile_h` x `tile_w` pixels of the result (of the gradient's phases, backward) and
    `channels` channels, eight for each warp. Products multiply neighbouring channels by zero, so an
    Inf or NaN spreads over eight of them.
    """

    family: str = trait("", ("depthwise",))
    dtype: str = trait("", ("bf16", "fp16"))
    tile_h: int = trait("h", (2, 4, 8, 14, 16, 28))
    tile_w: int = trait("w", (8, 16, 32))
    channels: int = trait("c", (16, 32, 64))
    stages: int = trait("s", (1, 2, 3), default=1, doc="tiles in flight, of a filter's gradient")
    blocks: int = trait("b", (1, 2, 3, 4, 6, 8), doc="blocks a multiprocessor holds")
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")
    spreads_nonfinite: bool = trait("spreads", (True,), default=True)

    def rules(self) -> dict[str, bool]:
        return {
            "channels are 16, 32 or 64": self.channels not in (16, 32, 64),
            "stages and blocks are at least 1": min(self.stages, self.blocks) < 1,
            "it does not spread by chance": not self.spreads_nonfinite,
            "rows come in pairs": not self.is_weight and (self.tile_h < 2 or self.tile_h % 2 != 0),
            "tiles have rows": self.tile_h < 1,
            "pixels come by eight": self.tile_w < 8 or self.tile_w % 8 != 0,
            "gradients of filters reduce over 16 pixels of a row": self.is_weight
            and self.tile_w % 16 != 0,
            "stages and atomic are for gradients of filters": not self.is_weight
            and (self.stages > 1 or self.atomic),
        }

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done at once."""
        pixels = self.tile_h * self.tile_w
        return (self.channels, 1, pixels) if self.is_weight else (pixels, self.channels, 2)

    @property
    def warps(self) -> int:
        return self.channels // WARP_CHANNELS


def as_rows(problem: ConvProblem) -> ConvProblem:
    """A problem of one dimension with its images as rows, since rows come in pairs."""
    p = problem
    if p.ndim > 1:
        return p
    return replace(p, n=1, h=p.n, stride_h=1, dilation_h=1)


def patch(k: DepthwiseConvKernel, p: ConvProblem) -> tuple[int, int, int]:
    """Pixels that a copy brings: depth, height, width."""
    if k.is_weight:
        return 1, extent(p, "h", k.tile_h), extent(p, "w", k.tile_w)
    return 1, 4, -(-extent(p, "w", k.tile_w) // 2) * 2


def written(k: DepthwiseConvKernel, p: ConvProblem) -> tuple[int, int, int]:
    """Pixels of the result that a tile is: backward, each place has one for each phase."""
    is_back = p.direction == "bwd_data"
    return (
        1,
        k.tile_h * (p.stride_h if is_back else 1),
        k.tile_w * (p.stride_w if is_back else 1),
    )


def tiles(k: DepthwiseConvKernel, p: ConvProblem) -> tuple[int, int, int, int]:
    """How many blocks lie over channels, columns, rows and depths of an image."""
    deep, down, across = (corners(p, dim)[1] for dim in "dhw")
    return -(-p.c // k.channels), -(-across // k.tile_w), -(-down // k.tile_h), deep


def smem_bytes(k: DepthwiseConvKernel, p: ConvProblem) -> int:
    """Shared memory of a block, with what aligning it takes."""
    deep, down, across = patch(k, p)
    _, height, width = written(k, p)
    result = height * width * 2 * k.channels
    copied = deep * down * across * 2 * k.channels
    if k.is_weight:
        stage = _kilobytes(copied) + _kilobytes(result)
        return 1024 + k.stages * (stage + 8)
    quads = -(-extent(p, "h", k.tile_h) // 4)
    return 1024 + _kilobytes(p.z * quads * copied) + result + 8 * quads


def _kilobytes(size: int) -> int:
    return -(-size // 1024) * 1024


def registers(k: DepthwiseConvKernel, p: ConvProblem) -> int:
    """What a thread needs at least, as compiled."""
    if k.is_weight:
        return 4 * tap_pairs(p) * p.x + 2 * ((p.y - 1) * p.dilation_h // p.stride_h + 1) + 56
    is_back = p.direction == "bwd_data"
    step = 1 if is_back else p.stride_h
    reach = extent(p, "h", 1) - 1
    phases = p.stride_h * p.stride_w if is_back else 1
    open_pairs = (step + reach) // 2 // step + 2
    # Operands lie side by side, so each tap is held about twice.
    return 2 * (p.taps + p.x + 4 * open_pairs * phases * (k.tile_w // 8)) + 8


def tap_pairs(p: ConvProblem) -> int:
    """Pairs of taps that rows of the image feed together."""
    return p.stride_h * ((-(-p.y // p.stride_h) + 1) // 2)


def work(k: DepthwiseConvKernel, p: ConvProblem) -> int:
    """A measure of the instructions that a tile is unrolled to."""
    if k.is_weight:
        return k.tile_h * (k.tile_w // 16) * tap_pairs(p) * p.x
    return extent(p, "h", k.tile_h) * (k.tile_w // 8) * p.x


def why_unusable(
    kernel: DepthwiseConvKernel, problem: ConvProblem | None, arch: Arch
) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    reason = why_not_tma(arch)
    if reason or problem is None:
        return reason
    reason = why_not_typed(kernel, problem) or _why_not_meant(kernel, problem)
    if reason:
        return reason
    rows = as_rows(problem)
    return why_not_backward(rows) or _why_large(kernel, rows, arch)


def _why_not_meant(k: DepthwiseConvKernel, p: ConvProblem) -> str | None:
    if not p.c == p.k == p.g or p.c < 2:
        return "it is for groups of one channel"
    return "TMA copies rows of multiples of 8 channels" if p.c % 8 else None


def _why_large(k: DepthwiseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    if max(*patch(k, p), *written(k, p)) > MOST_BOX:
        return f"a patch is longer than TMA's {MOST_BOX} pixels"
    if reason := why_not_counted(p):
        return reason
    is_long = p.input_elements >= MOST_COUNTED and not k.is_weight
    if is_long and p.n * prod(tiles(k, p)) >= MOST_COUNTED:
        return "a grid has less than 2^31 blocks"
    needed = registers(k, p)
    threads = 32 * k.warps * k.blocks
    room = min(MOST_REGISTERS, arch.registers_per_cu // threads // 8 * 8)
    if needed > room:
        return f"a thread takes {needed} registers of {room}"
    if work(k, p) > MOST_WORK:
        return f"so many products cannot be unrolled: {work(k, p)} of {MOST_WORK}"
    return why_not_shared(k, smem_bytes(k, p), arch)
