"""How a convolution is handed to a compiled CPU kernel; mirrors `tw_conv_args` in abi.hpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

from tilewise.core.tensors import TensorView
from tilewise.ops.conv.problem import ConvProblem

Vec3 = c_int64 * 3


class Args(ctypes.Structure):
    """x, w and y are the forward input, filter and output, whichever of them is written."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "y", "workspace", "team")),
        *((name, c_int64) for name in ("n", "c", "k", "g")),
        *((name, Vec3) for name in ("in", "filter", "out", "stride", "pad", "dilation")),
        *(("x_n", c_int64), ("x_c", c_int64), ("x_s", Vec3)),
        *(("w_k", c_int64), ("w_c", c_int64), ("w_s", Vec3)),
        *(("y_n", c_int64), ("y_k", c_int64), ("y_s", Vec3)),
    )


def _args(problem: ConvProblem, addresses: Sequence[int | None], strides: Sequence[int]) -> Args:
    """`strides` holds (outer, channel, depth, height, width) of x, w and y in turn."""
    made = Args(*addresses)
    given = _numbers(problem, strides)
    at = ctypes.sizeof(c_void_p) * 5
    ctypes.memmove(ctypes.addressof(made) + at, (c_int64 * len(given))(*given), 8 * len(given))
    return made


def _numbers(problem: ConvProblem, strides: Sequence[int]) -> list[int]:
    """What follows the addresses, in the order of the fields."""
    p = problem
    return [
        *(p.n, p.c, p.k, p.g),
        *(p.d, p.h, p.w),
        *(p.z, p.y, p.x),
        *(p.out_d, p.out_h, p.out_w),
        *(p.stride_d, p.stride_h, p.stride_w),
        *(p.pad_d, p.pad_h, p.pad_w),
        *(p.dilation_d, p.dilation_h, p.dilation_w),
        *strides,
    ]


def _packed(outer: int, channels: int, spatial: tuple[int, int, int], layout: str) -> list[int]:
    d, h, w = spatial
    volume = d * h * w * channels
    if layout == "nhwc":
        return [volume, 1, h * w * channels, w * channels, channels]
    return [volume, d * h * w, h * w, w, 1]


def numbers(problem: ConvProblem) -> list[int]:
    """What follows the addresses: sizes and packed strides of a problem."""
    p = problem
    strides = (
        *_packed(p.n, p.c, (p.d, p.h, p.w), p.layout),
        *_packed(p.k, p.c // p.g, (p.z, p.y, p.x), p.layout),
        *_packed(p.n, p.k, (p.out_d, p.out_h, p.out_w), p.layout),
    )
    return _numbers(p, strides)


def sizes(problem: ConvProblem) -> Args:
    """The sizes and packed strides of a problem, without addresses."""
    return _args(problem, (None, None, None), numbers(problem)[-15:])


def fill(problem: ConvProblem, operands: Sequence[TensorView], out: TensorView) -> Args:
    """Addresses and strides of one call, without workspace and team."""
    first, second = operands
    roles = {
        "fwd": (first, second, out),
        "bwd_data": (out, second, first),
        "bwd_weight": (first, out, second),
    }[problem.direction]
    strides: list[int] = []
    for tensor in roles:
        spatial = tensor.strides[2:]
        strides += [*tensor.strides[:2], *(0,) * (3 - len(spatial)), *spatial]
    return _args(problem, [t.address for t in roles], strides)
