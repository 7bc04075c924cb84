"""GEMM kernels for GPUs by their traits, of whatever type their family is."""

from __future__ import annotations

from typing import Any

from tilewise.ops.contract import get_op
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel


def gemm_kernel(**traits: Any) -> GpuGemmKernel:
    """The kernel with these traits."""
    made = get_op("gemm").kernel_from_dict({"op": "gemm", "engine": "triton", **traits})
    assert isinstance(made, GpuGemmKernel)
    return made
