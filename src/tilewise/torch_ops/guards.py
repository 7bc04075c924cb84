"""Tells tensors alike by PyTorch's own guards: one call instead of a dozen questions to each.

They compare type, sizes, strides, dtype, device, gradients, lazy negation, and whatever watches
the call: modes, autocast, tracing, transforms. Ready calls are found by a small key first, of what
is quick to ask; behind it are those that differ in the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.dispatch.remembered import CALLS

MOST = 8
"""Calls behind one small key; further ones are looked up by all that decides them."""
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def guard(key: Any, call: Any, tensors: tuple[Tensor, ...], generation: int) -> None:
    """Lets `key` find `call`, which was made under `generation`, for tensors like these."""
    others = CALLS.get(key) or ()
    if _Guards is not None and call is not None and len(others) < MOST:
        CALLS.keep(key, (*others, (_alike(tensors), call)), generation)


def _alike(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Whether other tensors, under what watches them then, are like these now."""
    check: Callable[..., bool] = _Guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check
