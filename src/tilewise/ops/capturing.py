"""What readers of PyTorch's calls share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilewise.core.dtypes import OPERAND_DTYPES
from tilewise.core.problem import Problem
from tilewise.core.tensors import NAMES
from tilewise.errors import ProblemError

Reader = Callable[[Sequence[Any], Any], Iterator[Problem]]
"""`reader(arguments, result)`: the problems that one call computes."""


def dtype_of(tensor: Any) -> str:
    """Our name of a tensor's type; raises where there is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    if NAMES.get(name) not in OPERAND_DTYPES:
        raise ProblemError(f"dtype {name} is not supported")
    return NAMES[name]
