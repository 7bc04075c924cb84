"""Convolutions among the calls of a PyTorch program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from tilewise.core.problem import Problem
from tilewise.ops.capturing import Reader, dtype_of
from tilewise.ops.conv.problem import ConvProblem


def _convolution(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
    sizes = _conv_fields(weight, stride, padding, dilation, groups)
    if transposed:
        yield _conv("bwd_data", small=x, large=result, **sizes)
    else:
        yield _conv("fwd", small=result, large=x, **sizes)


def _convolution_backward(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    dy, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = args[:11]
    sizes = _conv_fields(weight, stride, padding, dilation, groups)
    # Of a transposed convolution the gradient of the input is a forward convolution.
    small, large = (x, dy) if transposed else (dy, x)
    if mask[0]:
        yield _conv("fwd" if transposed else "bwd_data", small=small, large=large, **sizes)
    if mask[1]:
        yield _conv("bwd_weight", small=small, large=large, **sizes)


def _own_convolution(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, weight, _, _, _, *layer = args  # bias, residual, activation
    yield _conv("fwd", small=result, large=x, **_conv_fields(weight, *layer[:4]))


def _own_input_gradient(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    _, weight, dy, *layer = args
    yield _conv("bwd_data", small=dy, large=result, **_conv_fields(weight, *layer[:4]))


def _own_weight_gradient(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, _, dy, *layer = args
    yield _conv("bwd_weight", small=dy, large=x, **_conv_fields(result, *layer[:4]))


def _conv_fields(
    weight: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> dict[str, Any]:
    dims = "dhw"[5 - weight.dim() :]
    found: dict[str, Any] = {"g": groups}
    for name, values in (("stride", stride), ("pad", padding), ("dilation", dilation)):
        spread = list(values) * (len(dims) if len(values) == 1 else 1)
        found |= {f"{name}_{dim}": value for dim, value in zip(dims, spread, strict=True)}
    taps = "zyx"[5 - weight.dim() :]
    return {**found, **dict(zip(taps, weight.shape[2:], strict=True))}


def _conv(direction: str, *, small: Any, large: Any, **sizes: Any) -> ConvProblem:
    """The problem whose forward input is `large` and whose forward output is `small`."""
    dims = "dhw"[5 - large.dim() :]
    return ConvProblem(
        direction=direction,
        n=large.shape[0],
        c=large.shape[1],
        k=small.shape[1],
        dtype=dtype_of(large),
        layout=_layout(large),
        **dict(zip(dims, large.shape[2:], strict=True)),
        **sizes,
    )


def _layout(image: Any) -> str:
    channels, pixels = image.shape[1], prod(image.shape[2:])
    is_last = image.stride(1) == 1 and (channels > 1 or image.stride(-1) == channels)
    return "nhwc" if is_last and pixels > 1 else "nchw"


READERS: dict[str, Reader] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "tilewise::convolution": _own_convolution,
    "tilewise::conv_input_gradient": _own_input_gradient,
    "tilewise::conv_weight_gradient": _own_weight_gradient,
}
