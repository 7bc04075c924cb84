"""C[M, N] = A[M, K] B[K, N], optionally in a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from tilewise.core.dtypes import OPERAND_DTYPES, dtype
from tilewise.core.problem import GemmView, Problem, check_dtypes, check_size
from tilewise.core.tensors import Storage
from tilewise.errors import ProblemError

LAYOUTS = ("rcr", "rrr", "crr", "ccr")
"""Memory order of A, B and C: r is row-major, c column-major. rcr is a PyTorch linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmProblem(Problem):
    """One matrix product. `split_k` above 1 asks for that many slices of the reduction.

    A is [m, k], B [k, n] and C [m, n], each with the batch in front where that is not 1. `layout`
    says how they are stored, r for row-major and c for column-major: in rcr, B is stored as [n, k].
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "fp32"
    out_dtype: str = ""
    layout: str = "rcr"
    split_k: int = 1

    KEYS: ClassVar[dict[str, str]] = {
        "M": "m",
        "N": "n",
        "K": "k",
        "batch": "batch",
        "dtype": "dtype",
        "out_dtype": "out_dtype",
        "layout": "layout",
        "split_k": "split_k",
    }

    def __post_init__(self) -> None:
        for key, least in (("M", 0), ("N", 0), ("K", 0), ("batch", 0), ("split_k", 1)):
            field = self.KEYS[key]
            object.__setattr__(self, field, check_size(key, getattr(self, field), least))
        if self.layout not in LAYOUTS:
            raise ProblemError(f"layout is {self.layout!r}; use one of {', '.join(LAYOUTS)}")
        if self.split_k > max(1, self.k):
            raise ProblemError(f"split_k is {self.split_k}; it cannot exceed K, which is {self.k}")
        object.__setattr__(
            self, "out_dtype", check_dtypes(self.dtype, self.out_dtype, OPERAND_DTYPES)
        )
        self._settle()

    @property
    def op(self) -> str:
        return "gemm"

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        operands = self.m * self.k + self.k * self.n
        return self.batch * (
            operands * dtype(self.dtype).bytes + self.m * self.n * dtype(self.out_dtype).bytes
        )

    @property
    def gemm(self) -> GemmView:
        return GemmView(self.batch, self.m, self.n, self.k)


def shapes(problem: GemmProblem) -> tuple[tuple[int, ...], ...]:
    """Logical shapes of A, B and C; a batch of one has no batch dimension."""
    p = problem
    batch = (p.batch,) if p.batch != 1 else ()
    return (*batch, p.m, p.k), (*batch, p.k, p.n), (*batch, p.m, p.n)


def padded(problem: GemmProblem, alignment: tuple[int, ...]) -> GemmProblem:
    """The smallest problem at least as large whose M, N and K are multiples of `alignment`."""
    m, n, k = (
        -(-size // least) * least
        for size, least in zip((problem.m, problem.n, problem.k), alignment, strict=True)
    )
    if (m, n, k) == (problem.m, problem.n, problem.k):
        return problem
    return replace(problem, m=m, n=n, k=k)


def storage(problem: GemmProblem) -> tuple[Storage, ...]:
    """Rows or columns are packed; any distance may lie between them and between batches."""
    return _storage(problem.layout, bool(problem.batch != 1))


@cache
def _storage(layout: str, is_batched: bool) -> tuple[Storage, ...]:
    batch = (0,) if is_batched else ()
    rows, columns = len(batch), len(batch) + 1
    row_major, column_major = (*batch, rows, columns), (*batch, columns, rows)
    return tuple(Storage(row_major if order == "r" else column_major, dense=1) for order in layout)
