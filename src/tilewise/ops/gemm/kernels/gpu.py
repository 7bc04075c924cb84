"""GEMM kernels for GPUs, in Triton and in Gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.core.trace import gcd
from tilewise.errors import KernelError
from tilewise.ops.gemm.problem import GemmProblem

FAMILIES = (
    *("pointer", "splitk", "streamk", "skinny", "gemv", "tma", "ws", "duo", "pingpong"),
    "smallk",
)
HOPPER_FAMILIES = ("tma", "ws", "duo", "pingpong")
"""They copy tiles with the tensor memory accelerator."""
TWO_GROUP_FAMILIES = ("duo", "pingpong")
"""Two groups of four math warps each, which do not wait for each other."""
TRAIT_FAMILIES = {
    "split_k": ("splitk", "skinny", "gemv", "ws"),
    "fill": ("ws",),
    "atomic": ("splitk", "skinny"),
    "swap": ("ws", "smallk", *TWO_GROUP_FAMILIES),
}
"""Which families have a choice there; skinny and gemv swap by themselves."""
DTYPES = ("bf16", "fp16", "fp8", "bf8", "int8", "tf32", "fp32")
MAX_GEMV_VECTORS = 4
MAX_SWAPPED_ROWS = 128
RESERVED_SMEM = 1024
"""What the system keeps of shared memory for every block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonGemmKernel(Kernel):
    """One Triton or Gluon GEMM; tile sizes are in elements of C and of the reduction.

    `pointer` loads through pointers; `splitk` cuts the reduction; `streamk` hands out equal shares
    of all steps; `skinny` puts the longer of M and N on the matrix unit's rows; `gemv` uses vector
    units; `smallk` takes all of K in one step and keeps a tile of B while A streams past. On
    Hopper `tma` copies with the tensor memory accelerator, `ws` does so from a warp of its own;
    `duo` has two independent groups of math warps share a tile, `pingpong` alternate.
    """

    engine: ClassVar[str] = "triton"

    family: str = trait("", FAMILIES, doc="how tiles are fetched and work is handed out")
    dtype: str = trait("", DTYPES, doc="operand type")
    tile_m: int = trait("m", (16, 32, 64, 128, 256))
    tile_n: int = trait("n", (16, 32, 64, 80, 96, 128, 144, 160, 192, 256, 320))
    tile_k: int = trait("k", (16, 32, 64, 128, 256, 512, 1024, 2048))
    warps: int = trait("w", (4, 8), default=4, doc="math warps of a block")
    stages: int = trait("s", (1, 2, 3, 4, 5, 6), default=3, doc="tiles in flight")
    split_k: int = trait("z", (1, 2, 3, 4, 6, 8, 16), default=1, doc="slices of the reduction")
    group_m: int = trait("g", (1, 4, 8, 16), default=8, doc="tile rows walked together")
    blocks: int = trait("b", (1, 2, 3, 4), default=1, doc="blocks a multiprocessor holds")
    swap: bool = trait("swap", (False, True), default=False, doc="computes the transpose")
    fill: bool = trait("fill", (False, True), default=False, doc="cuts the last wave's tiles")
    atomic: bool = trait("atomic", (False, True), default=False, doc="slices added by atomics")

    def __post_init__(self) -> None:
        self.check_choices()
        for name in ("tile_m", "tile_k", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise KernelError(f"{name} is {value}; it must be a power of two")
        wide, extra = self.columns
        if wide < 1 or extra & (extra - 1):
            raise KernelError(f"tile_n is {self.tile_n}; it must be a sum of two powers of two")
        if extra and (self.family != "ws" or extra < 16):
            raise KernelError(f"tile_n={self.tile_n} is for ws kernels, in multiples of 16")
        if min(self.stages, self.split_k, self.group_m, self.blocks) < 1:
            raise KernelError("stages, split_k, group_m and blocks must be at least 1")
        for trait_name, families in TRAIT_FAMILIES.items():
            value, usual = getattr(self, trait_name), 1 if trait_name == "split_k" else False
            if value != usual and self.family not in families:
                raise KernelError(
                    f"{trait_name} is {value}; it is for {', '.join(families)} kernels"
                )
        if self.fill and self.split_k > 1:
            raise KernelError("fill is for kernels with split_k=1")
        if self.atomic and self.split_k == 1:
            raise KernelError("atomic is for kernels with split_k above 1")

    @property
    def op(self) -> str:
        return "gemm"

    @classmethod
    def only_op(cls) -> str:
        return "gemm"

    @property
    def tile(self) -> tuple[int, int, int]:
        """Block sizes (m, n, k)."""
        return self.tile_m, self.tile_n, self.tile_k

    @property
    def columns(self) -> tuple[int, int]:
        """tile_n as a power of two and the rest, which is 0 for most kernels."""
        wide = 1 << max(0, self.tile_n.bit_length() - 1) if self.tile_n else 0
        return wide, self.tile_n - wide

    @property
    def is_deterministic(self) -> bool:
        return not self.atomic

    def alignment(self, problem: GemmProblem) -> tuple[int, ...]:
        """TMA copies rows of multiples of 16 bytes: what is contiguous must be as long."""
        if self.family not in HOPPER_FAMILIES:
            return ()
        unit = 16 // element(self.dtype).bytes
        a, b = problem.layout[0], problem.layout[1]
        along_k = a == "r" or b == "c"
        return (unit if a == "c" else 1, unit if b == "r" else 1, unit if along_k else 1)

    def swaps(self, problem: GemmProblem) -> bool:
        """Whether it computes the transpose of C, B's columns being the tile's rows."""
        if self.family in ("skinny", "gemv"):
            return problem.m < problem.n
        if self.family == "tma" and self.dtype == "tf32":
            return problem.layout == "rrr"  # an operand across K must be the one in registers
        return self.swap

    def tiles(self, problem: GemmProblem) -> tuple[int, int]:
        """How many tiles C is cut into, down and across, as the kernel sees it."""
        m, n = (problem.n, problem.m) if self.swaps(problem) else (problem.m, problem.n)
        return -(-m // self.tile_m), -(-n // self.tile_n)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.tile_m + self.tile_n) * self.tile_k * element(self.dtype).bytes


def staging(kernel: TritonGemmKernel, out_bytes: int, arch: Arch) -> tuple[int, int] | None:
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


def why_unusable(kernel: TritonGemmKernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps the kernel from the problem on the arch, or None."""
    reason = _why_not_on(kernel, arch)
    if reason or problem is None:
        return reason
    assert isinstance(problem, GemmProblem)
    return _why_not_for(kernel, problem, arch)


def _why_not_on(kernel: TritonGemmKernel, arch: Arch) -> str | None:
    if arch.kind != "gpu":
        return f"{arch.name} is not a GPU"
    if kernel.dtype not in arch.peak_tflops:
        return f"{arch.name} has no arithmetic in {kernel.dtype}"
    if kernel.family in HOPPER_FAMILIES and not (arch.has("tma") and arch.has("wgmma")):
        return f"{arch.name} has no tensor memory accelerator with warpgroup products"
    threads = kernel.warps * arch.warp_size
    if threads > arch.max_threads_per_block:
        return f"{threads} threads; {arch.name} allows {arch.max_threads_per_block} per block"
    if kernel.family == "gemv":
        return None
    if kernel.family in ("ws", *TWO_GROUP_FAMILIES):
        return _why_not_specialised(kernel, arch)
    if kernel.family == "smallk" and kernel.dtype == "fp32":
        return "exact fp32 products of all of K at once spill"
    accumulators = kernel.tile_m * kernel.tile_n // threads
    most = min(arch.max_registers_per_thread, arch.registers_per_cu // threads) * 9 // 16
    if accumulators > most:
        return f"{accumulators} accumulators per thread; at most {most} leave room for the rest"
    if kernel.tile_k * element(kernel.dtype).bytes < 32:
        return "a step is shorter than the matrix unit's own"
    return _why_not_pipelined(kernel, arch)


def _why_not_specialised(kernel: TritonGemmKernel, arch: Arch) -> str | None:
    if kernel.dtype == "fp32":
        return "warpgroup products have no exact fp32"
    groups = 2 if kernel.family == "duo" else 1
    if kernel.tile_m % (16 * kernel.warps * groups):
        return f"tile_m must be a multiple of 16 rows for each of {kernel.warps * groups} warps"
    if kernel.family in TWO_GROUP_FAMILIES and kernel.warps != 4:
        return "each of the two groups has 4 warps"
    if kernel.dtype == "int8" and kernel.tile_n > 128:
        return "int8 warpgroup products are at most 128 columns wide"
    if kernel.warps > 4 and kernel.blocks > 1:
        return "two groups of math warps fill a multiprocessor's registers"
    if kernel.tile_k * element(kernel.dtype).bytes < 64:
        return "a step is shorter than a row of swizzled shared memory"
    room = {1: 192, 2: 128, 3: 64, 4: 32}.get(kernel.blocks, 0)
    if kernel.tile_m * kernel.tile_n // (32 * kernel.warps * groups) > room:
        return f"{kernel.blocks} blocks leave {room} accumulators per thread"
    if staging(kernel, 2, arch) is None:
        return f"{kernel.stages} stages of {kernel.stage_bytes} bytes do not fit in shared memory"
    return None


def _why_not_pipelined(kernel: TritonGemmKernel, arch: Arch) -> str | None:
    # AMD GPUs hold the newest stage in registers; NVIDIA ones copy straight to shared memory.
    held = max(1, kernel.stages - (0 if arch.has("cp_async") else 1))
    needed = held * kernel.stage_bytes
    if kernel.family == "smallk":  # the tile of B stays
        row = kernel.tile_k * element(kernel.dtype).bytes
        needed = (held * kernel.tile_m + kernel.tile_n) * row
    if needed > arch.smem_per_block_bytes:
        return f"{held} stages of {needed // held} bytes do not fit in shared memory"
    return None


def _why_not_for(kernel: TritonGemmKernel, problem: GemmProblem, arch: Arch) -> str | None:
    p = problem
    if p.dtype != kernel.dtype:
        return f"it multiplies {kernel.dtype}, not {p.dtype}"
    if p.is_empty:
        return "there is nothing to compute"
    if max(p.m, p.n, p.k) >= 2**31 - 2048 or p.batch >= 2**16:
        return "a size does not fit in 31 bits (the batch: in 16)"
    if p.split_k > 1 and kernel.split_k != p.split_k:
        return f"it cuts the reduction in {kernel.split_k}, not in {p.split_k}"
    rows, columns = kernel.tiles(p)
    if rows * columns * p.batch * kernel.split_k >= 2**31:
        return "the tiles cannot be counted in 31 bits"
    if kernel.split_k > 1:
        if kernel.split_k > -(-p.k // kernel.tile_k):
            return f"K={p.k} has fewer steps of {kernel.tile_k} than slices"
        if rows * columns * p.batch > 2 * arch.compute_units * kernel.blocks:
            return "there are enough tiles without cutting the reduction"
    if kernel.family == "streamk" and rows * columns * p.batch * -(-p.k // kernel.tile_k) >= 2**31:
        return "the steps cannot be counted in 31 bits"
    if kernel.family == "gemv" and (min(p.m, p.n) > MAX_GEMV_VECTORS or p.dtype == "int8"):
        return f"min(M, N) is {min(p.m, p.n)} in {p.dtype}; gemv takes up to {MAX_GEMV_VECTORS}"
    if kernel.family == "skinny" and min(p.m, p.n) > kernel.tile_n:
        return f"min(M, N) is {min(p.m, p.n)}, above tile_n={kernel.tile_n}"
    if kernel.family == "smallk":
        reason = _why_not_whole(kernel, p)
        if reason:
            return reason
    elif kernel.swap and p.m > MAX_SWAPPED_ROWS and not kernel.columns[1]:
        return f"swapping pays for few rows; M={p.m} is above {MAX_SWAPPED_ROWS}"
    if kernel.family in HOPPER_FAMILIES:
        return _why_not_copied(kernel, p)
    if kernel.family != "gemv" and not arch.has("cp_async"):
        return _why_not_held(kernel, p, arch)
    return None


def _why_not_whole(kernel: TritonGemmKernel, problem: GemmProblem) -> str | None:
    """All of K must fit in a step, and what a thread holds of narrow rows in its registers."""
    p, lanes = problem, 32 * kernel.warps
    if p.k > kernel.tile_k:
        return f"K is {p.k}; all of it must fit in one step of {kernel.tile_k}"
    if kernel.swap != (p.m < p.n):
        return "the longer of M and N streams past the shorter"
    size = element(p.dtype).bytes
    rows = (p.k if p.layout[0] == "r" else p.m, p.n if p.layout[1] == "r" else p.k)
    is_whole = p.n * element(p.out_dtype).bytes % 16 == 0 and not any(r * size % 16 for r in rows)
    if kernel.tile_m * kernel.tile_n > 64 * lanes and not is_whole:
        return "so wide a tile would spill where rows are no multiples of 16 bytes"
    held = kernel.tile_m * (kernel.tile_n + kernel.tile_k) // lanes
    if held > 80 and p.layout != "rcr" and not is_whole:
        return f"{held} values a lane would spill where rows across K are no multiples of 16 bytes"
    return None


def _why_not_held(kernel: TritonGemmKernel, problem: GemmProblem, arch: Arch) -> str | None:
    """Loads pass through registers: narrow ones take one each, and two for their address."""
    p, size, threads = problem, element(problem.dtype).bytes, kernel.warps * arch.warp_size
    along = [p.k if p.layout[0] == "r" else p.m, p.n if p.layout[1] == "r" else p.k]
    needed = kernel.tile_m * kernel.tile_n // threads
    tiles = (kernel.tile_n, kernel.tile_m) if kernel.swaps(p) else (kernel.tile_m, kernel.tile_n)
    for extent, tile in zip(along, tiles, strict=True):
        # Bytes that do not lie along K are put in order one by one.
        width = 1 if size == 1 and p.layout != "rcr" else gcd(extent * size, 16)
        needed += tile * kernel.tile_k * size // (width * threads) * (2 + -(-width // 4))
    room = min(arch.max_registers_per_thread, arch.registers_per_cu // threads)
    if needed >= room * 7 // 8:
        return f"narrow loads of such rows would spill: about {needed} registers of {room}"
    return None


def _why_not_copied(kernel: TritonGemmKernel, problem: GemmProblem) -> str | None:
    p = problem
    size = element(p.dtype).bytes
    for name, order, extent in (
        ("A", p.layout[0], p.k if p.layout[0] == "r" else p.m),
        ("B", p.layout[1], p.n if p.layout[1] == "r" else p.k),
    ):
        if extent * size % 16:
            return f"{name} ({order}) has rows of {extent * size} bytes; TMA needs multiples of 16"
    if size != 2 and p.layout != "rcr" and not (kernel.family == "tma" and size == 4):
        return f"in {p.dtype} warpgroup products need both operands along K (layout rcr)"
    return None
