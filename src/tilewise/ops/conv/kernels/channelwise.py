"""CUDA kernels for depthwise convolutions without matrix units: what one is, what it can serve."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import trait
from tilewise.ops.conv.kernels.directed import CudaConvKernel
from tilewise.ops.conv.kernels.few_channels import why_not_counted, why_not_shared, why_not_typed
from tilewise.ops.conv.problem import ConvProblem

CHANNELS = 64
"""Of a warp: two for each lane."""
MOST_SPAN = 64
"""Columns of the image that a strip holds in registers."""
MOST_TAPS = 33
"""Along a row, all of which are unrolled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelwiseConvKernel(CudaConvKernel):
    """One kernel in which no channel ever meets another, for filters of any size up to 31 x 31.

    A warp computes `strip` neighbouring pixels of 64 channels at a time, in fp32.
    """

    family: str = trait("", ("channelwise",))
    dtype: str = trait("", ("bf16", "fp16", "fp32"))
    strip: int = trait("p", (2, 4, 8, 12, 16), doc="pixels of a row that a warp computes at once")
    warps: int = trait("w", (2, 4, 8))
    blocks: int = trait("b", (1, 2, 3, 4, 8), doc="blocks a multiprocessor holds")
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")
    spreads_nonfinite: bool = trait("spreads", (False,), default=False)

    def rules(self) -> dict[str, bool]:
        return {
            "strip, warps and blocks are at least 1": min(self.strip, self.warps, self.blocks) < 1,
            "atomic is for gradients of filters": self.atomic and not self.is_weight,
            "nothing spreads between its channels": self.spreads_nonfinite,
        }

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done at once."""
        pixels = self.strip * self.warps
        return (CHANNELS, 1, pixels) if self.is_weight else (pixels, CHANNELS, 1)


def span(k: ChannelwiseConvKernel, p: ConvProblem) -> int:
    """Columns of the image that a strip reads."""
    reach = (p.x - 1) * p.dilation_w
    if p.direction == "bwd_data":
        return (k.strip - 1) // p.stride_w + -(-reach // p.stride_w) + 1
    return (k.strip - 1) * p.stride_w + reach + 1


def smem_bytes(k: ChannelwiseConvKernel, p: ConvProblem) -> int:
    """The filters of 64 channels; of their gradient, a row of sums for each warp."""
    if k.is_weight:
        return 1024 + k.warps * p.x * CHANNELS * 4
    return 1024 + p.taps * CHANNELS * element(k.dtype).bytes


def registers(k: ChannelwiseConvKernel, p: ConvProblem) -> int:
    """What a thread needs at least, as compiled."""
    sums = 2 * (p.x if k.is_weight else k.strip)
    return sums + 2 * span(k, p) + 40


def why_unusable(
    kernel: ChannelwiseConvKernel, problem: ConvProblem | None, arch: Arch
) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    if arch.kind != "gpu" or not arch.has("mbarrier"):
        return f"{arch.name} is no Hopper or later"
    if problem is None:
        return None
    return (
        why_not_typed(kernel, problem)
        or _why_not_meant(kernel, problem)
        or _why_large(kernel, problem, arch)
    )


def _why_not_meant(k: ChannelwiseConvKernel, p: ConvProblem) -> str | None:
    if not p.c == p.k == p.g or p.c < 2:
        return "it is for groups of one channel"
    return "channels are read two by two" if p.c % 2 else None


def _why_large(k: ChannelwiseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    if p.direction == "bwd_data" and k.strip % p.stride_w:
        return f"strips of {k.strip} pixels are no whole periods of the stride"
    if p.x > MOST_TAPS or span(k, p) > MOST_SPAN:
        return f"a strip reads {span(k, p)} columns of {MOST_SPAN}"
    if p.z * p.y > 65535:
        return "a filter has too many rows"
    if reason := why_not_counted(p):
        return reason
    room = min(248, arch.registers_per_cu // (32 * k.warps * k.blocks) // 8 * 8)
    if registers(k, p) > room:
        return f"a thread takes {registers(k, p)} registers of {room}"
    return why_not_shared(k, smem_bytes(k, p), arch)
