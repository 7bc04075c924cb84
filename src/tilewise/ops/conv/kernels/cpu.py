"""Convolution kernels of the CPU engine: what one is, and what it can serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.errors import KernelError
from tilewise.ops.conv.problem import ConvProblem

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8")
FAMILIES = ("implicit", "direct", "pointwise", "merged", "depthwise")
LANES = {"avx2": 8, "avx512": 16}
REGISTERS = {"avx2": 16, "avx512": 32}
EXACT_TERMS = 1024
"""int8 products whose sum is exact in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConvKernel(Kernel):
    """One C++ convolution kernel.

    implicit   a matrix product over packed rows of the implicit matrix
    direct     the same product over a padded copy of the image that taps read at an offset
    pointwise  the same product over the image itself, for 1x1 filters
    merged     channels of several small groups side by side in a vector, multiplied lane by lane
    depthwise  rows of one channel against one filter, held in registers
    """

    engine: ClassVar[str] = "cpu"

    op_name: str = field(metadata={"choices": OPS})
    dtype: str = trait("", DTYPES, default="fp32")
    out_dtype: str = trait("to", ("fp32", "fp16", "bf16", "int32"), default="fp32")
    isa: str = trait("", tuple(LANES))
    family: str = trait("", FAMILIES)
    layout: str = trait("", ("nchw", "nhwc"))
    vector: str = trait("by", ("pixel", "k", "c"), doc="what the lanes of a vector hold")
    mr: int = trait(
        "m",
        (1, 2, 3, 4, 6, 7, 8, 12, 14, 28),
        doc="broadcast rows of the tile; rows (depthwise), pixels (merged) or filters (dots)",
    )
    nv: int = trait("v", (1, 2, 3, 4, 6, 7, 9), doc="vectors of the tile; taps (dots)")
    kc: int = trait(
        "k",
        (0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256, 512),
        doc="reduction per pass, channels per pass (direct), sources of a group (merged) or "
        "filter width (depthwise); 0 where all of it is done at once",
    )
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
        for broken in _broken(self):
            raise KernelError(f"{self.name}: {broken}")

    @property
    def op(self) -> str:
        return self.op_name

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


def _broken(kernel: CpuConvKernel) -> list[str]:
    """Rules between the traits of a kernel that it breaks."""
    k = kernel
    is_weight, is_exact = k.op == "conv_bwd_weight", k.dtype == "int8"
    is_dot = is_weight and k.vector == "pixel"
    is_product = k.family in ("implicit", "direct", "pointwise")
    lanes = {"nchw": "pixel", "nhwc": "c" if k.op == "conv_bwd_data" else "k"}[k.layout]
    registers = k.mr * k.nv + (k.mr if is_dot else k.nv) + 1
    has_no_pass = is_weight or (k.family, k.layout) == ("pointwise", "nhwc")
    rules = {
        "mr and nv must be at least 1": min(k.mr, k.nv) < 1,
        "only depthwise rows take whole images, with block 0": (k.block == 0)
        != (k.family == "depthwise"),
        "int8 is summed exactly, to int32 or fp32": is_exact
        and k.out_dtype not in ("int32", "fp32"),
        "only int8 gives int32": k.out_dtype == "int32" and not is_exact,
        "the gradient of the filter divides channels or pixels, all else tiles": is_weight
        == (k.split == "tiles"),
        "dot products along pixels need nchw and divide channels": is_dot
        and (k.layout, k.split) != ("nchw", "channels"),
        f"vectors hold {lanes}": k.vector != lanes and not (is_weight and k.family == "direct"),
        "the gradient of the filter is direct or merged": is_weight
        and k.family not in ("direct", "merged"),
        "pointwise reads floats in place": k.family == "pointwise" and k.dtype != "fp32",
        "depthwise rows need nchw": k.family == "depthwise" and k.layout != "nchw",
        "merged lanes need nhwc and nv of 1": k.family == "merged"
        and (k.layout, k.nv) != ("nhwc", 1),
        "mr has no meaning here, and is 1": k.family == "merged" and is_weight and k.mr != 1,
        f"the tile needs {registers} of {REGISTERS[k.isa]} registers": is_product
        and registers > REGISTERS[k.isa],
        "kc has no meaning here, and is 0": is_product and has_no_pass and k.kc != 0,
        "kc must be at least 1": not (is_product and has_no_pass) and k.kc < 1,
        f"int8 needs kc and block up to {EXACT_TERMS}": is_exact
        and max(k.kc, k.block if is_weight else 0) > EXACT_TERMS,
    }
    return [rule for rule, is_broken in rules.items() if is_broken]


def why_unusable(kernel: CpuConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    if arch.kind != "cpu":
        return f"{arch.name} is not a CPU"
    if not arch.has(kernel.isa):
        return f"{arch.name} has no {kernel.isa}"
    if problem is None:
        return None
    p = problem
    # tf32 is stored as fp32, and computing it in full precision is within its bounds.
    stored = "fp32" if p.dtype == "tf32" else p.dtype
    for what, mine, given in (
        ("dtype", kernel.dtype, stored),
        ("out_dtype", kernel.out_dtype, p.out_dtype),
        ("layout", kernel.layout, p.layout),
    ):
        if mine != given:
            return f"its {what} is {mine}, the problem's {given}"
    if kernel.dtype == "int8" and _shortest_sum(kernel, p) > EXACT_TERMS:
        return f"int8 is exact up to {EXACT_TERMS} products in a sum"
    if kernel.family == "pointwise" and not p.is_pointwise:
        return "the filter is not 1x1 over all pixels"
    if kernel.family == "merged":
        sources = (p.k if p.direction == "bwd_data" else p.c) // p.g
        if sources != kernel.kc:
            return f"it is for groups of {kernel.kc} sources, these have {sources}"
    if kernel.family == "depthwise" and not p.c == p.k == p.g:
        return "it is for groups of one channel"
    return None


def _shortest_sum(kernel: CpuConvKernel, p: ConvProblem) -> int:
    """The fewest products that a kernel adds up before it widens the sum."""
    if p.direction == "bwd_weight":
        return p.out_w
    return p.taps * (kernel.kc if kernel.family == "merged" else 1)
