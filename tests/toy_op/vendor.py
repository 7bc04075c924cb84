"""The vendor's row sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from toy_op.problem import RowSumProblem


def bind_numpy(problem: RowSumProblem, operands: Sequence[Any], out: Any) -> Callable[[], Any]:
    return lambda: np.sum(operands[0], axis=1, out=out)


def bind_torch(problem: RowSumProblem, operands: Sequence[Any], out: Any) -> Callable[[], Any]:
    import torch

    return lambda: torch.sum(operands[0], dim=1, out=out)
