"""How a row sum is handed to a compiled CPU kernel; mirrors `row_sum_args`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

from tilewise.core.tensors import TensorView
from toy_op.problem import RowSumProblem


class Args(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "workspace", "team")),
        *((name, c_int64) for name in ("rows", "columns", "pitch")),
    )


def numbers(problem: RowSumProblem) -> tuple[int, ...]:
    return problem.rows, problem.columns, problem.columns


def sizes(problem: RowSumProblem) -> Args:
    return Args(None, None, None, None, *numbers(problem))


def fill(problem: RowSumProblem, operands: Sequence[TensorView], out: TensorView) -> Args:
    (x,) = operands
    pitch = x.strides[0]
    return Args(x.address, out.address, None, None, problem.rows, problem.columns, pitch)
