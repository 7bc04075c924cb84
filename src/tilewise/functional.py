"""`matmul`, `linear` and the convolutions on NumPy arrays and PyTorch tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import erf
from typing import Any

import numpy as np

from tilewise.core.dtypes import dtype
from tilewise.core.tensors import is_torch, require_operand, view
from tilewise.dispatch.operands import check_kind, check_memory
from tilewise.dispatch.shipped import (
    convolve_arrays,
    has_product,
    multiply_arrays,
    product_of_any,
    run_conv,
    run_matmul,
)
from tilewise.errors import TensorError
from tilewise.ops.conv.infer import (
    LayerSettings,
    Padding,
    Sizes,
    from_shapes,
    infer,
    layout_of,
    named,
    tensor_sizes,
)

__all__ = [
    *("conv1d", "conv2d", "conv3d", "conv_input_gradient", "conv_weight_gradient"),
    *("linear", "matmul", "scaled_matmul"),
]

_torch_ops: Any = None


def _tensors() -> Any:
    """The front for PyTorch tensors, imported with the first of them."""
    global _torch_ops
    if _torch_ops is None:
        from tilewise import torch_ops

        _torch_ops = torch_ops
    return _torch_ops


if "torch" in sys.modules:  # so that a compiled function finds it imported
    _tensors()


def matmul(a: Any, b: Any, *, out: Any = None, deterministic: bool = False) -> Any:
    """`a @ b` as in NumPy and PyTorch: matrices, vectors, and batches that broadcast."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _multiply(a, b, out, deterministic)
    return (_torch_ops or _of_tensors(a, b)).matmul(a, b, out, deterministic)


def linear(x: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
    """x Wᵀ + b for x [..., K] and weight [N, K], then `relu`, `gelu` or `silu` if asked."""
    if not isinstance(x, np.ndarray):
        return (_torch_ops or _of_tensors(x, weight)).linear(x, weight, bias, activation)
    activate, rank = _activation(activation), _array("weight", weight).ndim
    if rank != 2 and (rank != 1 or bias is not None):
        raise TensorError(f"weight has {rank} dimensions; a linear layer's has 2, [N, K]")
    if bias is None and activate is None:
        return matmul(x, weight.T)
    result = product_of_any(x, weight.T, partial(run_matmul, out_dtype=_wide(x, bias)))
    if bias is not None:
        _check_array("bias", bias, x, weight.shape[:1])
        result = result + bias
    return _finished(result, x, bias, activate)


def scaled_matmul(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The product of fp8 tensors, with one scale per tensor or per row of a and column of b."""
    front = _torch_ops or _of_tensors(a, b)
    kind = {} if out_dtype is None else {"out_dtype": out_dtype}
    return front.scaled_matmul(a, b, scale_a, scale_b, bias, **kind)


def conv1d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Any = None,
    out: Any = None,
    deterministic: bool = False,
) -> Any:
    """x [N, C, W] convolved with w [K, C / groups, X]; settings are those of PyTorch.

    The result is activation(sum + bias + residual), rounded once where a kernel of ours serves;
    activations are `relu`, `gelu` and `silu`, and a residual is a tensor like the result.
    """
    after, layer = (bias, residual, activation), (stride, padding, dilation, groups)
    return _convolve(1, x, w, after, layer, out, deterministic)


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Any = None,
    out: Any = None,
    deterministic: bool = False,
) -> Any:
    """x [N, C, H, W] convolved with w [K, C / groups, Y, X]; settings as in `conv1d`."""
    after, layer = (bias, residual, activation), (stride, padding, dilation, groups)
    return _convolve(2, x, w, after, layer, out, deterministic)


def conv3d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Any = None,
    out: Any = None,
    deterministic: bool = False,
) -> Any:
    """x [N, C, D, H, W] convolved with w [K, C / groups, Z, Y, X]; settings as in `conv1d`."""
    after, layer = (bias, residual, activation), (stride, padding, dilation, groups)
    return _convolve(3, x, w, after, layer, out, deterministic)


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
    layer = named(stride, padding, dilation, groups)
    if is_torch(dy):
        return _tensors().conv_input_gradient(input_size, w, dy, **layer)
    of, size = view(dy), tensor_sizes("input_size", input_size)
    require_operand(of.dtype)
    layer |= {"dtype": of.dtype, "layout": layout_of(of), "direction": "bwd_data"}
    return run_conv(from_shapes(size, _array("w", w, "dy").shape, **layer), dy, w)


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
    layer = named(stride, padding, dilation, groups)
    if is_torch(x):
        return _tensors().conv_weight_gradient(x, weight_size, dy, **layer)
    of, size = view(x), tensor_sizes("weight_size", weight_size)
    require_operand(of.dtype)
    layer |= {"dtype": of.dtype, "layout": layout_of(of), "direction": "bwd_weight"}
    return run_conv(from_shapes(of.shape, size, **layer), x, _array("dy", dy))


def _array(name: str, given: Any, other: str = "x") -> Any:
    """`given` where it is an array, as the other operands are."""
    view(given)  # refuses what is neither
    if is_torch(given):
        raise TensorError(f"{name} is a tensor and {other} an array; convert one of them")
    return given


def _check_array(name: str, given: Any, x: Any, shape: tuple[int, ...]) -> None:
    """Raises where an array cannot be added to results of `x`'s layer."""
    of, wanted = view(_array(name, given)), _result_dtype(x)
    if of.shape != shape or of.dtype != wanted:
        raise TensorError(
            f"{name} is {of.dtype} of shape {of.shape}; pass an array of {wanted} and shape {shape}"
        )


def _activation(name: str | None) -> Callable[[Any], Any] | None:
    """What is done to an array last, or None."""
    known = {None: None, "none": None, "relu": _relu, "gelu": _gelu, "silu": _silu}
    if not isinstance(name, str | None) or name not in known:
        raise TensorError(f"activation is {name!r}; use one of none, relu, gelu, silu")
    return known[name]


def _relu(x: Any) -> Any:
    return np.maximum(x, 0)


def _gelu(x: Any) -> Any:
    return x * (0.5 + 0.5 * np.vectorize(erf, otypes=[x.dtype])(x * 0.5**0.5))


def _silu(x: Any) -> Any:
    with np.errstate(over="ignore"):  # far below zero the result is zero, as it should be
        return x / (1 + np.exp(-x))


def _finished(result: Any, x: Any, added: Any, activate: Callable[[Any], Any] | None) -> Any:
    """Activated, then rounded to what results of `x`'s layer are, as what was `added` is."""
    if activate is not None:
        result = activate(result)
    kind = x.dtype if added is None else added.dtype
    return result.astype(kind, copy=False) if added is not None or _is_half(x) else result


def _is_half(x: Any) -> bool:
    return view(x).dtype in ("fp16", "bf16")


def _result_dtype(x: Any) -> str:
    """What results of `x`'s layer are."""
    return dtype(view(x).dtype).result


def _wide(x: Any, added: Any) -> str:
    """What sums of `x`'s layer stay in until all is done to them: narrow floats round only then."""
    wanted = _result_dtype(x)
    is_rounded = _is_half(x) or added is not None
    return "fp32" if is_rounded and wanted in ("fp16", "bf16") else wanted


def _of_tensors(a: Any, b: Any) -> Any:
    """The front for tensors, where at least one of the operands is one."""
    for operand in (a, b):
        if not is_torch(operand):
            view(operand)  # refuses what is neither
    return _tensors()


def _multiply(a: Any, b: Any, out: Any, deterministic: bool) -> Any:
    for given in (a, b):
        if type(given) is not np.ndarray:
            view(given)  # refuses masks, which broadcasting would drop
    if has_product(a, b):
        if type(a) is type(b) is np.ndarray and _is_plain_out(out):
            return multiply_arrays(a, b, out, deterministic)
        return run_matmul(a, b, out=out, deterministic=deterministic)
    result = product_of_any(a, b, lambda x, y: run_matmul(x, y, deterministic=deterministic))
    return result if out is None else _into(out, result, a=a, b=b)


def _is_plain_out(out: Any) -> bool:
    return out is None or type(out) is np.ndarray


def _into(out: Any, result: Any, **operands: Any) -> Any:
    """`result` moved into the caller's own array, which may lie nowhere near `operands`."""
    check_kind(out, result)
    check_memory(out, operands)
    out[...] = result
    return out


def _convolve(
    rank: int,
    x: Any,
    w: Any,
    after: tuple[Any, Any, str | None],
    layer: LayerSettings,
    out: Any,
    deterministic: bool,
) -> Any:
    bias, residual, activation = after
    if is_torch(x) or is_torch(w):
        front, how = _tensors(), (*layer, deterministic, activation, residual)
        if out is None:
            return front.convolve(rank, x, w, bias, *how)
        return front.convolve_into(out, rank, x, w, bias, *how)
    activate = None if activation is None else _activation(activation)
    is_bare = bias is None and residual is None and activate is None
    if is_bare and type(x) is type(w) is np.ndarray and _is_plain_out(out):
        return convolve_arrays(rank, x, w, layer, out, deterministic)
    if len(view(x).shape) != rank + 2:
        raise TensorError(f"x has shape {tuple(x.shape)}; conv{rank}d takes {rank + 2} dimensions")
    problem = infer(x, w, **named(*layer))
    if is_bare:
        return run_conv(problem, x, w, out=out, deterministic=deterministic)
    added = residual if bias is None else bias
    wide = replace(problem, out_dtype=_wide(x, added))
    result = run_conv(wide, x, w, deterministic=deterministic)
    if bias is not None:
        _check_array("bias", bias, x, (problem.k,))
        result += bias.reshape((1, -1, *(1,) * rank))
    if residual is not None:
        _check_array("residual", residual, x, result.shape)
        result += residual
    result = _finished(result, x, added, activate)
    return result if out is None else _into(out, result, x=x, w=w, bias=bias, residual=residual)
