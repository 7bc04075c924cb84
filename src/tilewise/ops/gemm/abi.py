"""How a GEMM is handed to a compiled CPU kernel; mirrors `tw_gemm_args` in abi.hpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

from tilewise.core.tensors import TensorView
from tilewise.ops.gemm.problem import GemmProblem


class Args(ctypes.Structure):
    """Strides are in elements; C is row-major."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "c", "workspace", "team")),
        *((name, c_int64) for name in ("batch", "m", "n", "k")),
        *((name, c_int64) for name in ("a_batch", "a_row", "a_col")),
        *((name, c_int64) for name in ("b_batch", "b_row", "b_col")),
        *((name, c_int64) for name in ("c_batch", "c_row")),
    )


def numbers(problem: GemmProblem) -> tuple[int, ...]:
    """What follows the addresses: sizes and packed strides of a problem."""
    m, n, k = problem.m, problem.n, problem.k
    a = (k, 1) if problem.layout[0] == "r" else (1, m)
    b = (n, 1) if problem.layout[1] == "r" else (1, k)
    return problem.batch, m, n, k, m * k, *a, k * n, *b, m * n, n


def sizes(problem: GemmProblem) -> Args:
    """The sizes and packed strides of a problem, without addresses."""
    return Args(*(None,) * 5, *numbers(problem))


def fill(problem: GemmProblem, operands: Sequence[TensorView], out: TensorView) -> Args:
    """Addresses and strides of one call, without workspace and team."""
    a, b = (t.strides if len(t.strides) == 3 else (0, *t.strides) for t in operands)
    c = out.strides if len(out.strides) == 3 else (0, *out.strides)
    return Args(
        *(operands[0].address, operands[1].address, out.address, None, None),
        *(problem.batch, problem.m, problem.n, problem.k),
        *(*a, *b, c[0], c[1]),
    )
