"""GEMM kernels for GPUs, in Triton and in Gluon: what every family has, and how one is judged."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.core.sizes import gcd
from tilewise.errors import KernelError
from tilewise.ops.gemm.problem import GemmProblem

DTYPES = ("bf16", "fp16", "fp8", "bf8", "int8", "tf32", "fp32")
MAX_SWAPPED_ROWS = 128
CHOSEN = ("split_k", "swap", "fill", "atomic")
"""Traits that only some families have a choice of; the names of all kernels have room for them."""


def sliced() -> Any:
    """The trait of kernels that may cut the reduction."""
    return trait("z", (1, 2, 3, 4, 6, 8, 16), default=1, doc="slices of the reduction")


def flag(tag: str, doc: str) -> Any:
    """A trait that a kernel has or has not."""
    return trait(tag, (False, True), default=False, doc=doc)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGemmKernel(Kernel):
    """One Triton or Gluon GEMM; tile sizes are in elements of C and of the reduction."""

    engine: ClassVar[str] = "triton"
    copies_by_tma: ClassVar[bool] = False
    """Whether Hopper's tensor memory accelerator brings the tiles."""
    powers: ClassVar[tuple[str, ...]] = ("tile_m", "tile_n", "tile_k", "warps")
    """What must be powers of two."""

    family: str = trait("", (), doc="how tiles are fetched and work is handed out")
    dtype: str = trait("", DTYPES, doc="operand type")
    tile_m: int = trait("m", (16, 32, 64, 128, 256))
    tile_n: int = trait("n", (16, 32, 64, 128, 256))
    tile_k: int = trait("k", (16, 32, 64, 128, 256, 512, 1024, 2048))
    warps: int = trait("w", (4, 8), default=4, doc="math warps of a block")
    stages: int = trait("s", (1, 2, 3, 4, 5, 6), default=3, doc="tiles in flight")
    split_k: int = trait("z", (1,), default=1)
    group_m: int = trait("g", (1, 4, 8, 16), default=8, doc="tile rows walked together")
    blocks: int = trait("b", (1, 2, 3, 4), default=1, doc="blocks a multiprocessor holds")
    swap: bool = trait("swap", (False,), default=False)
    fill: bool = trait("fill", (False,), default=False)
    atomic: bool = trait("atomic", (False,), default=False)

    def __post_init__(self) -> None:
        self.check_choices()
        for name in self.powers:
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise KernelError(f"{name} is {value}; it must be a power of two")
        if min(self.stages, self.split_k, self.group_m, self.blocks) < 1:
            raise KernelError("stages, split_k, group_m and blocks must be at least 1")
        space = self.space()
        for name in CHOSEN:
            if len(space[name]) == 1 and getattr(self, name) != space[name][0]:
                raise KernelError(f"{name} is {getattr(self, name)}; {self.family} has no {name}")
        if (broken := self.broken()) is not None:
            raise KernelError(broken)

    def broken(self) -> str | None:
        """The first rule between the family's traits that does not hold, or None."""
        return None

    @classmethod
    def only_op(cls) -> str:
        return "gemm"

    @property
    def tile(self) -> tuple[int, int, int]:
        """Block sizes (m, n, k)."""
        return self.tile_m, self.tile_n, self.tile_k

    @property
    def is_deterministic(self) -> bool:
        return not self.atomic

    def alignment(self, problem: GemmProblem) -> tuple[int, ...]:
        """TMA copies rows of multiples of 16 bytes: what is contiguous must be as long."""
        if not self.copies_by_tma:
            return ()
        unit = 16 // element(self.dtype).bytes
        a, b = problem.layout[0], problem.layout[1]
        along_k = a == "r" or b == "c"
        return (unit if a == "c" else 1, unit if b == "r" else 1, unit if along_k else 1)

    def swaps(self, problem: GemmProblem) -> bool:
        """Whether it computes the transpose of C, B's columns being the tile's rows."""
        return self.swap

    def tiles(self, problem: GemmProblem) -> tuple[int, int]:
        """How many tiles C is cut into, down and across, as the kernel sees it."""
        m, n = (problem.n, problem.m) if self.swaps(problem) else (problem.m, problem.n)
        return -(-m // self.tile_m), -(-n // self.tile_n)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.tile_m + self.tile_n) * self.tile_k * element(self.dtype).bytes

    @property
    def usual(self) -> GemmProblem:
        """A problem of the usual kind for it, to compile ahead of time for."""
        size = 4096
        return GemmProblem(
            m=self.tile_n if self.swap else size,
            n=size,
            k=max(size, self.tile_k),
            dtype=self.dtype,
        )

    @abstractmethod
    def why_not_on(self, arch: Arch) -> str | None:
        """The family's first rule that keeps the kernel from the arch, or None."""

    @abstractmethod
    def why_not_for(self, problem: GemmProblem, arch: Arch) -> str | None:
        """The family's first rule that keeps the kernel from the problem, or None."""


def why_unusable(kernel: GpuGemmKernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps the kernel from the problem on the arch, or None."""
    reason = _why_not_on(kernel, arch) or kernel.why_not_on(arch)
    if reason or problem is None:
        return reason
    assert isinstance(problem, GemmProblem)
    return _why_not_for(kernel, problem, arch) or kernel.why_not_for(problem, arch)


def _why_not_on(kernel: GpuGemmKernel, arch: Arch) -> str | None:
    if arch.kind != "gpu":
        return f"{arch.name} is not a GPU"
    if kernel.dtype not in arch.peak_tflops:
        return f"{arch.name} has no arithmetic in {kernel.dtype}"
    if kernel.copies_by_tma and not (arch.has("tma") and arch.has("wgmma")):
        return f"{arch.name} has no tensor memory accelerator with warpgroup products"
    threads = kernel.warps * arch.warp_size
    if threads > arch.max_threads_per_block:
        return f"{threads} threads; {arch.name} allows {arch.max_threads_per_block} per block"
    return None


def _why_not_for(kernel: GpuGemmKernel, problem: GemmProblem, arch: Arch) -> str | None:
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
    return None


def why_not_multiplied(kernel: GpuGemmKernel, arch: Arch) -> str | None:
    """Triton's own products: accumulators and a step must suit the matrix units."""
    threads = kernel.warps * arch.warp_size
    accumulators = kernel.tile_m * kernel.tile_n // threads
    most = min(arch.max_registers_per_thread, arch.registers_per_cu // threads) * 9 // 16
    if accumulators > most:
        return f"{accumulators} accumulators per thread; at most {most} leave room for the rest"
    if kernel.tile_k * element(kernel.dtype).bytes < 32:
        return "a step is shorter than the matrix unit's own"
    return None


def held_stages(kernel: GpuGemmKernel, arch: Arch) -> int:
    """Stages in shared memory: AMD GPUs hold the newest in registers, NVIDIA's copy past them."""
    return max(1, kernel.stages - (0 if arch.has("cp_async") else 1))


def why_not_stored(needed: int, held: int, arch: Arch) -> str | None:
    """Whether so many bytes of so many stages fit."""
    if needed > arch.smem_per_block_bytes:
        return f"{held} stages of {needed // held} bytes do not fit in shared memory"
    return None


def why_not_pipelined(kernel: GpuGemmKernel, arch: Arch) -> str | None:
    """Whether stages of both operands fit."""
    held = held_stages(kernel, arch)
    return why_not_stored(held * kernel.stage_bytes, held, arch)


def why_not_held(kernel: GpuGemmKernel, problem: GemmProblem, arch: Arch) -> str | None:
    """Without asynchronous copies loads pass through registers.

    Narrow ones take one each, and two for their address.
    """
    if arch.has("cp_async"):
        return None
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


def why_not_copied(problem: GemmProblem) -> str | None:
    """TMA's rows are multiples of 16 bytes."""
    p = problem
    size = element(p.dtype).bytes
    for name, order, extent in (
        ("A", p.layout[0], p.k if p.layout[0] == "r" else p.m),
        ("B", p.layout[1], p.n if p.layout[1] == "r" else p.k),
    ):
        if extent * size % 16:
            return f"{name} ({order}) has rows of {extent * size} bytes; TMA needs multiples of 16"
    return None


def why_not_along_k(problem: GemmProblem, free_bytes: tuple[int, ...]) -> str | None:
    """Warpgroup products take elements of some sizes across K, others only along it."""
    if element(problem.dtype).bytes not in free_bytes and problem.layout != "rcr":
        return f"in {problem.dtype} warpgroup products need both operands along K (layout rcr)"
    return None
