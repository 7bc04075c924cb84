"""Convolution kernels of the CPU engine: what one is, and what it can serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.errors import KernelError
from tilewise.ops.conv.kernels.directed import DirectedConvKernel
from tilewise.ops.conv.problem import ConvProblem

DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8")
FAMILIES = ("implicit", "direct", "pointwise", "merged", "depthwise")
LANES = {"avx2": 8, "avx512": 16}
REGISTERS = {"avx2": 16, "avx512": 32}
EXACT_TERMS = 1024
"""int8 products whose sum is exact in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConvKernel(DirectedConvKernel):
    """What C++ convolution kernels have in common; each family is a type of its own.

    The traits are the same for all, for names and keys on disk; what `mr` and `kc` count is said
    by the family.
    """

    engine: ClassVar[str] = "cpu"

    dtype: str = trait("", DTYPES, default="fp32")
    out_dtype: str = trait("to", ("fp32", "fp16", "bf16", "int32"), default="fp32")
    isa: str = trait("", tuple(LANES))
    family: str = trait("", FAMILIES)
    layout: str = trait("", ("nchw", "nhwc"))
    vector: str = trait("by", ("pixel", "k", "c"), doc="what the lanes of a vector hold")
    mr: int = trait("m", (1, 2, 3, 4, 6, 7, 8, 12, 14, 28), doc="broadcast rows of the tile")
    nv: int = trait("v", (1, 2, 3, 4, 6, 7, 9), doc="vectors of the tile")
    kc: int = trait("k", (0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256, 512))
    block: int = trait(
        "b",
        (0, 128, 256, 512, 1024, 2048),
        doc="pixels that stay in cache together; 0 for whole images",
    )
    split: str = trait(
        "over", ("tiles", "channels", "pixels"), doc="what the threads divide among themselves"
    )

    def __post_init__(self) -> None:
        self.check_choices()
        for rule, is_broken in (*self._common_rules().items(), *self._rules().items()):
            if is_broken:
                raise KernelError(f"{self.name}: {rule}")

    def _common_rules(self) -> dict[str, bool]:
        """Rules between the traits of any family -> whether this kernel breaks them."""
        is_exact = self.dtype == "int8"
        lanes = {"nchw": "pixel", "nhwc": "c" if self.op == "conv_bwd_data" else "k"}[self.layout]
        summed = max(self.kc, self.block if self._is_weight else 0)
        return {
            "mr and nv must be at least 1": min(self.mr, self.nv) < 1,
            "int8 is summed exactly, to int32 or fp32": is_exact
            and self.out_dtype not in ("int32", "fp32"),
            "only int8 gives int32": self.out_dtype == "int32" and not is_exact,
            "the gradient of the filter divides channels or pixels, all else tiles": self._is_weight
            == (self.split == "tiles"),
            f"vectors hold {lanes}": self.vector != lanes and not self._may_turn,
            f"int8 needs kc and block up to {EXACT_TERMS}": is_exact and summed > EXACT_TERMS,
        }

    def _rules(self) -> dict[str, bool]:
        """The same for the rules of the family."""
        return {}

    def why_not_for(self, problem: ConvProblem) -> str | None:
        """Why the family does not serve a problem whose types and layout suit, or None."""
        return None

    def shortest_sum(self, problem: ConvProblem) -> int:
        """The fewest products that are added up before the sum is widened."""
        return problem.out_w if problem.direction == "bwd_weight" else problem.taps

    @property
    def lanes(self) -> int:
        return LANES[self.isa]

    @property
    def tile(self) -> tuple[int, int, int]:
        """The register tile over the op's m x n result, and the reduction done per pass."""
        wide = self.nv * self.lanes
        m, n = (wide, self.mr) if self.vector == "pixel" else (self.mr, wide)
        if self.op == "conv_bwd_weight" and self.vector == "k":
            m, n = wide, self.mr
        return m, n, self.kc or self.block

    @property
    def _is_weight(self) -> bool:
        return self.op == "conv_bwd_weight"

    @property
    def _may_turn(self) -> bool:
        """Whether vectors may hold something else than the layout suggests."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _CpuProductKernel(CpuConvKernel):
    """A matrix product over tiles of registers; `mr` counts filters where it is made of dots."""

    @property
    def _is_dot(self) -> bool:
        return self._is_weight and self.vector == "pixel"

    @property
    def _has_no_pass(self) -> bool:
        """Whether the whole reduction is done at once."""
        return self._is_weight

    def _rules(self) -> dict[str, bool]:
        beside = self.mr if self._is_dot else self.nv
        registers = self.mr * self.nv + beside + 1
        return {
            "only depthwise rows take whole images, with block 0": self.block == 0,
            f"the tile needs {registers} of {REGISTERS[self.isa]} registers": registers
            > REGISTERS[self.isa],
            "kc has no meaning here, and is 0": self._has_no_pass and self.kc != 0,
            "kc must be at least 1": not self._has_no_pass and self.kc < 1,
            "the gradient of the filter is direct or merged": self._is_weight
            and self.family != "direct",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuImplicitKernel(_CpuProductKernel):
    """The product over packed rows of the implicit matrix."""

    family: str = trait("", ("implicit",), default="implicit")
    kc: int = trait("k", (128, 256, 512), doc="products of a sum per pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDirectKernel(_CpuProductKernel):
    """The product over a padded copy of the image that taps read at an offset."""

    family: str = trait("", ("direct",), default="direct")
    kc: int = trait(
        "k", (0, 8, 16, 32, 64, 128), doc="channels per pass; 0 for the gradient of the filter"
    )

    def _rules(self) -> dict[str, bool]:
        is_odd = self._is_dot and (self.layout, self.split) != ("nchw", "channels")
        mine = {"dot products along pixels need nchw and divide channels": is_odd}
        return mine | _CpuProductKernel._rules(self)

    @property
    def _may_turn(self) -> bool:
        return self._is_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPointwiseKernel(_CpuProductKernel):
    """The product over the image itself, for 1x1 filters."""

    family: str = trait("", ("pointwise",), default="pointwise")
    kc: int = trait("k", (0, 128, 256, 512), doc="channels per pass; 0 in nhwc, done at once")

    @property
    def _has_no_pass(self) -> bool:
        return self._is_weight or self.layout == "nhwc"

    def _rules(self) -> dict[str, bool]:
        mine = {"pointwise reads floats in place": self.dtype != "fp32"}
        return mine | _CpuProductKernel._rules(self)

    def why_not_for(self, problem: ConvProblem) -> str | None:
        return None if problem.is_pointwise else "the filter is not 1x1 over all pixels"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMergedKernel(CpuConvKernel):
    """Channels of several small groups side by side in a vector, multiplied lane by lane."""

    family: str = trait("", ("merged",), default="merged")
    mr: int = trait("m", (1, 2, 3, 4, 6, 7, 8, 12, 14, 28), doc="pixels in flight")
    kc: int = trait("k", (1, 2, 3, 4, 8, 16), doc="sources of a group")

    def _rules(self) -> dict[str, bool]:
        return {
            "only depthwise rows take whole images, with block 0": self.block == 0,
            "merged lanes need nhwc and nv of 1": (self.layout, self.nv) != ("nhwc", 1),
            "mr has no meaning here, and is 1": self._is_weight and self.mr != 1,
            "kc must be at least 1": self.kc < 1,
        }

    def why_not_for(self, problem: ConvProblem) -> str | None:
        p = problem
        sources = (p.k if p.direction == "bwd_data" else p.c) // p.g
        if sources != self.kc:
            return f"it is for groups of {self.kc} sources, these have {sources}"
        return None

    def shortest_sum(self, problem: ConvProblem) -> int:
        return problem.out_w if self._is_weight else problem.taps * self.kc


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDepthwiseKernel(CpuConvKernel):
    """Rows of one channel against one filter, held in registers."""

    family: str = trait("", ("depthwise",), default="depthwise")
    mr: int = trait("m", (1, 2, 3, 4, 6, 7, 8, 12, 14, 28), doc="rows of the result in flight")
    kc: int = trait("k", (3, 5, 7), doc="width and height of the filter that is held")

    def _rules(self) -> dict[str, bool]:
        return {
            "only depthwise rows take whole images, with block 0": self.block != 0,
            "depthwise rows need nchw": self.layout != "nchw",
            "kc must be at least 1": self.kc < 1,
            "the gradient of the filter is direct or merged": self._is_weight,
        }

    def why_not_for(self, problem: ConvProblem) -> str | None:
        p = problem
        return None if p.c == p.k == p.g else "it is for groups of one channel"


CPU_KERNEL_TYPES: tuple[type[CpuConvKernel], ...] = (
    CpuImplicitKernel,
    CpuDirectKernel,
    CpuPointwiseKernel,
    CpuMergedKernel,
    CpuDepthwiseKernel,
)


def why_unusable(kernel: CpuConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    if arch.kind != "cpu":
        return f"{arch.name} is not a CPU"
    if not arch.has(kernel.isa):
        return f"{arch.name} has no {kernel.isa}"
    if problem is None:
        return None
    # tf32 is stored as fp32, and computing it in full precision is within its bounds.
    stored = "fp32" if problem.dtype == "tf32" else problem.dtype
    if kernel.layout != problem.layout:
        return f"its layout is {kernel.layout}, the problem's {problem.layout}"
    if kernel.dtype != stored:
        return f"its dtype is {kernel.dtype}, the problem's {stored}"
    if kernel.out_dtype != problem.out_dtype:
        return f"its out_dtype is {kernel.out_dtype}, the problem's {problem.out_dtype}"
    if kernel.dtype == "int8" and kernel.shortest_sum(problem) > EXACT_TERMS:
        return f"int8 is exact up to {EXACT_TERMS} products in a sum"
    return kernel.why_not_for(problem)
