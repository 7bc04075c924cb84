"""Convolutions of plain tensors and both their gradients: nothing here sees autograd or modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.core.tensors import torch_dtype, view
from tilewise.dispatch import default_dispatcher
from tilewise.dispatch.remembered import CALLS
from tilewise.engines.device import detect
from tilewise.errors import ArchError, TensorError
from tilewise.ops.conv.infer import check_addressable, check_groups, from_shapes, layout_of
from tilewise.settings import Settings, settings
from tilewise.torch_ops.calls import Work, allocator, first
from tilewise.torch_ops.library import is_deterministic
from tilewise.torch_ops.memory import alignment
from tilewise.torch_ops.products import HALVES, NATIVE
from tilewise.torch_ops.theirs import leave, why_theirs

Layer = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, padding, dilation and groups."""


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, deterministic: bool = False
) -> Tensor:
    """x [N, C, ...] convolved with w [K, C / groups, ...]."""
    return _call("fwd", x, w, (), layer, deterministic, bias)


def input_gradient(
    size: Sequence[int], w: Tensor, dy: Tensor, layer: Layer, deterministic: bool = False
) -> Tensor:
    """The gradient of an input of `size`."""
    return _call("bwd_data", dy, w, tuple(size), layer, deterministic)


def weight_gradient(
    x: Tensor, size: Sequence[int], dy: Tensor, layer: Layer, deterministic: bool = False
) -> Tensor:
    """The gradient of a filter of `size`."""
    return _call("bwd_weight", x, dy, tuple(size), layer, deterministic)


def is_known(device: torch.device) -> bool:
    """Whether a model knows how fast convolutions are on a device; on CPUs one always does.

    Where none does, the vendor's routine is the best guess, and PyTorch calls it faster than we.
    """
    return device.type != "cuda" or _is_known(device.index, settings())


is_known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced


@cache
def _is_known(index: int, under: Settings) -> bool:
    try:
        rankers = default_dispatcher("conv_fwd", detect("gpu", index)).rankers
    except ArchError:
        return False
    return any(ranker.path == "model" for ranker in rankers)


def _call(
    direction: str,
    first_one: Tensor,
    second: Tensor,
    size: tuple[int, ...],
    layer: Layer,
    deterministic: bool,
    bias: Tensor | None = None,
) -> Tensor:
    tensors = (first_one, second) if bias is None else (first_one, second, bias)
    try:
        key = (
            *(direction, first_one.shape, second.shape, first_one.stride(), second.stride()),
            *(first_one.dtype, second.dtype, first_one.device, second.device, size, layer),
            None if bias is None else (bias.dtype, bias.device),
            alignment(*tensors),
            deterministic or is_deterministic(),
        )
    except RuntimeError:
        key = None
    call: Callable[..., Tensor] | None = CALLS.get(key)
    if call is None:
        return _first(key, direction, tensors, size, layer)
    return call(*tensors)


def _first(
    key: Any,
    direction: str,
    tensors: tuple[Tensor, ...],
    size: tuple[int, ...],
    layer: Layer,
) -> Tensor:
    own = partial(theirs, direction, size, layer)
    why = why_theirs(*tensors[:2])
    if why or key is None:
        return leave(why or "tensors without memory of their own", own, *tensors)
    one, two = tensors[:2]
    shapes = {"fwd": (one.shape, two.shape), "bwd_data": (size, two.shape)}
    x, w = shapes.get(direction, (one.shape, size))
    stride, padding, dilation, groups = layer
    problem = from_shapes(
        tuple(x),
        tuple(w),
        dtype=view(one).dtype,
        layout=layout_of(view(one)),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        direction=direction,
    )
    shape = result_shape(x, w, layer) if direction == "fwd" else size
    if len(tensors) > 2 and one.dtype in HALVES and one.device.type == "cpu":
        problem = replace(problem, out_dtype="fp32")  # so that adding the bias rounds but once
    kind = torch_dtype(problem.out_dtype, one.device)
    result = allocator(shape, dense_strides(shape, problem.layout), kind, one.device)
    if problem.is_empty:
        return own(*tensors) if one.dtype in NATIVE else result().zero_()
    work = Work(
        problem=problem,
        allocate=result,
        theirs=own if one.dtype in NATIVE else None,
        deterministic=key[-1],
        operands=lambda one, two, *bias: (one, two),
        finish=_add_bias if len(tensors) > 2 else None,
    )
    return first(key, work, tensors)


def _add_bias(out: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    out += bias.reshape(-1, *[1] * (out.dim() - 2))
    return out.to(x.dtype) if x.dtype in HALVES else out


def check(rank: int, x: Tensor, w: Tensor, bias: Tensor | None, groups: int) -> None:
    """Raises where shapes do not go together."""
    if x.dim() != rank + 2 or w.dim() != rank + 2:
        raise TensorError(
            f"x has shape {tuple(x.shape)} and w {tuple(w.shape)}; conv{rank}d takes {rank + 2} "
            "dimensions each"
        )
    check_groups(x.shape[1], w.shape[1], groups)
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise TensorError(f"bias has shape {tuple(bias.shape)}; it must be ({w.shape[0]},)")


def check_size(x: Tensor, w: Tensor, layer: Layer) -> None:
    """Raises where the result would be larger than any memory."""
    if x.dim() == w.dim() and all(step > 0 for step in layer[0]):
        shape = result_shape(x.shape, w.shape, layer)
        check_addressable(prod(max(0, size) for size in shape) * x.element_size())


def result_shape(x: Sequence[Any], w: Sequence[Any], layer: Layer) -> tuple[Any, ...]:
    """The shape of a convolution's result."""
    stride, padding, dilation, _ = layer
    sizes = [
        (n + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for n, taps, step, pad, gap in zip(x[2:], w[2:], stride, padding, dilation, strict=True)
    ]
    return (x[0], w[0], *sizes)


def dense_strides(shape: Sequence[Any], layout: str) -> tuple[Any, ...]:
    """Strides of a packed tensor in a memory layout."""
    rank = len(shape)
    order = (0, *range(2, rank), 1) if layout == "nhwc" else range(rank)
    strides = [1] * rank
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis]
    return tuple(strides)


def theirs(
    direction: str,
    size: tuple[int, ...],
    layer: Layer,
    one: Tensor,
    two: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """PyTorch's own."""
    stride, padding, dilation, groups = map(_listed, layer)
    rank = one.dim() - 2
    if direction == "fwd":
        aten = torch.ops.aten.convolution.default
        result: Tensor = aten(one, two, bias, stride, padding, dilation, False, [0] * rank, groups)
        return result
    is_data = direction == "bwd_data"
    # Only its sizes and strides count, but those do: with a stride of 0 PyTorch would take the
    # layer for one of contiguous tensors, and copy the others.
    missing = one.new_empty_strided(size, dense_strides(size, layout_of(view(one))))
    dy, x, w = (one, missing, two) if is_data else (two, one, missing)
    gradients = torch.ops.aten.convolution_backward.default(
        *(dy, x, w, None, stride, padding, dilation, False, [0] * rank, groups),
        [is_data, not is_data, False],
    )
    gradient: Tensor = gradients[0 if is_data else 1]
    return gradient


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
