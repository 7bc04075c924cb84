"""Depthwise kernels without matrix units, emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv_cases import assert_finished, assert_right, compute, draw
from emulation import EmulationError

from tilewise.ops.conv.kernels.channelwise import ChannelwiseConvKernel
from tilewise.ops.conv.problem import ConvProblem

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def kernel(direction: str, **changes: Any) -> ChannelwiseConvKernel:
    traits = {"dtype": "bf16", "strip": 4, "warps": 2, "blocks": 1, **changes}
    return ChannelwiseConvKernel(op_name=f"conv_{direction}", family="channelwise", **traits)


def layer(direction: str, channels: int = 70, **changes: Any) -> ConvProblem:
    sizes = {"n": 2, "h": 6, "w": 11, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    sizes |= {"c": channels, "k": channels, "g": channels, **changes}
    return ConvProblem(direction=direction, **sizes)


def check(problem: ConvProblem, **changes: Any) -> None:
    made = kernel(problem.direction, dtype=problem.dtype, **changes)
    operands = draw(problem)
    assert_right(problem, operands, compute(made, problem, operands, seed=1))


GEOMETRIES = {
    "3x3": {},
    "31x31": {"y": 31, "x": 31, "pad_h": 15, "pad_w": 15, "n": 1, "channels": 2},
    "stride_2": {"stride_h": 2, "stride_w": 2, "w": 12},
    "5x5_stride_2": {"stride_h": 2, "stride_w": 2, "y": 5, "x": 5, "pad_h": 2, "pad_w": 2},
    "stride_2_dilated": {
        "stride_w": 2,
        "stride_h": 2,
        "dilation_w": 3,
        "dilation_h": 2,
        "pad_w": 4,
    },
    "wide_pad": {"pad_h": 3, "pad_w": 5},
    "1d": {"h": 1, "y": 1, "pad_h": 0, "x": 4, "pad_w": 3},
    "3d_strided": {"d": 5, "z": 3, "pad_d": 1, "stride_d": 2, "n": 1, "h": 4},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_geometries(direction: str, name: str) -> None:
    check(layer(direction, **{"channels": 6, **GEOMETRIES[name]}))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dtypes(direction: str, dtype: str) -> None:
    check(layer(direction, dtype=dtype), strip=8, warps=4)


def test_atomic_sums_in_fp32() -> None:
    check(layer("bwd_weight", out_dtype="fp32"), atomic=True)


def test_epilogue() -> None:
    assert_finished(kernel("fwd"), layer("fwd", n=1), "relu")


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_spreads_to_other_channels(direction: str, value: float) -> None:
    problem = layer(direction)
    operands = draw(problem)
    before = compute(kernel(direction), problem, operands)
    operands[0][0, 5, 2, 3] = value
    after = compute(kernel(direction), problem, operands)
    axis = 0 if direction == "bwd_weight" else 1
    others = [c for c in range(problem.c) if c != 5]
    assert (np.take(after, others, axis) == np.take(before, others, axis)).all()
    assert not np.isfinite(np.take(after, 5, axis)).all()


SABOTAGE = {
    "filters are read before they are staged": ("  __syncthreads();\n", ""),
    "a column too far": ("return at * STRIDE_W + tap", "return at * STRIDE_W + 1 + tap"),
    "outside of the image": ("column >= 0 && column < width", "column < width"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found(name: str) -> None:
    problem = layer("fwd")
    operands = draw(problem)
    with pytest.raises((EmulationError, AssertionError)):
        out = compute(kernel("fwd"), problem, operands, edits=(SABOTAGE[name],))
        assert_right(problem, operands, out)
