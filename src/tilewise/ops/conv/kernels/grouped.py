"""CUDA kernels for convolutions with few channels a group: what one is, and what it can serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
from tilewise.ops.conv.patches import extent, why_not_backward
from tilewise.ops.conv.problem import ConvProblem

CHANNELS = 64
"""Of the result, for each block: 16 for each of four math warps."""
ROWS = 16
"""Of a product on the matrix units: smaller groups share one."""
GROUPS = (4, 8, 16, 32)
MOST_REGISTERS = 208
"""Of a thread for filter and sums; more would spill."""
OTHER_REGISTERS = 48
"""Of a thread, for addresses and fragments."""


class Slots(NamedTuple):
    """How a block's groups lie in shared memory; see `cuda/units.cuh`."""

    read_unit: int
    written_unit: int
    """Channels that lie together: of a group, or of those that are merged."""
    read: int
    written: int
    """Channels that a unit takes there."""
    columns: int
    """Blocks that the channels of the result are divided into."""
    units: int = 0
    """Of a block, where they are padded."""
    merged: int = 1
    """Groups of a unit."""

    @property
    def read_channels(self) -> int:
        """That a block reads of a pixel, zeros among them."""
        return self.read * max(1, self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConvKernel(CudaConvKernel):
    """One kernel on the matrix units for groups of 4 to 32 channels, near memory bandwidth.

    A tile is `tile_h` x `tile_w` pixels of the result (of the gradient's phases, backward) and 64
    channels. Groups below 16 channels share products whose filter is zero off the diagonal: there
    an Inf or NaN spreads over 16 channels, and `spreads_nonfinite` says so.
    """

    family: str = trait("", ("grouped",))
    dtype: str = trait("", ("bf16", "fp16"))
    tile_h: int = trait("h", (1, 4, 7, 8, 14, 16))
    tile_w: int = trait("w", (8, 16, 32, 64))
    stages: int = trait("s", (1, 2, 3, 4), doc="patches in flight")
    blocks: int = trait("b", (1, 2, 3, 4), doc="blocks a multiprocessor holds")
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")
    spreads_nonfinite: bool = trait("spreads", (False, True), default=True)

    def rules(self) -> dict[str, bool]:
        return {
            "tiles, stages and blocks are at least 1": min(self.tile_h, self.stages, self.blocks)
            < 1,
            "tile_w is a multiple of 8": self.tile_w < 8 or self.tile_w % 8 != 0,
            "gradients of filters reduce over 16 pixels of a row": self.is_weight
            and self.tile_w % 16 != 0,
            "atomic is for gradients of filters": self.atomic and not self.is_weight,
        }

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done at once."""
        pixels = self.tile_h * self.tile_w
        return (CHANNELS, ROWS, pixels) if self.is_weight else (pixels, CHANNELS, ROWS)

    @property
    def warps(self) -> int:
        return 4

    @property
    def load_warps(self) -> int:
        """One brings the patches; of the filter's gradient, a thread of those that multiply."""
        return 0 if self.is_weight else 1

    def slots(self, problem: ConvProblem) -> Slots:
        """Groups lie side by side."""
        read, wide = read_group(problem), written_group(problem)
        columns = -(-wide * problem.g // CHANNELS)
        return Slots(read, wide, read=CHANNELS * read // wide, written=CHANNELS, columns=columns)


def read_group(p: ConvProblem) -> int:
    """Channels a group of the image that a tap reads."""
    return (p.k if p.direction == "bwd_data" else p.c) // p.g


def written_group(p: ConvProblem) -> int:
    """Channels (or filters) a group of what is computed."""
    return (p.c if p.direction == "bwd_data" else p.k) // p.g


def patch(k: GroupedConvKernel, p: ConvProblem) -> tuple[int, int, int]:
    """Pixels that a tile reads: depth, height, width."""
    deep = 1 if k.is_weight else extent(p, "d", 1)
    return deep, extent(p, "h", k.tile_h), extent(p, "w", k.tile_w)


def written(k: GroupedConvKernel, p: ConvProblem) -> tuple[int, int, int]:
    """Pixels of the result that a tile is: backward, each place has one for each phase."""
    is_back = p.direction == "bwd_data"
    return (
        1,
        k.tile_h * (p.stride_h if is_back else 1),
        k.tile_w * (p.stride_w if is_back else 1),
    )


def smem_bytes(k: GroupedConvKernel, p: ConvProblem) -> int:
    """Shared memory of a block, with what aligning it takes."""
    deep, down, across = patch(k, p)
    image = -(-deep * down * across * 2 * k.slots(p).read_channels // 1024) * 1024
    _, height, width = written(k, p)
    result = height * width * 2 * CHANNELS
    if k.is_weight:
        return 1024 + k.stages * (image + result) + 8 * k.stages
    return 1024 + k.stages * image + 2 * result + 16 * k.stages


def registers(k: GroupedConvKernel, p: ConvProblem) -> int:
    """What filter and sums take of a thread's."""
    steps = -(-k.slots(p).read_unit // ROWS)
    if k.is_weight:
        open_rows = (p.y - 1) * p.dilation_h // p.stride_h + 1
        return p.y * p.x * 8 * steps + 4 * open_rows
    parts = 1 if k.tile_w % 16 else 2
    is_back = p.direction == "bwd_data"
    shifts = -(-p.y // p.stride_h) if is_back else p.y
    open_rows = (shifts - 1) * p.dilation_h // (1 if is_back else p.stride_h) + 1
    phases = p.stride_h * p.stride_w if is_back else 1
    return 4 * p.taps * steps + 4 * parts * open_rows * phases


def why_unusable(kernel: GroupedConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    reason = why_not_tma(arch)
    if reason or problem is None:
        return reason
    return (
        why_not_typed(kernel, problem)
        or _why_not_meant(kernel, problem)
        or why_not_sized(kernel, problem, arch)
    )


def why_not_side_by_side(p: ConvProblem) -> str | None:
    """Why products of whole 16 channels cannot take groups as they lie, or None."""
    read, wide = read_group(p), written_group(p)
    if p.g < 2 or read not in GROUPS or wide not in (*GROUPS, CHANNELS):
        return f"it is for groups of {', '.join(map(str, GROUPS))} channels"
    if read != wide and not (wide > read >= ROWS):
        return f"groups of {read} channels read and {wide} written share no product"
    return None


def _why_not_meant(k: GroupedConvKernel, p: ConvProblem) -> str | None:
    if reason := why_not_side_by_side(p):
        return reason
    wide = written_group(p)
    if k.spreads_nonfinite != (wide < ROWS):
        return f"groups of {wide} channels {'share' if wide < ROWS else 'need no'} products"
    if p.c % 8 or p.k % 8:
        return "TMA copies rows of multiples of 8 channels"
    return None


def why_not_sized(k: GroupedConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    reason = why_not_backward(p)
    if reason:
        return reason
    if max(*patch(k, p), *written(k, p)) > MOST_BOX:
        return f"a patch is longer than TMA's {MOST_BOX} pixels"
    if reason := why_not_counted(p):
        return reason
    needed = registers(k, p)
    room = min(MOST_REGISTERS, arch.registers_per_cu // (160 * k.blocks) - OTHER_REGISTERS)
    if needed > room:
        return f"filter and sums take {needed} registers of {room}"
    return why_not_shared(k, smem_bytes(k, p), arch)
