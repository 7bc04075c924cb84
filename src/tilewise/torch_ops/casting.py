"""Autocast's casts of weights, made once while autocast lasts, as PyTorch's own are."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

_Weak: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]


class Casts(threading.local):
    """Casts of one thread, valid as long as PyTorch keeps its own."""

    def __init__(self) -> None:
        self._sign: Any = None
        self._held: dict[tuple[int, torch.dtype, bool], tuple[Any, Tensor]] = {}

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in autocast's type, for use under autocast."""
        if not _is_kept(weight):
            return weight.to(dtype)
        if self._sign is None or self._sign.expired():
            self._held.clear()
            self._sign = _sign(weight.device)
        key = (id(weight), dtype, torch.is_grad_enabled())
        held = self._held.get(key)
        if held is not None and held[0]() is weight:
            return held[1]
        made = weight.to(dtype)
        self._held[key] = (weakref.ref(weight), made)
        return made


def _is_kept(weight: Tensor) -> bool:
    """Whether PyTorch would keep this tensor's cast: parameters, outside of any tracing."""
    is_parameter = weight.dtype == torch.float32 and weight.requires_grad and weight.is_leaf
    is_free = torch.is_autocast_cache_enabled() and not torch.compiler.is_compiling()
    return is_parameter and is_free and type(weight) in (Tensor, torch.nn.Parameter)


def _sign(device: torch.device) -> Any:
    """A weak reference to a tensor that lives exactly as long as PyTorch's own casts.

    PyTorch drops them where the outermost autocast ends, and tells nobody.
    """
    with torch.enable_grad():
        one, two = (torch.zeros(1, 1, device=device, requires_grad=True) for _ in range(2))
        node: Any = torch.mm(one, two).grad_fn
    return _Weak(node._saved_mat2)


CASTS = Casts()
