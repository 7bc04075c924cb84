"""PyTorch's autograd over tilewise: gradients are computed by tilewise kernels too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewise.dispatch.calls import run_conv, run_matmul
from tilewise.ops.conv.problem import ConvProblem


class Matmul(torch.autograd.Function):
    """C = A B with dA = dC Bᵀ and dB = Aᵀ dC."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        result: torch.Tensor = run_matmul(a.detach(), b.detach())
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        (dc,) = gradients
        da = run_matmul(dc, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        db = run_matmul(a.transpose(-1, -2), dc) if ctx.needs_input_grad[1] else None
        return da, db


class Convolution(torch.autograd.Function):
    """A convolution in any number of dimensions, with both of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, problem: ConvProblem) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.problem = problem
        result: torch.Tensor = run_conv(problem, x.detach(), w.detach())
        return result

    @staticmethod
    def backward(
        ctx: Any, *gradients: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, w = ctx.saved_tensors
        (dy,) = gradients
        data, weight = (replace(ctx.problem, direction=d) for d in ("bwd_data", "bwd_weight"))
        dx = run_conv(data, dy, w) if ctx.needs_input_grad[0] else None
        dw = run_conv(weight, x, dy) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def differentiable_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, remembered for the backward pass."""
    result: torch.Tensor = Matmul.apply(a, b)  # type: ignore[no-untyped-call]
    return result


def differentiable_conv(x: torch.Tensor, w: torch.Tensor, problem: ConvProblem) -> torch.Tensor:
    """A convolution, remembered for the backward pass."""
    result: torch.Tensor = Convolution.apply(x, w, problem)  # type: ignore[no-untyped-call]
    return result
