"""What readers of PyTorch's calls share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import ProblemError

Reader = Callable[[Sequence[Any], Any], Iterator[Problem]]
"""`reader(arguments, result)`: the problems that one call computes."""

_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "bf8",
    "int8": "int8",
}


def dtype_of(tensor: Any) -> str:
    """Our name of a tensor's type; raises where there is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ProblemError(f"dtype {name} is not supported")
    return _DTYPES[name]
