"""What a convolution and its gradients must give, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from tilewise.ops.conv.problem import ConvProblem

Array = np.ndarray[Any, np.dtype[Any]]
Slices = tuple[slice, slice, slice]


def reference(problem: ConvProblem, *operands: Array) -> Array:
    """The op's result over logical [n, c, (d, h,) w] arrays; filters are [k, c/g, (z, y,) x].

    Operands are (x, w) forward, (dy, w) for the gradient of the input and (x, dy) for that of the
    filter. One matrix product per tap of the filter.
    """
    p = problem
    first, second = (_spread(p, operand) for operand in operands)
    if p.direction == "fwd":
        return _narrow(p, _forward(p, first, second))
    if p.direction == "bwd_data":
        return _narrow(p, _backward_data(p, first, second))
    return _narrow(p, _backward_weight(p, first, second))


def _steps(p: ConvProblem) -> tuple[tuple[int, int, int], ...]:
    """Stride, dilation and pad of depth, height and width."""
    return (
        (p.stride_d, p.dilation_d, p.pad_d),
        (p.stride_h, p.dilation_h, p.pad_h),
        (p.stride_w, p.dilation_w, p.pad_w),
    )


def _shapes(p: ConvProblem) -> tuple[tuple[int, ...], ...]:
    """x, w and y with all three dimensions."""
    return (
        (p.n, p.c, p.d, p.h, p.w),
        (p.k, p.c // p.g, p.z, p.y, p.x),
        (p.n, p.k, p.out_d, p.out_h, p.out_w),
    )


def _spread(p: ConvProblem, array: Array) -> Array:
    """In float64 with all three dimensions."""
    missing = 5 - array.ndim
    return array.reshape(*array.shape[:2], *(1,) * missing, *array.shape[2:]).astype(np.float64)


def _narrow(p: ConvProblem, array: Array) -> Array:
    return array.reshape(*array.shape[:2], *array.shape[5 - p.ndim :])


def _windows(p: ConvProblem) -> Iterator[tuple[tuple[int, int, int], Slices]]:
    """Every tap with the pixels of the padded input that it meets, in the order of the output."""
    outs = (p.out_d, p.out_h, p.out_w)
    for tap in product(range(p.z), range(p.y), range(p.x)):
        starts = [t * d for t, (_, d, _) in zip(tap, _steps(p), strict=True)]
        d, h, w = (
            slice(start, start + (o - 1) * s + 1, s)
            for start, o, (s, _, _) in zip(starts, outs, _steps(p), strict=True)
        )
        yield tap, (d, h, w)


def _padded(p: ConvProblem, x: Array) -> Array:
    return np.pad(x, [(0, 0), (0, 0), *((pad, pad) for _, _, pad in _steps(p))])


def _by_group(p: ConvProblem, array: Array) -> Array:
    """[n, g, channels of the group, pixels of all dimensions]."""
    n, channels = array.shape[:2]
    return array.reshape(n, p.g, channels // p.g, int(np.prod(array.shape[2:])))


def _forward(p: ConvProblem, x: Array, w: Array) -> Array:
    padded, shape = _padded(p, x), _shapes(p)[2]
    out = np.zeros((p.n, p.g, p.k // p.g, int(np.prod(shape[2:]))))
    for tap, window in _windows(p):
        pixels = _by_group(p, padded[:, :, *window])
        out += w[:, :, *tap].reshape(p.g, p.k // p.g, p.c // p.g) @ pixels
    return out.reshape(shape)


def _backward_data(p: ConvProblem, dy: Array, w: Array) -> Array:
    grad = _by_group(p, dy)
    padded = _padded(p, np.zeros(_shapes(p)[0]))
    for tap, window in _windows(p):
        filters = w[:, :, *tap].reshape(p.g, p.k // p.g, p.c // p.g)
        spread = filters.transpose(0, 2, 1) @ grad
        padded[:, :, *window] += spread.reshape(padded[:, :, *window].shape)
    inner = (
        slice(pad, pad + size) for size, (_, _, pad) in zip((p.d, p.h, p.w), _steps(p), strict=True)
    )
    return padded[:, :, *inner]


def _backward_weight(p: ConvProblem, x: Array, dy: Array) -> Array:
    padded, grad = _padded(p, x), _by_group(p, dy)
    out = np.zeros(_shapes(p)[1])
    for tap, window in _windows(p):
        pixels = _by_group(p, padded[:, :, *window])
        out[:, :, *tap] = (grad @ pixels.swapaxes(2, 3)).sum(0).reshape(p.k, p.c // p.g)
    return out
