"""Calls on the shipped pools: what the functional API and its gradients are made of."""

from __future__ import annotations

from typing import Any

from tilewise.dispatch import default_dispatcher, live_arch
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.infer import infer


def run_matmul(a: Any, b: Any, *, out: Any = None, deterministic: bool = False) -> Any:
    """`a @ b` by the kernel that suits it; a batch of one stays a batch."""
    dispatcher = default_dispatcher("gemm", live_arch(a))
    result = dispatcher.run(infer(a, b), a, b, out=out, deterministic=deterministic).out
    if out is not None or len(result.shape) == len(a.shape):
        return result
    return result.reshape((1, *result.shape))


def run_conv(
    problem: ConvProblem, first: Any, second: Any, *, out: Any = None, deterministic: bool = False
) -> Any:
    """One direction of a convolution; the result has as many dimensions as the operands."""
    dispatcher = default_dispatcher(problem.op, live_arch(first))
    result = dispatcher.run(problem, first, second, out=out, deterministic=deterministic).out
    missing = len(first.shape) - len(result.shape)
    if out is not None or not missing:
        return result
    return result.reshape((*result.shape[:2], *(1,) * missing, *result.shape[2:]))
