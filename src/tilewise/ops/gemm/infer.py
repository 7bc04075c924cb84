"""The GEMM problem behind two tensors."""

from __future__ import annotations

from typing import Any

from tilewise.core.tensors import TensorView, require_operand, view
from tilewise.errors import TensorError
from tilewise.ops.gemm.problem import GemmProblem


def infer(a: Any, b: Any, *, out_dtype: str = "") -> GemmProblem:
    """`a @ b` for [M, K] by [K, N], or [batch, M, K] by [batch, K, N]."""
    x, y = view(a), view(b)
    if x.dtype != y.dtype:
        raise TensorError(f"a is {x.dtype} and b is {y.dtype}; convert one of them")
    require_operand(x.dtype)
    if len(x.shape) not in (2, 3) or len(x.shape) != len(y.shape):
        raise TensorError(
            f"a has shape {x.shape} and b {y.shape}; pass [M, K] and [K, N], or both with a batch"
        )
    if x.shape[-1] != y.shape[-2]:
        raise TensorError(
            f"a has shape {x.shape} and b {y.shape}; the {x.shape[-1]} columns of a must be as "
            f"many as the {y.shape[-2]} rows of b"
        )
    if x.shape[:-2] != y.shape[:-2]:
        raise TensorError(f"a has batch {x.shape[0]} and b {y.shape[0]}; they must be equal")
    return GemmProblem(
        m=x.shape[-2],
        n=y.shape[-1],
        k=x.shape[-1],
        batch=x.shape[0] if len(x.shape) == 3 else 1,
        dtype=x.dtype,
        out_dtype=out_dtype,
        layout=_order(x) + _order(y) + "r",
    )


def _order(seen: TensorView) -> str:
    """c where only the rows are packed, r otherwise (other strides are copied to r)."""
    rows, columns = seen.shape[-2:]
    is_row_major = seen.strides[-1] == 1 or columns == 1
    is_column_major = seen.strides[-2] == 1 or rows == 1
    return "c" if is_column_major and not is_row_major else "r"
