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
    dtype: str = trait("", DTYPES)
    out_dtype: str = trait("to", ("fp32", "fp16", "bf16", "int32"))
    isa: str = trait("", tuple(LANES))
    family: str = trait("", FAMILIES)
    layout: str = trait("", ("nchw", "nhwc"))
    vector: str = trait(
        "by", ("pixel", "k", "c"), doc="what the lanes of a vector hold: pixels or channels"
    )
    mr: int = trait("m", (1, 2, 3, 4, 6, 7, 8, 9, 12, 14), doc="broadcast rows of the tile")
    nv: int = trait("v", (1, 2, 3, 4, 6), doc="vectors of the tile")
    kc: int = trait(
        "k",
        (0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256, 512),
        doc="reduction per pass, channels per pass (direct), sources of a group (merged) or "
        "filter width (depthwise)",
    )
    block: int = trait("b", (64, 128, 256, 512, 1024), doc="pixels that stay in cache together")
    split: str = trait(
        "by", ("tiles", "channels", "pixels"), doc="what the threads divide among themselves"
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
    exact = k.dtype == "int8"
    is_weight = k.op == "conv_bwd_weight"
    lanes_hold = {"nchw": "pixel", "nhwc": "c" if k.op == "conv_bwd_data" else "k"}[k.layout]
    rules = {
        "mr, nv and block must be at least 1": min(k.mr, k.nv, k.block) < 1,
        "int8 is summed exactly, to int32 or fp32": exact and k.out_dtype not in ("int32", "fp32"),
        "only int8 gives int32": k.out_dtype == "int32" and not exact,
        "the gradient of the filter splits channels or pixels": is_weight and k.split == "tiles",
        "only the gradient of the filter splits channels or pixels": not is_weight
        and k.split != "tiles",
        "pointwise reads floats in place": k.family == "pointwise"
        and (k.dtype != "fp32" or is_weight),
        "depthwise rows need nchw": k.family == "depthwise" and k.layout != "nchw",
        "merged lanes need nhwc": k.family == "merged" and k.layout != "nhwc",
        "the gradient of the filter has no implicit matrix": k.family == "implicit" and is_weight,
    }
    if k.family in ("implicit", "direct", "pointwise"):
        registers = k.mr * k.nv + (k.mr if is_weight and k.vector == "pixel" else k.nv) + 1
        rules |= {
            f"the tile needs {registers} of {REGISTERS[k.isa]} registers": registers
            > REGISTERS[k.isa],
            "a pass needs kc of at least 1": not is_weight and k.kc < 1,
            "kc has no meaning for the gradient of the filter": is_weight and k.kc != 0,
            f"int8 needs kc and block up to {EXACT_TERMS}": exact
            and max(k.kc, k.block if is_weight else 0) > EXACT_TERMS,
            "dot products run along the pixels of nchw": is_weight
            and k.vector == "pixel"
            and k.layout != "nchw",
            "dot products are divided by channels": is_weight
            and k.vector == "pixel"
            and k.split != "channels",
            f"{k.layout} {k.op} vectors hold {lanes_hold}": not is_weight
            and k.vector != lanes_hold,
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
    for trait_name in ("dtype", "out_dtype", "layout"):
        mine, given = getattr(kernel, trait_name), getattr(p, trait_name)
        if mine != given:
            return f"its {trait_name} is {mine}, the problem's {given}"
    if kernel.dtype == "int8" and max(p.taps, p.out_w) > EXACT_TERMS:
        return f"int8 is exact up to {EXACT_TERMS} taps and output columns"
    if kernel.family == "pointwise" and not p.is_pointwise:
        return "the filter is not 1x1 over all pixels"
    if kernel.family == "merged":
        sources = (p.k if kernel.op == "conv_bwd_data" else p.c) // p.g
        if sources != kernel.kc:
            return f"it is for groups of {kernel.kc} sources, these have {sources}"
    if kernel.family == "depthwise" and not p.c == p.k == p.g:
        return "it is for groups of one channel"
    return None
