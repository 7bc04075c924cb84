"""Matrix products among the calls of a PyTorch program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilewise.core.problem import Problem
from tilewise.ops.capturing import Reader, dtype_of
from tilewise.ops.gemm.problem import GemmProblem


def _product(a_at: int) -> Reader:
    """Reads calls whose arguments `a_at` and the next are the matrices (or batches of them)."""

    def read(args: Sequence[Any], result: Any) -> Iterator[Problem]:
        a, b = args[a_at], args[a_at + 1]
        vector = b.dim() == 1
        yield GemmProblem(
            m=a.shape[-2],
            n=1 if vector else b.shape[-1],
            k=a.shape[-1],
            batch=a.shape[0] if a.dim() == 3 else 1,
            dtype=dtype_of(a),
            layout=_order(a) + ("r" if vector else _order(b)) + "r",
        )

    return read


def _linear(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, weight = args[0], args[1]
    rows = x.numel() // max(1, x.shape[-1])
    layout = "rrr" if _order(weight) == "c" else "rcr"
    yield GemmProblem(
        m=rows, n=weight.shape[0], k=weight.shape[1], dtype=dtype_of(x), layout=layout
    )


def _order(matrix: Any) -> str:
    """`c` where only the columns are contiguous, as in a transposed view."""
    rows, columns = matrix.shape[-2:]
    is_row_major = matrix.stride(-1) == 1 and matrix.stride(-2) >= columns
    return "c" if matrix.stride(-2) == 1 and rows > 1 and not is_row_major else "r"


READERS: dict[str, Reader] = {
    "linear": _linear,
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    "_int_mm": _product(0),
    "_scaled_mm": _product(0),
    "addmm": _product(1),
    "_addmm_activation": _product(1),
    "baddbmm": _product(1),
    "addbmm": _product(1),
    "addmv": _product(1),
    "tilewise::linear": _linear,
    "tilewise::matmul": _product(0),
    "tilewise::scaled_matmul": _product(0),
}
