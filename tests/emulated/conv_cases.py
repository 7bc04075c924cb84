"""Convolutions on emulated kernels against float64, for the tests of every family."""

from __future__ import annotations

from dataclasses import replace

import emulation
import numpy as np
from conv_calls import Array, activated, channels_last, narrow, poisoned, widen

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.launch import launch
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.reference import reference

ARCH = load_arch("sm_90")
# Fewer multiprocessors, so that blocks walk over several tiles although problems are tiny.
SMALL = replace(ARCH, compute_units=3)


def draw(problem: ConvProblem, seed: int = 0) -> list[Array]:
    """Random operands in logical order, of the values that memory can hold."""
    rng, dtype = np.random.default_rng(seed), problem.dtype
    drawn = [rng.standard_normal(shape) for shape in shapes(problem)[:2]]
    return [widen(narrow(values, dtype), dtype) for values in drawn]


def compute(
    kernel: Kernel,
    problem: ConvProblem,
    operands: list[Array],
    *,
    seed: int = 0,
    edits: emulation.Edits = (),
    epilogue: Epilogue | None = None,
    extra: tuple[Array, ...] = (),
) -> Array:
    """The kernel's result in logical order; what it does not write stays NaN."""
    why = get_op(problem.op).why_unusable(kernel, problem, ARCH)
    assert why is None, why
    result = poisoned(shapes(problem)[2], problem.out_dtype)
    read = [_stored(values, problem.dtype) for values in operands]
    more = [_stored(values, problem.out_dtype) for values in extra]
    made = launch(kernel, problem, SMALL, epilogue=epilogue)
    out = emulation.run(made, [*read, result, *more], seed=seed, edits=edits)[2]
    return np.moveaxis(widen(out, problem.out_dtype), -1, 1)


def _stored(values: Array, dtype: str) -> Array:
    return channels_last(narrow(values, dtype)) if values.ndim > 1 else narrow(values, dtype)


def assert_right(problem: ConvProblem, operands: list[Array], result: Array) -> None:
    """Within rounding of float64, as a whole and at its worst element."""
    assert_close(problem, reference(problem, *operands), result)


def assert_close(problem: ConvProblem, expected: Array, result: Array) -> None:
    assert np.isfinite(result).all(), f"{(~np.isfinite(result)).sum()} elements were not written"
    allowed = tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    error = result - expected
    assert np.linalg.norm(error) <= allowed * np.linalg.norm(expected)
    scale = np.abs(expected).max() + 1e-3
    assert np.abs(error).max() <= 4 * allowed * scale


def assert_finished(kernel: Kernel, problem: ConvProblem, activation: str) -> None:
    """A layer of images whose kernel adds bias and residual, and applies the activation."""
    operands, rng = draw(problem), np.random.default_rng(1)
    expected = reference(problem, *operands)
    bias, residual = (
        rng.integers(-4, 5, shape).astype(np.float32)
        for shape in (expected.shape[1:2], expected.shape)
    )
    epilogue = Epilogue(bias=True, residual=True, activation=activation)
    out = compute(kernel, problem, operands, epilogue=epilogue, extra=(bias, residual))
    assert_close(problem, activated(expected + bias[:, None, None] + residual, activation), out)
