"""CUDA kernels of convolutions in the shipped pool of an H200, by type."""

from __future__ import annotations

from typing import TypeVar

from tilewise.core.arch import load_arch
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.kernels.directed import CudaConvKernel
from tilewise.ops.conv.problem import ConvProblem

ARCH = load_arch("sm_90", "H200")
K = TypeVar("K", bound=CudaConvKernel)


def pool(direction: str, kind: type[K]) -> list[K]:
    """Those of the very type."""
    kernels = load_pool(get_op(f"conv_{direction}"), ARCH, engines=("cuda",))
    return [k for k in kernels if type(k) is kind]


def legal(problem: ConvProblem, kind: type[K]) -> list[K]:
    rule = get_op(problem.op).why_unusable
    return [k for k in pool(problem.direction, kind) if rule(k, problem, ARCH) is None]
