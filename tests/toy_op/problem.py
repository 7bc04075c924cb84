"""Sums of the rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.problem import GemmView, Problem, check_dtypes, check_size
from tilewise.core.tensors import Storage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSumProblem(Problem):
    """`rows` sums of `columns` numbers each."""

    rows: int
    columns: int
    dtype: str = "fp32"
    out_dtype: str = ""

    KEYS: ClassVar[dict[str, str]] = {
        "rows": "rows",
        "columns": "columns",
        "dtype": "dtype",
        "out_dtype": "out_dtype",
    }

    def __post_init__(self) -> None:
        for key in ("rows", "columns"):
            object.__setattr__(self, key, check_size(key, getattr(self, key), 0))
        out_dtype = check_dtypes(self.dtype, self.out_dtype, ("fp32",))
        object.__setattr__(self, "out_dtype", out_dtype)
        self._settle()

    @property
    def op(self) -> str:
        return "row_sum"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns

    @property
    def bytes(self) -> int:
        return 4 * self.rows * (self.columns + 1)

    @property
    def gemm(self) -> GemmView:
        return GemmView(1, self.rows, 1, self.columns)


def shapes(problem: RowSumProblem) -> tuple[tuple[int, ...], ...]:
    return (problem.rows, problem.columns), (problem.rows,)


def storage(problem: RowSumProblem) -> tuple[Storage, ...]:
    return Storage((0, 1), dense=1), Storage((0,), dense=1)
