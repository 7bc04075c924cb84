"""The `tilewise::` operators: each with its shapes for tracing and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.infer import layout_by
from tilewise.torch_ops import convolutions, products, scaled
from tilewise.torch_ops.convolutions import Layer, dense_strides, result_shape
from tilewise.torch_ops.fallback import RESULTS, torch_matmul
from tilewise.torch_ops.registering import define, is_seen

_LAYER = "int[] stride, int[] padding, int[] dilation, int groups, bool deterministic"

PLAIN = Epilogue()
_check: Callable[..., None] = torch._check


def _like(result: Tensor, strides: Sequence[int]) -> Tensor:
    """A result stored as promised when the call was traced; PyTorch's own may not be."""
    if result.stride() == tuple(strides):
        return result
    return torch.empty_strided(
        result.shape, strides, dtype=result.dtype, device=result.device
    ).copy_(result)


def _matmul_fake(a: Tensor, b: Tensor, deterministic: bool) -> Tensor:
    _check(a.shape[-1] == b.shape[-2], lambda: f"shapes {a.shape} and {b.shape} differ in K")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=RESULTS.get(a.dtype, a.dtype))


def _matmul_save(ctx: Any, inputs: Any, output: Tensor) -> None:
    a, b, ctx.deterministic = inputs
    wants_a, wants_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if wants_b else None, b if wants_a else None)


def _matmul_backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    da = matmul(dc, b.mH, ctx.deterministic) if b is not None else None
    db = matmul(a.mH, dc, ctx.deterministic) if a is not None else None
    return da, db, None


matmul = define(
    "matmul(Tensor a, Tensor b, bool deterministic) -> Tensor",
    lambda a, b, deterministic: products.matmul(a.resolve_neg(), b.resolve_neg(), deterministic),
    _matmul_fake,
    _matmul_save,
    _matmul_backward,
    lambda a, b, deterministic: torch_matmul(a, b),
)


def _linear_run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    plain = None if bias is None else bias.resolve_neg()
    return products.linear(x.resolve_neg(), weight.resolve_neg(), plain, activation)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    _check(x.shape[-1] == weight.shape[1], lambda: f"{x.shape} by {weight.shape} differ in K")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, bias, ctx.activation = inputs
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    is_plain = ctx.activation == "none"
    ctx.save_for_backward(
        x if wants_weight or not is_plain else None,
        weight if wants_x or not is_plain else None,
        None if is_plain else bias,
    )


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    if ctx.activation != "none":  # what was activated is computed again rather than kept
        dy = dy * SLOPES[ctx.activation](linear(x, weight, bias, "none"))
    rows = _rows(dy)
    dx = dw = None
    if wants_x:
        dx = linear(dy, weight.mT, None, "none")
    if wants_weight:
        dw = matmul(rows.mT, _rows(x), False)
    return dx, dw, rows.sum(0) if wants_bias else None, None


def _rows(tensor: Tensor) -> Tensor:
    """All but the last dimension as one; counted, as -1 says nothing where there are none."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


def _gelu_slope(z: Tensor) -> Tensor:
    bell = torch.exp(z * z * -0.5) * 0.3989422804014327
    return 0.5 * (1 + torch.erf(z * 0.7071067811865476)) + z * bell


def _silu_slope(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 + z * (1 - gate))


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: (z > 0).to(z.dtype),
    "gelu": _gelu_slope,
    "silu": _silu_slope,
}
"""Derivatives of the activations."""

linear = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    _linear_run,
    _linear_fake,
    _linear_save,
    _linear_backward,
    lambda x, weight, bias, activation: products.torch_linear(activation, x, weight, bias),
)

scaled_matmul = define(
    "scaled_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    scaled.scaled_matmul,
    lambda a, b, scale_a, scale_b, bias, out_dtype: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
)


def _layout(x: Tensor) -> str:
    return layout_by(x.shape, x.stride(1))


def _layer(settings: Sequence[Any]) -> tuple[Layer, bool]:
    stride, padding, dilation, groups, deterministic = settings
    return (tuple(stride), tuple(padding), tuple(dilation), groups), deterministic


def _stored(like: Tensor, shape: Sequence[int], sample: Tensor) -> Tensor:
    strides = dense_strides(shape, _layout(sample))
    return like.new_empty_strided(tuple(shape), strides, dtype=RESULTS.get(like.dtype, like.dtype))


def _conv_run(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, after: str, *settings: Any
) -> Tensor:
    layer, fixed = _layer(settings)
    plain = [None if t is None else t.resolve_neg() for t in (bias, residual)]
    result = convolutions.convolution(
        *(x.resolve_neg(), w.resolve_neg(), plain[0], layer, fixed),
        residual=plain[1],
        activation=after,
    )
    return _like(result, dense_strides(result.shape, _layout(x)))


def _conv_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, after: str, *settings: Any
) -> Tensor:
    shape = result_shape(x.shape, w.shape, _layer(settings)[0])
    _check(
        residual is None or tuple(residual.shape) == shape,
        lambda: f"residual must have the result's shape, {shape}",
    )
    return _stored(x, shape, x)


def _conv_save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, w, bias, residual, ctx.activation, *ctx.layer = inputs
    is_lost = ctx.activation not in ("none", "relu")  # what was activated is computed again
    more = (bias, residual) if is_lost else (output if ctx.activation == "relu" else None, None)
    ctx.save_for_backward(x, w, *more)


def _conv_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w, *more = ctx.saved_tensors
    wants_x, wants_w, wants_bias, wants_residual = ctx.needs_input_grad[:4]
    if ctx.activation == "relu":
        dy = dy * (more[0] > 0)
    elif ctx.activation != "none":
        dy = dy * SLOPES[ctx.activation](convolution(x, w, *more, "none", *ctx.layer))
    dx = conv_input_gradient(x.shape, w, dy, *ctx.layer) if wants_x else None
    dw = conv_weight_gradient(x, w.shape, dy, *ctx.layer) if wants_w else None
    db = dy.sum([0, *range(2, dy.dim())]) if wants_bias else None
    return dx, dw, db, dy if wants_residual else None, *[None] * 6


def _conv_quick_run(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, after: str, *settings: Any
) -> Tensor:
    if any(t is not None and t.is_neg() for t in (x, w, bias, residual)):
        return _conv_run(x, w, bias, residual, after, *settings)
    layer, fixed = _layer(settings)
    return convolutions.convolution(x, w, bias, layer, fixed, residual=residual, activation=after)


def _conv_quick_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Where gradients are not differentiated again, straight to the kernels."""
    is_plain = type(dy) is Tensor and not is_seen()
    if torch.is_grad_enabled() or not is_plain or ctx.activation not in ("none", "relu"):
        return _conv_backward(ctx, dy)
    x, w, y, _ = ctx.saved_tensors
    if dy.is_neg() or x.is_neg() or w.is_neg():
        return _conv_backward(ctx, dy)
    wants_x, wants_w, wants_bias, wants_residual = ctx.needs_input_grad[:4]
    if y is not None:
        dy = dy * (y > 0)
    layer, fixed = _layer(ctx.layer)
    dx = convolutions.input_gradient(x.shape, w, dy, layer, fixed) if wants_x else None
    dw = convolutions.weight_gradient(x, w.shape, dy, layer, fixed) if wants_w else None
    db = dy.sum([0, *range(2, dy.dim())]) if wants_bias else None
    return dx, dw, db, dy if wants_residual else None, *[None] * 6


def _conv_theirs(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, after: str, *settings: Any
) -> Tensor:
    done = Epilogue(bias=bias is not None, residual=residual is not None, activation=after)
    more = [tensor for tensor in (bias, residual) if tensor is not None]
    return convolutions.torch_convolution("fwd", (), _layer(settings)[0], done, x, w, *more)


def _data_run(size: Sequence[int], w: Tensor, dy: Tensor, *settings: Any) -> Tensor:
    layer, fixed = _layer(settings)
    result = convolutions.input_gradient(size, w.resolve_neg(), dy.resolve_neg(), layer, fixed)
    return _like(result, dense_strides(result.shape, _layout(dy)))


def _data_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    w, dy = ctx.saved_tensors
    wants_w, wants_dy = ctx.needs_input_grad[1:3]
    dw = conv_weight_gradient(g, w.shape, dy, *ctx.layer) if wants_w else None
    ddy = convolution(g, w, None, None, "none", *ctx.layer) if wants_dy else None
    return None, dw, ddy, *[None] * 5


def _data_save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, w, dy, *ctx.layer = inputs
    ctx.save_for_backward(w, dy)


def _weight_run(x: Tensor, size: Sequence[int], dy: Tensor, *settings: Any) -> Tensor:
    layer, fixed = _layer(settings)
    result = convolutions.weight_gradient(x.resolve_neg(), size, dy.resolve_neg(), layer, fixed)
    return _like(result, dense_strides(result.shape, _layout(x)))


def _weight_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, dy = ctx.saved_tensors
    wants_x, _, wants_dy = ctx.needs_input_grad[:3]
    dx = conv_input_gradient(x.shape, g, dy, *ctx.layer) if wants_x else None
    ddy = convolution(x, g, None, None, "none", *ctx.layer) if wants_dy else None
    return dx, None, ddy, *[None] * 5


def _weight_save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, _, dy, *ctx.layer = inputs
    ctx.save_for_backward(x, dy)


convolution = define(
    "convolution(Tensor x, Tensor w, Tensor? bias, Tensor? residual, str activation, "
    f"{_LAYER}) -> Tensor",
    _conv_run,
    _conv_fake,
    _conv_save,
    _conv_backward,
    _conv_theirs,
    (_conv_quick_run, _conv_quick_backward),
)
conv_input_gradient = define(
    f"conv_input_gradient(SymInt[] size, Tensor w, Tensor dy, {_LAYER}) -> Tensor",
    _data_run,
    lambda size, w, dy, *settings: _stored(dy, size, dy),
    _data_save,
    _data_backward,
    lambda size, w, dy, *settings: convolutions.torch_convolution(
        "bwd_data", tuple(size), _layer(settings)[0], PLAIN, dy, w
    ),
)
conv_weight_gradient = define(
    f"conv_weight_gradient(Tensor x, SymInt[] size, Tensor dy, {_LAYER}) -> Tensor",
    _weight_run,
    lambda x, size, dy, *settings: _stored(x, size, x),
    _weight_save,
    _weight_backward,
    lambda x, size, dy, *settings: convolutions.torch_convolution(
        "bwd_weight", tuple(size), _layer(settings)[0], PLAIN, x, dy
    ),
)


def _product_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(a) * b[-1]


def _layer_flops(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


def _conv_flops(out: Sequence[int], w: Sequence[int]) -> int:
    """Of a layer with this result and this filter, in every direction."""
    return 2 * prod(out) * prod(w[1:])


_COUNTED = {
    "matmul": _product_flops,
    "scaled_matmul": _product_flops,
    "linear": _layer_flops,
    "convolution": lambda x, w, *_, out_shape, **__: _conv_flops(out_shape, w),
    "conv_input_gradient": lambda size, w, dy, *_, **__: _conv_flops(dy, w),
    "conv_weight_gradient": lambda x, size, dy, *_, **__: _conv_flops(dy, size),
}
for _name, _formula in _COUNTED.items():  # what PyTorch's FlopCounterMode counts
    register_flop_formula(getattr(torch.ops.tilewise, _name))(_formula)
