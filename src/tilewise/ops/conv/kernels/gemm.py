"""Convolutions with 1x1 filters as the matrix products that they are: what one is and can serve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.ops.conv.kernels.directed import DirectedConvKernel
from tilewise.ops.conv.kernels.triton import DTYPES
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.kernels import BY_FAMILY, GPU_KERNEL_TYPES, gpu
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel
from tilewise.ops.gemm.problem import GemmProblem

FAMILIES = ("gemm",)
LAYOUTS = {"fwd": "rcr", "bwd_data": "rrr", "bwd_weight": "crr"}
"""Of the products: pixels and filters both lie channels innermost."""
LOADING = ("ws", "duo", "pingpong")
"""Products that have a warp which only copies tiles."""
_TRAITS = tuple(f.name for f in GpuGemmKernel.traits() if f.name != "family")


def _same(name: str) -> Any:
    """A trait as the kernels of matrix products have it, with the choices of every family."""
    found = [f for kind in GPU_KERNEL_TYPES for f in kind.traits() if f.name == name]
    choices = sorted({value for f in found for value in f.metadata["choices"]})
    doc = max((f.metadata["doc"] for f in found), key=len)
    return trait(found[0].metadata["tag"], choices, default=found[0].default, doc=doc)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConvKernel(DirectedConvKernel):
    """A kernel of matrix products on all pixels at once; behind `gemm` its name is that kernel's.

    Forward multiplies pixels x c by c x k, backward-data pixels x k by k x c, and backward-weight,
    whose reduction is the long one, k x pixels by pixels x c. A tile is of that product.
    """

    engine: ClassVar[str] = "triton"

    family: str = trait("", FAMILIES, doc="1x1 filters as one matrix product")
    product: str = trait("", tuple(BY_FAMILY), doc="family of the matrix product's kernel")
    dtype: str = trait("", DTYPES, doc="operand type")
    tile_m: int = _same("tile_m")
    tile_n: int = _same("tile_n")
    tile_k: int = _same("tile_k")
    warps: int = _same("warps")
    stages: int = _same("stages")
    split_k: int = _same("split_k")
    group_m: int = _same("group_m")
    blocks: int = _same("blocks")
    swap: bool = _same("swap")
    fill: bool = _same("fill")
    atomic: bool = _same("atomic")

    def __post_init__(self) -> None:
        self.check_choices()
        product_kernel(self)  # which refuses what is no kernel

    @property
    def tile(self) -> tuple[int, int, int]:
        """Over the op's m x n result, or its transpose, and the reduction done in a step."""
        return self.tile_m, self.tile_n, self.tile_k

    @property
    def load_warps(self) -> int:
        return int(self.product in LOADING)

    @property
    def is_deterministic(self) -> bool:
        return not self.atomic

    def alignment(self, problem: ConvProblem) -> tuple[int, ...]:
        """Multiples that c and k must be of, where what is contiguous is copied by TMA."""
        own = product_kernel(self).alignment(product(problem))
        if not own or problem.layout != "nhwc":
            return ()
        m, n, k = own
        return {"fwd": (k, n), "bwd_data": (n, k), "bwd_weight": (n, m)}[problem.direction]


@lru_cache(maxsize=65536)
def product_kernel(kernel: GemmConvKernel) -> GpuGemmKernel:
    """The kernel of matrix products that does the work."""
    same = {name: getattr(kernel, name) for name in _TRAITS}
    return BY_FAMILY[kernel.product](family=kernel.product, **same)


def product(problem: ConvProblem) -> GemmProblem:
    """The matrix product that a 1x1 convolution is."""
    p = problem
    sizes = {
        "fwd": (p.in_pixels, p.k, p.c),
        "bwd_data": (p.in_pixels, p.c, p.k),
        "bwd_weight": (p.k, p.c, p.in_pixels),
    }
    m, n, k = sizes[p.direction]
    layout = LAYOUTS[p.direction]
    return GemmProblem(m=m, n=n, k=k, dtype=p.dtype, out_dtype=p.out_dtype, layout=layout)


def why_unusable(kernel: GemmConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    if problem is None:
        return gpu.why_unusable(product_kernel(kernel), None, arch)
    if not problem.is_pointwise or problem.g != 1:
        return "it multiplies matrices: filters of 1x1 in one group, neither strided nor padded"
    if problem.layout != "nhwc":
        return f"pixels of {problem.layout} are no rows of a matrix; it needs nhwc"
    return gpu.why_unusable(product_kernel(kernel), product(problem), arch)
