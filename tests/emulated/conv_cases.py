"""Convolutions on emulated kernels against float64, for the tests of every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulation
import numpy as np

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
POISON = {"bf16": 0xFFA5, "fp16": 0xFFA5}


def to_bits(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """As memory holds them: 16-bit floats as integers, rounded to nearest."""
    narrow = values.astype(np.float32)
    if dtype == "fp32":
        return narrow
    if dtype == "fp16":
        return narrow.astype(np.float16).view(np.uint16)
    bits = narrow.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_floats(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "fp32":
        return bits
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def draw(problem: ConvProblem, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Random operands in logical order, of the values that memory can hold."""
    rng = np.random.default_rng(seed)
    drawn = [rng.standard_normal(shape) for shape in shapes(problem)[:2]]
    return [to_floats(to_bits(v, problem.dtype), problem.dtype) for v in drawn]


def compute(
    kernel: Kernel,
    problem: ConvProblem,
    operands: list[np.ndarray[Any, Any]],
    *,
    seed: int = 0,
    edits: emulation.Edits = (),
    epilogue: Epilogue | None = None,
    extra: tuple[np.ndarray[Any, Any], ...] = (),
) -> np.ndarray[Any, Any]:
    """The kernel's result in logical order; what it does not write stays NaN."""
    why = get_op(problem.op).why_unusable(kernel, problem, ARCH)
    assert why is None, why
    stored = [_stored(to_bits(v, problem.dtype)) for v in operands]
    shape = shapes(problem)[2]
    last = (shape[0], *shape[2:], shape[1])
    empty = np.full(last, np.nan, np.float32)
    result = empty if problem.out_dtype == "fp32" else np.full(last, 0xFFA5, np.uint16)
    more = [_stored(to_bits(v, problem.out_dtype)) for v in extra]
    made = launch(kernel, problem, SMALL, epilogue=epilogue)
    out = emulation.run(made, [*stored, result, *more], seed=seed, edits=edits)[2]
    return np.moveaxis(to_floats(out, problem.out_dtype), -1, 1)


def _stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1) if array.ndim > 1 else array)


def assert_right(
    problem: ConvProblem, operands: list[np.ndarray[Any, Any]], result: np.ndarray[Any, Any]
) -> None:
    """Within rounding of float64, as a whole and at its worst element."""
    assert_close(problem, reference(problem, *operands), result)


def assert_close(
    problem: ConvProblem, expected: np.ndarray[Any, Any], result: np.ndarray[Any, Any]
) -> None:
    assert np.isfinite(result).all(), f"{(~np.isfinite(result)).sum()} elements were not written"
    allowed = tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    error = result - expected
    assert np.linalg.norm(error) <= allowed * np.linalg.norm(expected)
    scale = np.abs(expected).max() + 1e-3
    assert np.abs(error).max() <= 4 * allowed * scale
