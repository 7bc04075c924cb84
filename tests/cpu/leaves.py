"""Tensors that want gradients, and those gradients."""

from __future__ import annotations

from typing import Any

import torch


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def gradients(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradient of each tensor, under an uneven gradient of the result."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    out.backward(weights)
    return [out.detach(), *[t.grad for t in leaves]]  # type: ignore[misc]
