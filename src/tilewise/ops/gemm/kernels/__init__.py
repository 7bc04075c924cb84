"""Every kind of GEMM kernel, and the one function that says whether a kernel can serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops import vendor
from tilewise.ops.gemm.kernels import cktile, cpu, gpu
from tilewise.ops.gemm.kernels.gemv import GemvKernel
from tilewise.ops.gemm.kernels.pointer import PointerGemmKernel
from tilewise.ops.gemm.kernels.smallk import SmallKGemmKernel
from tilewise.ops.gemm.kernels.specialised import TwoGroupGemmKernel, WsGemmKernel
from tilewise.ops.gemm.kernels.tma import TmaGemmKernel
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.gemm.vendor import scaled_mm_fits


def _why_no_vendor(kernel: Any, problem: Problem | None, arch: Arch) -> str | None:
    """Where it has no routine for 8-bit floats it widens them first, ten times slower than ours."""
    why = vendor.why_unusable(kernel, problem, arch)
    if why is not None or arch.kind != "gpu" or not isinstance(problem, GemmProblem):
        return why
    if problem.dtype == "bf8" or (problem.dtype == "fp8" and not scaled_mm_fits(problem)):
        return f"the vendor has no routine for this product of {problem.dtype}"
    return None


GPU_KERNEL_TYPES: tuple[type[gpu.GpuGemmKernel], ...] = (
    PointerGemmKernel,
    GemvKernel,
    TmaGemmKernel,
    WsGemmKernel,
    TwoGroupGemmKernel,
    SmallKGemmKernel,
)
"""Told apart by their families."""
BY_FAMILY = {family: kind for kind in GPU_KERNEL_TYPES for family in kind.families()}

_RULES: dict[type[Kernel], Callable[[Any, Any, Arch], str | None]] = {
    cpu.CpuGemmKernel: cpu.why_unusable,
    **dict.fromkeys(GPU_KERNEL_TYPES, gpu.why_unusable),
    cktile.CkTileGemmKernel: cktile.why_unusable,
    vendor.VendorKernel: _why_no_vendor,
}

KERNEL_TYPES: tuple[type[Kernel], ...] = tuple(_RULES)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None.

    Without a problem: whether the kernel could serve any problem there.
    """
    if problem is not None and kernel.op != problem.op:
        return f"it computes {kernel.op}, not {problem.op}"
    return _RULES[type(kernel)](kernel, problem, arch)
