"""Convolutions of plain tensors and both their gradients: nothing here sees autograd or modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.core.dtypes import dtype
from tilewise.core.tensors import torch_dtype, view
from tilewise.dispatch import default_dispatcher, live_arch
from tilewise.dispatch.remembered import CALLS
from tilewise.engines.device import detect
from tilewise.errors import ArchError, TensorError
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.infer import (
    check_addressable,
    check_groups,
    from_shapes,
    layout_by,
    layout_of,
    misses_input,
)
from tilewise.ops.conv.problem import ConvProblem
from tilewise.settings import Settings, settings
from tilewise.torch_ops.calls import Work, allocator, first
from tilewise.torch_ops.fallback import leave, why_no_kernels
from tilewise.torch_ops.memory import alignment
from tilewise.torch_ops.products import ACTIVATE, HALVES, IN_PLACE, NATIVE
from tilewise.torch_ops.registering import is_deterministic

Layer = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, padding, dilation and groups."""


def convolution(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    layer: Layer,
    deterministic: bool = False,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """x [N, C, ...] convolved with w [K, C / groups, ...]: activation(sum + bias + residual)."""
    return _call("fwd", x, w, (), layer, deterministic, bias, residual, activation)


def convolution_with_sums(x: Tensor, w: Tensor, sums: Tensor, layer: Layer) -> Tensor:
    """x convolved with w; `sums` become the result's channels' sums and sums of squares."""
    return _call("fwd", x, w, (), layer, False, sums=sums)


def is_fused(x: Tensor, w: Tensor, layer: Layer, after: Epilogue) -> bool:
    """Whether the kernel that serves a layer does along the way what comes after it."""
    problem = _problem("fwd", x, x.shape, w.shape, layer)
    try:
        dispatcher = default_dispatcher(problem.op, live_arch(x))
        plan, _ = dispatcher.plan(
            problem,
            deterministic=is_deterministic(),
            epilogue=after,
            saved_bytes=_saved_bytes(problem, after),
        )
    except ArchError:
        return False
    return plan.epilogue is not None


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


def compute(
    direction: str, one: Tensor, two: Tensor, size: tuple[int, ...], layer: Layer
) -> Tensor:
    """Any direction of a layer, of its two operands; `size` is a gradient's."""
    return _call(direction, one, two, size, layer, False)


def is_known(device: torch.device) -> bool:
    """Whether convolutions were measured on a device, for a model or a plan; on CPUs they were.

    Elsewhere the vendor's routine is the best guess, and PyTorch calls it faster than we.
    """
    return device.type != "cuda" or _is_known(device.index, settings())


is_known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced


@cache
def _is_known(index: int, under: Settings) -> bool:
    try:
        rankers = default_dispatcher("conv_fwd", detect("gpu", index)).rankers
    except ArchError:
        return False
    return any(ranker.path in ("measured", "model") for ranker in rankers)


def call_key(
    direction: str,
    tensors: tuple[Tensor, ...],
    size: tuple[int, ...],
    layer: Layer,
    deterministic: bool,
    has_not: tuple[bool, bool],
    activation: str,
) -> Any:
    """All that decides a call; raises RuntimeError for tensors without memory.

    `has_not` says of the tensors behind the two operands which are missing: bias and sums.
    """
    one, two, *more = tensors
    extra: tuple[Any, ...] = ()
    if more:
        extra = (*has_not, *((t.shape, t.stride(), t.dtype, t.device) for t in more))
    return (
        *(direction, one.shape, two.shape, one.stride(), two.stride()),
        *(one.dtype, two.dtype, one.device, two.device, size, layer),
        *(extra, activation, alignment(*tensors), deterministic or is_deterministic()),
    )


def _call(
    direction: str,
    first_one: Tensor,
    second: Tensor,
    size: tuple[int, ...],
    layer: Layer,
    deterministic: bool,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    sums: Tensor | None = None,
) -> Tensor:
    tensors: tuple[Tensor, ...] = (first_one, second)
    if bias is not None or residual is not None or sums is not None:
        tensors += tuple(tensor for tensor in (bias, residual, sums) if tensor is not None)
    kind = (bias is None, sums is None)
    try:
        key = call_key(direction, tensors, size, layer, deterministic, kind, activation)
    except RuntimeError:
        key = None
    call: Callable[..., Tensor] | None = CALLS.get(key)
    if call is None:
        after = Epilogue(
            bias=bias is not None,
            residual=residual is not None,
            activation=activation,
            sums=sums is not None,
        )
        return _first(key, direction, tensors, size, layer, after)
    return call(*tensors)


def _first(
    key: Any,
    direction: str,
    tensors: tuple[Tensor, ...],
    size: tuple[int, ...],
    layer: Layer,
    after: Epilogue,
) -> Tensor:
    why = why_no_kernels(*tensors[:2])
    if why or key is None:
        why = why or "tensors without memory of their own"
        return leave(why, partial(torch_convolution, direction, size, layer, after), *tensors)
    one, two = tensors[:2]
    if direction == "fwd":
        bias = tensors[2] if after.bias else None
        check(one.dim() - 2, one, two, bias, None, layer)
        if bias is not None and bias.dtype != one.dtype:
            raise TensorError(f"bias is {bias.dtype} and x is {one.dtype}; convert one of them")
    own = torch_call(direction, size, layer, after, one, two)
    shapes = {"fwd": (one.shape, two.shape), "bwd_data": (size, two.shape)}
    x, w = shapes.get(direction, (one.shape, size))
    problem = _problem(direction, one, x, w, layer)
    shape = result_shape(x, w, layer) if direction == "fwd" else size
    if not after.is_plain and one.dtype in HALVES and one.device.type == "cpu":
        problem = replace(problem, out_dtype="fp32")  # so that what is done to it rounds but once
    kind = torch_dtype(problem.out_dtype, one.device)
    strides = dense_strides(shape, problem.layout)
    result = allocator(shape, strides, kind, one.device)
    if problem.is_empty:
        return own(*tensors) if one.dtype in NATIVE else result().zero_()
    work = Work(
        problem=problem,
        allocate=result,
        pytorch=own if one.dtype in NATIVE else None,
        deterministic=key[-1],
        operands=lambda one, two, *more: (one, two),
        epilogue=None if after.is_plain else after,
        saved_bytes=_saved_bytes(problem, after),
        vectors=partial(_vectors, after, kind, strides),
        finish=None if after.is_plain else partial(_finish, after),
    )
    return first(key, work, tensors)


def _problem(
    direction: str, one: Tensor, x: Sequence[int], w: Sequence[int], layer: Layer
) -> ConvProblem:
    """A layer of these sizes whose first operand is `one`."""
    stride, padding, dilation, groups = layer
    return from_shapes(
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


def _saved_bytes(problem: ConvProblem, after: Epilogue) -> int:
    """What fusing saves: reading the result again for its sums, reading and writing it for more."""
    size = problem.output_elements * dtype(problem.out_dtype).bytes
    is_changed = after.bias or after.residual or after.activation != "none"
    return size * (int(after.sums) + 2 * is_changed)


def _vectors(
    after: Epilogue, kind: torch.dtype, strides: tuple[int, ...], *tensors: Tensor
) -> list[Tensor]:
    """Bias and residual as kernels read them: of the result's type, stored like it."""
    more = list(tensors[2:])
    if after.bias:
        more[0] = more[0].to(kind).contiguous()
    if after.residual and (more[-1].dtype != kind or more[-1].stride() != strides):
        residual = more[-1]
        like = residual.new_empty_strided(tuple(residual.shape), strides, dtype=kind)
        more[-1] = like.copy_(residual)
    return more


def _finish(after: Epilogue, out: Tensor, x: Tensor, w: Tensor, *more: Tensor) -> Tensor:
    """What kernels that fuse nothing leave to be done."""
    if after.bias:
        out += more[0].reshape(-1, *[1] * (out.dim() - 2))
    if after.residual:
        out += more[-1]
    if after.activation != "none":
        out = IN_PLACE.get(after.activation, ACTIVATE[after.activation])(out)
    out = out.to(x.dtype) if x.dtype in HALVES else out
    if after.sums:
        _sum_channels(out, more[-1])
    return out


def _sum_channels(result: Tensor, sums: Tensor) -> None:
    axes = [0, *range(2, result.dim())]
    torch.sum(result, axes, dtype=torch.float32, out=sums[0])
    torch.sum(result.float().square(), axes, out=sums[1])


def check(
    rank: int, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, layer: Layer
) -> None:
    """Raises where shapes do not go together."""
    if x.dim() != rank + 2 or w.dim() != rank + 2:
        raise TensorError(
            f"x has shape {tuple(x.shape)} and w {tuple(w.shape)}; conv{rank}d takes {rank + 2} "
            "dimensions each"
        )
    check_groups(x.shape[1], w.shape[1], layer[-1])
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise TensorError(f"bias has shape {tuple(bias.shape)}; it must be ({w.shape[0]},)")
    if residual is not None:
        shape = result_shape(x.shape, w.shape, layer)
        if tuple(residual.shape) != shape:
            raise TensorError(
                f"residual has shape {tuple(residual.shape)}; it must be the result's, {shape}"
            )


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


def torch_convolution(
    direction: str,
    size: tuple[int, ...],
    layer: Layer,
    after: Epilogue,
    one: Tensor,
    two: Tensor,
    *more: Tensor,
) -> Tensor:
    """PyTorch's own."""
    return torch_call(direction, size, layer, after, one, two)(one, two, *more)


def torch_call(
    direction: str, size: tuple[int, ...], layer: Layer, after: Epilogue, one: Tensor, two: Tensor
) -> Callable[..., Tensor]:
    """PyTorch's own for tensors stored like these."""
    x_size = size if direction == "bwd_data" else one.shape
    w_size = size if direction == "bwd_weight" else two.shape
    if crashes(one, x_size, w_size, layer):
        return partial(_widened, direction, size, layer, after)
    stride, padding, dilation, groups = map(_listed, layer)
    rank = one.dim() - 2
    rest: tuple[Any, ...] = (stride, padding, dilation, False, [0] * rank, groups)
    if direction == "fwd":
        return _torch_forward(after, rest)
    # Only its sizes and strides count, but those do: with a stride of 0 PyTorch would take the
    # layer for one of contiguous tensors, and copy the others.
    strides = dense_strides(size, layout_by(one.shape, one.stride(1)))
    is_data, backward = direction == "bwd_data", torch.ops.aten.convolution_backward.default
    wanted = [is_data, not is_data, False]

    def gradient(one: Tensor, two: Tensor) -> Tensor:
        missing = one.new_empty_strided(size, strides)
        dy, x, w = (one, missing, two) if is_data else (two, one, missing)
        found: Tensor = backward(dy, x, w, None, *rest, wanted)[0 if is_data else 1]
        return found

    return gradient


def _torch_forward(after: Epilogue, rest: tuple[Any, ...]) -> Callable[..., Tensor]:
    activate = IN_PLACE.get(after.activation, ACTIVATE[after.activation])

    def plain(one: Tensor, two: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.convolution(one, two, bias, *rest)

    def finished(one: Tensor, two: Tensor, *more: Tensor) -> Tensor:
        result = plain(one, two, more[0] if after.bias else None)
        if after.residual:
            result += more[-1]
        if after.sums:
            _sum_channels(result, more[-1])
        return activate(result)

    is_plain = not after.residual and not after.sums and after.activation == "none"
    return plain if is_plain else finished


def _widened(
    direction: str, size: tuple[int, ...], layer: Layer, after: Epilogue, *tensors: Tensor
) -> Tensor:
    one, two, *more = (tensor.float() for tensor in tensors)
    return torch_convolution(direction, size, layer, after, one, two, *more).to(tensors[0].dtype)


def crashes(tensor: Tensor, x: Sequence[int], w: Sequence[int], layer: Layer) -> bool:
    """Whether PyTorch's own convolution of these may end the process; in fp32 it does not."""
    if tensor.dtype is not torch.bfloat16 or tensor.device.type != "cpu":
        return False
    return len(x) == len(w) == len(layer[0]) + 2 and misses_input(x[2:], w[2:], *layer[:3])


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
