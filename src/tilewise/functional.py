"""`matmul` and the convolutions on NumPy arrays and PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.core.tensors import is_torch, view
from tilewise.dispatch.calls import run_conv, run_matmul
from tilewise.errors import TensorError
from tilewise.ops.conv.infer import Padding, Sizes, from_shapes, infer, layout_of

__all__ = ["conv1d", "conv2d", "conv3d", "conv_input_gradient", "conv_weight_gradient", "matmul"]


def matmul(a: Any, b: Any, *, out: Any = None, deterministic: bool = False) -> Any:
    """The product of [M, K] by [K, N], or of [batch, M, K] by [batch, K, N]."""
    if _wants_gradient(a, b, out):
        from tilewise.torch_ops import differentiable_matmul

        return differentiable_matmul(a, b, deterministic)
    return run_matmul(a, b, out=out, deterministic=deterministic)


def conv1d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out: Any = None,
    deterministic: bool = False,
) -> Any:
    """x [N, C, W] convolved with w [K, C / groups, X]; settings mean what they do in PyTorch."""
    layer = _layer(stride, padding, dilation, groups)
    return _convolve(1, x, w, bias, layer, out, deterministic)


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out: Any = None,
    deterministic: bool = False,
) -> Any:
    """x [N, C, H, W] convolved with w [K, C / groups, Y, X]; settings as in `conv1d`."""
    layer = _layer(stride, padding, dilation, groups)
    return _convolve(2, x, w, bias, layer, out, deterministic)


def conv3d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out: Any = None,
    deterministic: bool = False,
) -> Any:
    """x [N, C, D, H, W] convolved with w [K, C / groups, Z, Y, X]; settings as in `conv1d`."""
    layer = _layer(stride, padding, dilation, groups)
    return _convolve(3, x, w, bias, layer, out, deterministic)


def conv_input_gradient(
    input_size: Sequence[int],
    w: Any,
    dy: Any,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """The gradient of a convolution's input of `input_size`, from its output's gradient."""
    layer = _layer(stride, padding, dilation, groups)
    of = view(dy)
    layer |= {"dtype": of.dtype, "layout": layout_of(of), "direction": "bwd_data"}
    return run_conv(from_shapes(tuple(input_size), view(w).shape, **layer), dy, w)


def conv_weight_gradient(
    x: Any,
    weight_size: Sequence[int],
    dy: Any,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """The gradient of a convolution's filter of `weight_size`, from its output's gradient."""
    layer = _layer(stride, padding, dilation, groups)
    of = view(x)
    layer |= {"dtype": of.dtype, "layout": layout_of(of), "direction": "bwd_weight"}
    return run_conv(from_shapes(of.shape, tuple(weight_size), **layer), x, dy)


def _layer(stride: Sizes, padding: Padding, dilation: Sizes, groups: int) -> dict[str, Any]:
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def _convolve(
    rank: int, x: Any, w: Any, bias: Any, layer: dict[str, Any], out: Any, deterministic: bool
) -> Any:
    if len(view(x).shape) != rank + 2:
        raise TensorError(f"x has shape {tuple(x.shape)}; conv{rank}d takes {rank + 2} dimensions")
    problem = infer(x, w, **layer)
    if bias is not None and tuple(bias.shape) != (problem.k,):
        raise TensorError(f"bias has shape {tuple(bias.shape)}; it must be ({problem.k},)")
    if _wants_gradient(x, w, out):
        from tilewise.torch_ops import differentiable_conv

        result = differentiable_conv(x, w, problem, deterministic)
    else:
        result = run_conv(problem, x, w, out=out, deterministic=deterministic)
    if bias is None:
        return result
    spread = bias.reshape((1, -1, *(1,) * rank))
    if is_torch(bias) and bias.requires_grad and out is None:
        return result + spread
    result += spread
    return result


def _wants_gradient(a: Any, b: Any, out: Any) -> bool:
    """Whether PyTorch has to remember this call for its backward pass."""
    if not any(is_torch(t) and t.requires_grad for t in (a, b)):
        return False
    import torch

    if not torch.is_grad_enabled():
        return False
    if not (is_torch(a) and is_torch(b)):
        raise TensorError("a NumPy array and a tensor that requires a gradient; convert the array")
    if out is not None:
        raise TensorError("out= cannot be differentiated; leave it away or use torch.no_grad()")
    if a.dtype.itemsize < 2:
        raise TensorError(f"products of {a.dtype} have no gradient; convert to bfloat16 first")
    return True
