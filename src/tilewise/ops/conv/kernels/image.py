"""CUDA kernels for the gradient of a network's image: what one is, and what it can serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.conv.kernels.directed import CudaConvKernel
from tilewise.ops.conv.kernels.few_channels import (
    MOST_BOX,
    why_not_counted,
    why_not_shared,
    why_not_tma,
    why_not_typed,
)
from tilewise.ops.conv.patches import extent
from tilewise.ops.conv.problem import ConvProblem

OPS = ("conv_bwd_data",)
MOST_CHANNELS = 4
"""Of the image."""
WARPS = 4
ROWS = 16
"""Places of the gradient that are multiplied together."""
MOST_REGISTERS = 232
OTHER_REGISTERS = 112
"""Of a thread, for addresses and fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConvKernel(CudaConvKernel):
    """One kernel for gradients of images of 1 to 4 channels, by whole periods of the stride.

    A tile is `tile_h` x `tile_w` places of the gradient that is read. Pixels of a period share its
    products, which are zero where no tap reaches: an Inf or NaN spreads to its neighbours.
    """

    op_name: str = field(metadata={"choices": OPS})
    family: str = trait("", ("image",))
    dtype: str = trait("", ("bf16", "fp16"))
    tile_h: int = trait("h", (2, 4, 8))
    tile_w: int = trait("w", (16, 32))
    stages: int = trait("s", (1, 2, 3, 4), doc="patches in flight")
    blocks: int = trait("b", (1, 2, 3, 4), doc="blocks a multiprocessor holds")
    spreads_nonfinite: bool = trait("spreads", (True,), default=True)

    def rules(self) -> dict[str, bool]:
        is_other = self.op_name not in OPS or not self.spreads_nonfinite
        return {
            f"four warps take {ROWS} places of a line each": self.tile_w % ROWS > 0
            or self.tile_h * self.tile_w % (ROWS * WARPS) > 0,
            f"it computes {OPS[0]}, and spreads to neighbours": is_other,
        }

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done at once."""
        return self.tile_h * self.tile_w, 8, 64

    @property
    def warps(self) -> int:
        return WARPS

    @property
    def load_warps(self) -> int:
        return 1


def chunk(p: ConvProblem) -> int:
    """Channels of a patch: 64, or 32 where half of the last 64 would be filled with zeros."""
    return 32 if -(-p.k // 32) % 2 else 64


def patch(k: ImageConvKernel, p: ConvProblem) -> tuple[int, int]:
    """Lines and columns of the gradient that a tile reads."""
    return extent(p, "h", k.tile_h), extent(p, "w", k.tile_w)


def columns(p: ConvProblem) -> int:
    """Blocks of eight columns: the channels of a period's pixels."""
    return -(-p.stride_h * p.stride_w * p.c // 8)


def smem_bytes(k: ImageConvKernel, p: ConvProblem) -> int:
    """Shared memory of a block, with what aligning it takes."""
    size, (down, across) = chunk(p), patch(k, p)
    stage = -(-2 * size * down * across // 1024) * 1024
    shifts = extent(p, "h", 1) * extent(p, "w", 1)
    taps = -(-p.k // size) * size // 32 * shifts * columns(p) * 512
    return 1024 + k.stages * stage + taps + 16 * k.stages


def why_unusable(kernel: ImageConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    reason = why_not_tma(arch)
    if reason or problem is None:
        return reason
    return (
        why_not_typed(kernel, problem)
        or _why_not_meant(problem)
        or why_not_counted(problem)
        or _why_large(kernel, problem, arch)
    )


def _why_not_meant(p: ConvProblem) -> str | None:
    if p.c > MOST_CHANNELS or p.g != 1 or p.ndim == 3:
        return f"it is for images of up to {MOST_CHANNELS} channels, in one or two dimensions"
    if p.dilation_h > 1 or p.dilation_w > 1:
        return "it takes no dilation"
    return "TMA copies rows of multiples of 8 channels" if p.k % 8 else None


def _why_large(k: ImageConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    if max(patch(k, p)) > MOST_BOX:
        return f"a patch is longer than TMA's {MOST_BOX} pixels"
    sums = k.tile_h * k.tile_w // (ROWS * WARPS) * columns(p) * 4
    room = min(MOST_REGISTERS, arch.registers_per_cu // (160 * k.blocks) // 8 * 8)
    needed = sums + 4 * columns(p) + OTHER_REGISTERS
    if needed > room:
        return f"a thread takes {needed} registers of {room}"
    return why_not_shared(k, smem_bytes(k, p), arch)
