"""`matmul` and the convolutions on NumPy arrays and PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.core.tensors import is_torch, view
from tilewise.dispatch.calls import run_conv, run_matmul
from tilewise.errors import TensorError
from tilewise.ops.conv.infer import from_shapes, infer, layout_of

__all__ = ["conv1d", "conv2d", "conv3d", "conv_input_gradient", "conv_weight_gradient", "matmul"]


def matmul(a: Any, b: Any, *, out: Any = None, deterministic: bool = False) -> Any:
    """The product of [M, K] by [K, N], or of [batch, M, K] by [batch, K, N]."""
    if _wants_gradient(a, b, out):
        from tilewise.torch_ops import differentiable_matmul

        return differentiable_matmul(a, b)
    return run_matmul(a, b, out=out, deterministic=deterministic)


def conv1d(x: Any, w: Any, *, out: Any = None, **layer: Any) -> Any:
    """x [N, C, W] convolved with w [K, C / groups, X].

    `stride`, `padding`, `dilation` and `groups` mean what they mean in PyTorch.
    """
    return _convolve(1, x, w, out, layer)


def conv2d(x: Any, w: Any, *, out: Any = None, **layer: Any) -> Any:
    """x [N, C, H, W] convolved with w [K, C / groups, Y, X]; settings as in `conv1d`."""
    return _convolve(2, x, w, out, layer)


def conv3d(x: Any, w: Any, *, out: Any = None, **layer: Any) -> Any:
    """x [N, C, D, H, W] convolved with w [K, C / groups, Z, Y, X]; settings as in `conv1d`."""
    return _convolve(3, x, w, out, layer)


def conv_input_gradient(input_size: Sequence[int], w: Any, dy: Any, **layer: Any) -> Any:
    """The gradient of a convolution's input of `input_size`, from its output's gradient."""
    return _gradient("bwd_data", tuple(input_size), tuple(w.shape), dy, w, dy, layer)


def conv_weight_gradient(x: Any, weight_size: Sequence[int], dy: Any, **layer: Any) -> Any:
    """The gradient of a convolution's filter of `weight_size`, from its output's gradient."""
    return _gradient("bwd_weight", tuple(x.shape), tuple(weight_size), x, dy, dy, layer)


def _convolve(rank: int, x: Any, w: Any, out: Any, layer: dict[str, Any]) -> Any:
    if len(view(x).shape) != rank + 2:
        raise TensorError(f"x has shape {tuple(x.shape)}; conv{rank}d takes {rank + 2} dimensions")
    problem = infer(x, w, **layer)
    if _wants_gradient(x, w, out):
        from tilewise.torch_ops import differentiable_conv

        return differentiable_conv(x, w, problem)
    return run_conv(problem, x, w, out)


def _gradient(
    direction: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    first: Any,
    second: Any,
    dy: Any,
    layer: dict[str, Any],
) -> Any:
    seen = view(dy)
    problem = from_shapes(
        x, w, dtype=seen.dtype, layout=layout_of(seen), direction=direction, **layer
    )
    return run_conv(problem, first, second)


def _wants_gradient(a: Any, b: Any, out: Any) -> bool:
    """Whether PyTorch has to remember this call for its backward pass."""
    if not (is_torch(a) and is_torch(b)) or not (a.requires_grad or b.requires_grad):
        return False
    import torch

    if not torch.is_grad_enabled():
        return False
    if out is not None:
        raise TensorError("out= cannot be differentiated; leave it away or use torch.no_grad()")
    return True
