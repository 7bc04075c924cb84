"""What a GEMM must give, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.ops.gemm.problem import GemmProblem

Array = np.ndarray[Any, np.dtype[Any]]


def reference(problem: GemmProblem, a: Array, b: Array) -> Array:
    """A B over logical [.., M, K] and [.., K, N] arrays."""
    product: Array = np.matmul(a.astype(np.float64), b.astype(np.float64))
    return product
