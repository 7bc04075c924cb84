"""Convolution kernels in Triton: what one is, how it cuts a problem, and what it can serve."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import trait
from tilewise.errors import KernelError
from tilewise.ops.conv.kernels.directed import DirectedConvKernel
from tilewise.ops.conv.problem import ConvProblem

FAMILIES = ("implicit", "packed", "merged", "direct")
DTYPES = ("bf16", "fp16", "fp32", "tf32")
MOST_WORKSPACE = 1 << 30
MOST_DIRECT_CHANNELS = 8
LARGEST = 2**31 - 2**16
"""Pixels and entries of a filter are counted in 31 bits, a tile's overhang included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConvKernel(DirectedConvKernel):
    """One Triton convolution; a tile is (pixels, channels, reduction), of filters (k, entries).

    `implicit` multiplies matrices tap by tap, and serves every problem; `packed` puts taps and
    channels in one row, for few channels; `merged` multiplies the channels of several small groups
    at once, foreign ones by zero; `direct` multiplies channel by channel on the vector units. Of a
    direct gradient of the filter a tile is (pixels at a time, filters, taps).
    """

    engine: ClassVar[str] = "triton"

    family: str = trait("", FAMILIES, doc="how channels and taps are walked")
    dtype: str = trait("", DTYPES, doc="operand type")
    tile_m: int = trait("m", (4, 8, 16, 32, 64, 128, 256))
    tile_n: int = trait("n", (16, 32, 64, 128, 256))
    tile_k: int = trait("k", (1, 2, 4, 8, 16, 32, 64, 128))
    warps: int = trait("w", (1, 2, 4, 8), default=4)
    stages: int = trait("s", (1, 2, 3, 4, 5), default=3, doc="tiles in flight")
    group_m: int = trait("g", (1, 4, 8, 16), default=8, doc="tile rows walked together")
    fill: int = trait(
        "f", (0, 1, 2, 4, 8), default=0, doc="waves that slices of the reduction fill; 0: no slices"
    )
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")

    def __post_init__(self) -> None:
        self.check_choices()
        for name in ("tile_m", "tile_n", "tile_k", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise KernelError(f"{name} is {value}; it must be a power of two")
        if min(self.stages, self.group_m) < 1:
            raise KernelError("stages and group_m must be at least 1")
        if self.atomic and not self.fill:
            raise KernelError("atomic is for kernels whose reduction is cut: give fill")
        if self.family == "direct":
            if self.dtype == "tf32":
                raise KernelError("direct kernels multiply tf32 as fp32; use dtype fp32")
            if self.op != "conv_bwd_weight" and (self.fill or self.tile_k > 1):
                raise KernelError("direct kernels of pixels take tile_k=1 and fill=0")
        elif min(self.tile) < 16:
            raise KernelError(f"tile {self.tile} is below the matrix units' 16")

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, and the reduction done in a step."""
        if self.family == "direct" and self.op == "conv_bwd_weight":
            return self.tile_n, self.tile_k, self.tile_m
        return self.tile_m, self.tile_n, self.tile_k

    @property
    def is_deterministic(self) -> bool:
        return not self.atomic

    @property
    def spreads_nonfinite(self) -> bool:
        """Whether an Inf or NaN reaches the results of neighbouring groups."""
        return self.family == "merged"


class Cut(NamedTuple):
    """How a kernel cuts a problem."""

    merged: int
    """Groups in a tile."""
    groups: int
    """Tiles along the groups."""
    tiles_m: int
    tiles_n: int
    classes: int
    """Backward: kinds of pixels, by their remainder of the stride."""
    steps: int
    """Of a tile's reduction."""
    slices: int
    """Of the reduction."""

    @property
    def tiles(self) -> int:
        return self.groups * self.tiles_m * self.tiles_n

    @property
    def blocks(self) -> int:
        return self.tiles * self.slices * self.classes


def channels(problem: ConvProblem) -> tuple[int, int]:
    """(source, result) channels of a group, as the direction sees them."""
    c, k = problem.c // problem.g, problem.k // problem.g
    return (k, c) if problem.direction == "bwd_data" else (c, k)


def merged_groups(kernel: TritonConvKernel, problem: ConvProblem) -> int:
    """How many groups a tile holds."""
    if kernel.family != "merged":
        return 1
    source, result = channels(problem)
    if kernel.op == "conv_bwd_weight":
        room = min(kernel.tile_m // max(1, result), kernel.tile_n // max(1, source))
    else:
        room = min(kernel.tile_n // max(1, result), kernel.tile_k // max(1, source))
    return max(1, min(room, problem.g))


def cut(kernel: TritonConvKernel, problem: ConvProblem, arch: Arch) -> Cut:
    """Tiles, steps and slices of a kernel on a problem."""
    whole = (_cut_filter if kernel.op == "conv_bwd_weight" else _cut_pixels)(kernel, problem)
    if not kernel.fill:
        return whole
    # Rounded down: one slice more would begin another wave.
    wanted = kernel.fill * arch.compute_units // max(1, whole.tiles * whole.classes)
    return whole._replace(slices=max(1, min(wanted, whole.steps)))


def _cut_pixels(kernel: TritonConvKernel, problem: ConvProblem) -> Cut:
    p, (source, result) = problem, channels(problem)
    sizes, strides = (p.out_d, p.out_h, p.out_w), (1, 1, 1)
    taps = p.taps
    if p.direction == "bwd_data":
        sizes, strides = (p.d, p.h, p.w), (p.stride_d, p.stride_h, p.stride_w)
        taps = p.gemm.k // max(1, source)
    pixels = p.n * prod(-(-size // stride) for size, stride in zip(sizes, strides, strict=True))
    merged = merged_groups(kernel, p)
    if kernel.family == "direct":
        lanes, groups, steps = p.g * result, 1, taps * source
    elif kernel.family == "packed":
        lanes, groups, steps = result, p.g, -(-taps * source // kernel.tile_k)
    else:
        lanes, groups = merged * result, -(-p.g // merged)
        steps = taps * -(-merged * source // kernel.tile_k)
    rows, columns = -(-pixels // kernel.tile_m), -(-lanes // kernel.tile_n)
    return Cut(merged, groups, rows, columns, prod(strides), steps, 1)


def _cut_filter(kernel: TritonConvKernel, problem: ConvProblem) -> Cut:
    p, (source, result) = problem, channels(problem)
    merged = merged_groups(kernel, p)
    if kernel.family == "direct":
        rows = source * -(-p.taps // kernel.tile_k)
        steps = -(-p.out_pixels // kernel.tile_m)
        return Cut(1, 1, rows, -(-p.k // kernel.tile_n), 1, steps, 1)
    columns = (
        -(-p.taps * source // kernel.tile_n)
        if kernel.family == "packed"
        else p.taps * -(-merged * source // kernel.tile_n)
    )
    rows = -(-merged * result // kernel.tile_m)
    return Cut(merged, -(-p.g // merged), rows, columns, 1, -(-p.out_pixels // kernel.tile_k), 1)


def partial_bytes(kernel: TritonConvKernel, problem: ConvProblem, slices: int) -> int:
    """What the slices of a reduction take in fp32; nothing where it is whole."""
    if slices == 1:
        return 0
    p = problem
    sizes = {
        "fwd": p.output_elements,
        "bwd_data": p.input_elements,
        "bwd_weight": p.filter_elements,
    }
    return 4 * sizes[p.direction] * (1 if kernel.atomic else slices)


def why_unusable(kernel: TritonConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    return _why_not_on(kernel, arch) or (_why_not_for(kernel, problem, arch) if problem else None)


def _why_not_on(kernel: TritonConvKernel, arch: Arch) -> str | None:
    if arch.kind != "gpu":
        return f"{arch.name} is not a GPU"
    if kernel.dtype not in arch.peak_tflops:
        return f"{arch.name} has no arithmetic in {kernel.dtype}"
    threads = kernel.warps * arch.warp_size
    if threads > arch.max_threads_per_block:
        return f"{threads} threads; {arch.name} allows {arch.max_threads_per_block} per block"
    m, n, k = kernel.tile_m, kernel.tile_n, kernel.tile_k
    room = min(arch.max_registers_per_thread, arch.registers_per_cu // threads) * 9 // 16
    if kernel.family == "direct":
        held = m * n * (k if kernel.op == "conv_bwd_weight" else 1) // threads
        return f"{held} values a lane; at most {room // 2} fit" if held > room // 2 else None
    if m * n // threads > room:
        return f"{m * n // threads} accumulators a lane; at most {room} leave room for the rest"
    held = max(1, kernel.stages - (0 if arch.has("cp_async") else 1))
    needed = held * (m + n) * k * element(kernel.dtype).bytes
    if needed > arch.smem_per_block_bytes:
        return f"{held} stages of {needed // held} bytes do not fit in shared memory"
    return None


def _why_not_for(kernel: TritonConvKernel, problem: ConvProblem, arch: Arch) -> str | None:
    p = problem
    stored = "fp32" if p.dtype == "tf32" and kernel.family == "direct" else p.dtype
    if stored != kernel.dtype:
        return f"it multiplies {kernel.dtype}, not {p.dtype}"
    if p.is_empty:
        return "there is nothing to compute"
    if any(n >= LARGEST for n in (p.in_pixels, p.out_pixels, p.filter_elements, p.c, p.k)):
        return "pixels or the filter cannot be counted in 31 bits"
    made = cut(kernel, p, arch)
    if made.tiles * made.slices >= 2**31 or made.classes >= 2**16:
        return "the tiles cannot be counted in 31 bits (classes of pixels: in 16)"
    if kernel.fill and made.slices == 1:
        return "there are enough tiles, or too few steps, to cut the reduction"
    if partial_bytes(kernel, p, made.slices) > MOST_WORKSPACE:
        return f"its {made.slices} slices take more than {MOST_WORKSPACE >> 20} MiB"
    return _why_not_by_channels(kernel, p)


def _why_not_by_channels(kernel: TritonConvKernel, problem: ConvProblem) -> str | None:
    p, (source, result) = problem, channels(problem)
    is_filter = kernel.op == "conv_bwd_weight"
    if kernel.family == "direct":
        if source > MOST_DIRECT_CHANNELS:
            return f"{source} channels a group; direct takes up to {MOST_DIRECT_CHANNELS}"
        return None
    if kernel.family == "merged":
        if p.g == 1 or merged_groups(kernel, p) < 2:
            return f"no two groups of {source} and {result} channels fit in a tile"
        return None
    along = kernel.tile_n if is_filter else kernel.tile_k
    if kernel.family == "packed" and (source % along == 0 or source > 2 * along or p.taps == 1):
        return f"{source} channels fill steps of {along} without being packed"
    # One step down is another kernel: only the smallest tiles serve the smallest groups.
    for name, tile, size in (
        (
            "tile_m" if is_filter else "tile_n",
            kernel.tile_m if is_filter else kernel.tile_n,
            result,
        ),
        (f"tile_{'n' if is_filter else 'k'}", along, source * (p.taps if is_packed(kernel) else 1)),
    ):
        if tile > 32 and tile >= 4 * size:
            return f"{name} is {tile}; a group has {size} channels of it"
    return None


def is_packed(kernel: TritonConvKernel) -> bool:
    return kernel.family == "packed"
