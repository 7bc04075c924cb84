"""CUDA kernels for a network's first layer, of 3 or 4 channels: what one is, what it can serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.conv.kernels.directed import CudaConvKernel
from tilewise.ops.conv.kernels.few_channels import (
    MOST_BOX,
    why_not_shared,
    why_not_tma,
    why_not_typed,
)
from tilewise.ops.conv.problem import ConvProblem

OPS = ("conv_fwd", "conv_bwd_weight")
"""Nobody asks for the gradient of the pixels themselves."""
CHANNELS = 64
"""Of the result, for each block."""
WARPS = 4
CHUNK = 8
"""Elements of a run that are multiplied together."""
MOST_REGISTERS = 232
OTHER_REGISTERS = 48
"""Of a thread, for addresses and fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StemConvKernel(CudaConvKernel):
    """One kernel for images of 3 or 4 channels, whose rows it takes as rows of elements.

    A tile is `tile_h` x `tile_w` pixels of the result and 64 channels. Runs of the filter are
    filled up with zeros, which meet the pixels that follow: an Inf or NaN spreads to its
    neighbours in the row.
    """

    op_name: str = field(metadata={"choices": OPS})
    family: str = trait("", ("stem",))
    dtype: str = trait("", ("bf16", "fp16"))
    tile_h: int = trait("h", (2, 4, 8))
    tile_w: int = trait("w", (8, 16, 32))
    stages: int = trait("s", (1, 2, 3, 4), doc="patches in flight")
    blocks: int = trait("b", (1, 2, 3, 4), doc="blocks a multiprocessor holds")
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")
    spreads_nonfinite: bool = trait("spreads", (True,), default=True)

    def rules(self) -> dict[str, bool]:
        return {
            f"it computes {' or '.join(OPS)}": self.op_name not in OPS,
            "tiles, stages and blocks are at least 1": min(self.tile_h, self.stages, self.blocks)
            < 1,
            "pixels come by eight": self.tile_w < 8 or self.tile_w % 8 != 0,
            "gradients of filters reduce over 16 pixels of a row": self.is_weight
            and self.tile_w % 16 != 0,
            "it spreads to neighbours": not self.spreads_nonfinite,
            "atomic is for gradients of filters": self.atomic and not self.is_weight,
        }

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done at once."""
        pixels = self.tile_h * self.tile_w
        return (CHANNELS, CHUNK, pixels) if self.is_weight else (pixels, CHANNELS, 2 * CHUNK)

    @property
    def warps(self) -> int:
        return WARPS

    @property
    def load_warps(self) -> int:
        """One brings the patches; of the filter's gradient, a thread of those that multiply."""
        return 0 if self.is_weight else 1


def chunks(p: ConvProblem) -> int:
    """Chunks of 8 elements in a row of the filter."""
    return -(-p.x * p.c // CHUNK)


def patch(k: StemConvKernel, p: ConvProblem) -> tuple[int, int]:
    """Rows, and elements of a row, that a tile reads."""
    step, lead = p.stride_w * p.c, -p.pad_w * p.c % CHUNK
    elements = lead + (k.tile_w - 1) * step + chunks(p) * CHUNK + (step % 2 or lead % 2)
    return (k.tile_h - 1) * p.stride_h + p.y, -(-elements // CHUNK) * CHUNK


def smem_bytes(k: StemConvKernel, p: ConvProblem) -> int:
    """Shared memory of a block, with what aligning it takes."""
    rows, elements = patch(k, p)
    image, result = 2 * rows * elements, 2 * CHANNELS * k.tile_h * k.tile_w
    if k.is_weight:
        return 1024 + k.stages * (-(-image // 1024) * 1024 + result + 8)
    stages = k.stages * (-(-image // 128) * 128)
    return 1024 + -(-stages // 1024) * 1024 + 2 * result + 16 * k.stages


def registers(k: StemConvKernel, p: ConvProblem) -> int:
    """What filter and sums take of a thread's."""
    if k.is_weight:
        return -(-p.y // WARPS) * chunks(p) * 16 + 16
    return -(-p.y * chunks(p) // 2) * 8 + 8


def why_unusable(kernel: StemConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    reason = why_not_tma(arch)
    if reason or problem is None:
        return reason
    return (
        why_not_typed(kernel, problem)
        or _why_not_meant(kernel, problem)
        or _why_large(kernel, problem, arch)
    )


def _why_not_meant(k: StemConvKernel, p: ConvProblem) -> str | None:
    if p.c not in (3, 4) or p.g != 1 or p.ndim == 3:
        return "it is for images of 3 or 4 channels in one group, in one or two dimensions"
    if p.dilation_h > 1 or p.dilation_w > 1:
        return "it takes no dilation"
    if p.w * p.c % 8 or p.k % 8:
        return "TMA copies rows of multiples of 8 elements"
    return None


def _why_large(k: StemConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    if max(*patch(k, p), k.tile_h, k.tile_w) > MOST_BOX:
        return f"a patch is longer than TMA's {MOST_BOX} elements"
    if any(n >= 2**31 - 2**16 for n in (p.in_pixels, p.out_pixels)) or p.w * p.c >= 2**31:
        return "pixels are counted in 31 bits"
    room = min(MOST_REGISTERS, arch.registers_per_cu // (160 * k.blocks) // 8 * 8)
    needed = registers(k, p) + OTHER_REGISTERS
    if needed > room:
        return f"a thread takes {needed} registers of {room}"
    return why_not_shared(k, smem_bytes(k, p), arch)
