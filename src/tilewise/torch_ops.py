"""PyTorch's autograd over tilewise: gradients are computed by tilewise kernels too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tilewise.dispatch.calls import run_conv, run_matmul
from tilewise.ops.conv.problem import ConvProblem


class Matmul(torch.autograd.Function):
    """C = A B with dA = dC Bᵀ and dB = Aᵀ dC, as often differentiable as one likes."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, deterministic: bool) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.deterministic = deterministic
        result: torch.Tensor = run_matmul(a, b, deterministic=deterministic)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        (dc,) = gradients
        wants_a, wants_b, _ = ctx.needs_input_grad
        da = differentiable_matmul(dc, b.mT, ctx.deterministic) if wants_a else None
        db = differentiable_matmul(a.mT, dc, ctx.deterministic) if wants_b else None
        return da, db, None


class Convolution(torch.autograd.Function):
    """A convolution in any number of dimensions, with both of its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, problem: ConvProblem, deterministic: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.problem = problem
        ctx.deterministic = deterministic
        result: torch.Tensor = run_conv(problem, x, w, deterministic=deterministic)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        (dy,) = gradients
        wants_x, wants_w, *_ = ctx.needs_input_grad
        data, weight = (replace(ctx.problem, direction=d) for d in ("bwd_data", "bwd_weight"))
        fixed = {"deterministic": ctx.deterministic}
        dx = run_conv(data, dy, w, **fixed) if wants_x else None
        dw = run_conv(weight, x, dy, **fixed) if wants_w else None
        return dx, dw, None, None


def differentiable_matmul(a: torch.Tensor, b: torch.Tensor, deterministic: bool) -> torch.Tensor:
    """`a @ b`, remembered for the backward pass."""
    result: torch.Tensor = Matmul.apply(a, b, deterministic)  # type: ignore[no-untyped-call]
    return result


def differentiable_conv(
    x: torch.Tensor, w: torch.Tensor, problem: ConvProblem, deterministic: bool
) -> torch.Tensor:
    """A convolution, remembered for the backward pass."""
    result: torch.Tensor = Convolution.apply(  # type: ignore[no-untyped-call]
        x, w, problem, deterministic
    )
    return result
