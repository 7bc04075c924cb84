"""GEMM kernels of the CPU engine: C++ families over register tiles and cache blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.errors import KernelError
from tilewise.ops.gemm.problem import GemmProblem

LANES = {"avx2": 8, "avx512": 16}
"""32-bit lanes of a vector register."""
REGISTERS = {"avx2": 16, "avx512": 32}

ACCESSES = {
    "packed": ("panels",),
    "unpacked": ("inplace", "bpanels"),
    "skinny": ("dot", "strip"),
    "gemv": ("dot", "strip"),
    "splitk": ("panels",),
}
"""How each family reads its operands."""
SPLITS = {
    "packed": ("m", "n", "grid", "shared"),
    "unpacked": ("m", "n", "grid"),
    "skinny": ("long",),
    "gemv": ("long",),
    "splitk": ("k",),
}
"""What each family can cut among threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuGemmKernel(Kernel):
    """One C++ GEMM. A block size of 0 means that the family does not block there."""

    engine: ClassVar[str] = "cpu"

    dtype: str = trait("", ("fp32", "fp16", "bf16", "fp8", "bf8", "int8"), default="fp32")
    out_dtype: str = trait("to", ("fp32", "fp16", "bf16", "int32"), default="fp32")
    isa: str = trait("", ("avx2", "avx512"), doc="the vector instructions it is compiled to")
    family: str = trait("", tuple(ACCESSES))
    access: str = trait(
        "", ("panels", "inplace", "bpanels", "dot", "strip"), doc="how operands are read"
    )
    mr: int = trait("m", (1, 2, 3, 4, 6, 8, 12, 14), doc="rows of the register tile")
    nr: int = trait(
        "n",
        (2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 128, 512, 2048, 8192),
        doc="columns of it; for a dot, rows of the long operand; for a GEMV strip, of its block",
    )
    mc: int = trait("mc", (0, 96, 192, 480), default=0, doc="rows of A in the second-level cache")
    kc: int = trait("kc", (0, 16, 64, 192, 256, 384, 512), default=0, doc="steps of k in one go")
    nc: int = trait("nc", (0, 512, 4096), default=0, doc="columns of B in the outer cache")
    unroll: int = trait("u", (1, 2, 4, 8), default=1, doc="steps of k in the loop body")
    ahead: int = trait("p", (0, 8, 16), default=0, doc="vectors prefetched ahead of a stream")
    split: str = trait("by", ("m", "n", "grid", "shared", "long", "k"), doc="what threads share")
    split_k: int = trait("k", (1, 2, 4, 8, 16), default=1, doc="slices of the reduction")
    exact: bool = trait("exact", (False, True), default=False, doc="has no code for edges")

    def __post_init__(self) -> None:
        self.check_choices()
        reason = _why_impossible(self)
        if reason:
            raise KernelError(f"{self.family}: {reason}")

    @classmethod
    def only_op(cls) -> str:
        return "gemm"

    @property
    def lanes(self) -> int:
        return LANES[self.isa]

    @property
    def vectors(self) -> int:
        """Vector registers across the tile's columns; a dot has one per column of its long side."""
        return self.nr if self.access == "dot" else self.nr // self.lanes

    @property
    def accumulators(self) -> int:
        """Registers that hold results; a strip of a GEMV keeps one, the rest in the first cache."""
        return 1 if self._is_axpy else self.mr * self.vectors

    @property
    def tile(self) -> tuple[int, int, int]:
        """The block of work that a problem is rounded up to."""
        if self.family in ("skinny", "gemv"):
            # Either side may be the short one, and only that is rounded up.
            return (self.mr, self.mr, self.lanes if self.access == "dot" else 1)
        return (self.mr, self.nr, 1)

    def alignment(self, problem: GemmProblem) -> tuple[int, ...]:
        """An exact kernel serves other sizes through padded copies."""
        return (self.mr, self.nr, 1) if self.exact else ()

    @property
    def efficiency(self) -> float:
        """The share of peak that the inner loop can reach, for the analytic model.

        Two multiply-adds of four cycles need eight accumulators in flight, and a cycle has two
        loads: one per vector of B and one broadcast per row of A.
        """
        in_flight = min(1.0, self.accumulators / 8)
        loads = (self.mr + self.vectors) / self.accumulators
        family = {"packed": 0.9, "unpacked": 0.75, "splitk": 0.7}.get(self.family, 0.6)
        return family * in_flight / max(1.0, loads)

    @property
    def _is_axpy(self) -> bool:
        return self.family == "gemv" and self.access == "strip"


def _why_impossible(k: CpuGemmKernel) -> str | None:
    """The first reason why no such kernel can be written, or None."""
    results = ("int32", "fp32") if k.dtype == "int8" else ("fp32", "fp16", "bf16")
    if k.out_dtype not in results:
        return f"out_dtype is {k.out_dtype}; {k.dtype} gives {', '.join(results)}"
    if k.access not in ACCESSES[k.family]:
        return f"access is {k.access}; use {' or '.join(ACCESSES[k.family])}"
    if k.split not in SPLITS[k.family]:
        return f"split is {k.split}; use {' or '.join(SPLITS[k.family])}"
    if k.exact and k.family != "unpacked":
        return "exact is for unpacked kernels"
    if k.family == "unpacked" and k.dtype != "fp32":
        return f"dtype is {k.dtype}; only fp32 can be read in place, others must be converted"
    if min(k.mr, k.nr, k.unroll) < 1:
        return "mr, nr and unroll must be at least 1"
    if k.access != "dot" and k.nr % k.lanes:
        return f"nr is {k.nr}; it must be a multiple of the {k.lanes} lanes of {k.isa}"
    # One register broadcasts A while those of B wait.
    needed = k.accumulators + k.vectors + 1
    if not k._is_axpy and needed > REGISTERS[k.isa]:
        return f"a {k.mr}x{k.nr} tile needs {needed} registers; {k.isa} has {REGISTERS[k.isa]}"
    return _why_blocks_impossible(k)


def _why_blocks_impossible(k: CpuGemmKernel) -> str | None:
    blocks = {"mc": k.mc, "kc": k.kc, "nc": k.nc}
    if k.family in ("packed", "splitk"):
        small = [name for name, value in blocks.items() if value < 1]
        if small:
            return f"{' and '.join(small)} must be at least 1"
        if k.kc % 2:
            return f"kc is {k.kc}; it must be even"
    else:
        streams = k.family == "skinny" and k.access == "strip"
        unused = [name for name, v in blocks.items() if v and not (streams and name == "kc")]
        if unused:
            return f"{' and '.join(unused)} must be 0: the family has no such block"
        if streams and (k.kc < 1 or k.kc % 2):
            return f"kc is {k.kc}; a strip needs an even block of k"
    if k.ahead and k.access != "dot":
        return f"ahead is {k.ahead}; only dot products prefetch"
    if k.access == "dot" and k.unroll != 1:
        return f"unroll is {k.unroll}; dot products take one vector of k at a time"
    if k.family == "gemv" and k.mr != 1:
        return f"mr is {k.mr}; a vector has one row"
    if k.family == "splitk" and k.split_k < 2:
        return f"split_k is {k.split_k}; it takes at least 2 slices"
    if k.family != "splitk" and k.split_k != 1:
        return f"split_k is {k.split_k}; only splitk cuts the reduction"
    return None


SHORTEST = 32
"""The longest short side that a skinny kernel serves."""


def why_unusable(kernel: CpuGemmKernel, problem: GemmProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps a kernel from a problem on an arch, or None."""
    if arch.kind != "cpu":
        return f"{arch.name} is not a CPU"
    if not arch.has(kernel.isa):
        return f"{arch.name} has no {kernel.isa}"
    if kernel.family in ("packed", "splitk"):
        block = kernel.mc * kernel.kc * 4
        if block > arch.l2_bytes:
            return f"a block of A has {block} bytes; the second cache holds {arch.l2_bytes}"
        # A panel that overflows the first cache still arrives in time: the tile takes a vector of
        # it for every few multiply-adds.
        panel = kernel.nr * kernel.kc * 4
        if block + panel > arch.l2_bytes:
            return f"a panel of B has {panel} bytes, too many beside a block of A of {block}"
    return None if problem is None else _why_unfit(kernel, problem, arch)


def _why_unfit(kernel: CpuGemmKernel, problem: GemmProblem, arch: Arch) -> str | None:
    # Full precision serves a problem that tolerates less.
    operand = "fp32" if problem.dtype == "tf32" else problem.dtype
    if (kernel.dtype, kernel.out_dtype) != (operand, problem.out_dtype):
        return (
            f"it turns {kernel.dtype} into {kernel.out_dtype}, "
            f"not {operand} into {problem.out_dtype}"
        )
    if problem.split_k > 1 and kernel.split_k != problem.split_k:
        return f"it cuts the reduction into {kernel.split_k} slices, not {problem.split_k}"
    if kernel.family == "splitk" and problem.k < 64 * kernel.split_k:
        return f"K is {problem.k}; {kernel.split_k} slices need at least {64 * kernel.split_k}"
    if kernel.family == "unpacked":
        return _why_not_unpacked(kernel, problem, arch)
    if kernel.family in ("skinny", "gemv"):
        return _why_not_thin(kernel, problem)
    return None


def _why_not_unpacked(kernel: CpuGemmKernel, problem: GemmProblem, arch: Arch) -> str | None:
    if kernel.exact and (problem.m % kernel.mr or problem.n % kernel.nr):
        return f"M and N must be multiples of the {kernel.mr}x{kernel.nr} tile"
    if kernel.access == "inplace" and problem.layout[1] != "r":
        return f"layout is {problem.layout}; B must be row-major to be read in place"
    panel = problem.k * kernel.nr * 4
    if kernel.access == "bpanels" and panel > arch.l2_bytes:
        return f"a panel of B has {panel} bytes; the second cache holds {arch.l2_bytes}"
    size, limit = problem.bytes // max(1, problem.batch), 32 * arch.l2_bytes
    if size > limit:
        return f"the matrices have {size} bytes; beyond {limit} packing pays"
    return None


def _why_not_thin(kernel: CpuGemmKernel, problem: GemmProblem) -> str | None:
    short = min(problem.m, problem.n)
    if kernel.family == "gemv" and short > 1:
        return f"the short side is {short}; a vector has 1"
    if kernel.family == "skinny" and short > min(SHORTEST, 4 * kernel.mr):
        return f"the short side is {short}; {min(SHORTEST, 4 * kernel.mr)} is the longest served"
    if kernel.family == "skinny" and kernel.mr >= 2 * max(1, short):
        return f"the short side is {short}; at least half of the {kernel.mr} rows must exist"
    # The long operand is B where C is wide and A where it is tall, as in thin.hpp.
    is_wide = problem.m <= problem.n
    along_k = problem.layout[1] == "c" if is_wide else problem.layout[0] == "r"
    if along_k != (kernel.access == "dot"):
        name, order = ("B", problem.layout[1]) if is_wide else ("A", problem.layout[0])
        wanted = "contiguous" if kernel.access == "dot" else "strided"
        return f"layout is {problem.layout}: {name} is {order}, and K must be {wanted} in it"
    return None
