"""Depthwise convolution kernels in CUDA C++, emulated."""

from __future__ import annotations

from typing import Any

import pytest
from conv_cases import assert_finished, assert_right, compute, draw
from emulation import EmulationError

from tilewise.ops.conv.kernels.depthwise import DepthwiseConvKernel
from tilewise.ops.conv.problem import ConvProblem

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def kernel(direction: str, **changes: Any) -> DepthwiseConvKernel:
    traits = {"dtype": "bf16", "tile_h": 4, "tile_w": 16, "channels": 16, "blocks": 1, **changes}
    if direction == "bwd_weight":
        traits.setdefault("stages", 2)
    return DepthwiseConvKernel(op_name=f"conv_{direction}", family="depthwise", **traits)


def layer(direction: str, channels: int = 24, **changes: Any) -> ConvProblem:
    sizes = {"n": 2, "h": 7, "w": 19, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    sizes |= {"c": channels, "k": channels, "g": channels, **changes}
    return ConvProblem(direction=direction, **sizes)


def check(problem: ConvProblem, seed: int = 0, **changes: Any) -> None:
    made = kernel(problem.direction, dtype=problem.dtype, **changes)
    operands = draw(problem)
    assert_right(problem, operands, compute(made, problem, operands, seed=seed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_any_order_of_events(direction: str, seed: int) -> None:
    check(layer(direction), seed)


STRIDED = {"stride_h": 2, "stride_w": 2}
GEOMETRIES = {
    "5x5": {"y": 5, "x": 5, "pad_h": 2, "pad_w": 2},
    "7x7": {"y": 7, "x": 7, "pad_h": 3, "pad_w": 3},
    "3x3_stride_2": STRIDED,
    "5x5_stride_2": {"y": 5, "x": 5, "pad_h": 2, "pad_w": 2, **STRIDED},
    "7x7_stride_2": {"y": 7, "x": 7, "pad_h": 3, "pad_w": 3, "h": 8, "w": 20, **STRIDED},
    "1x1_stride_2": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, **STRIDED},
    "stride_3": {"stride_h": 3, "stride_w": 3},
    "dilated": {"dilation_h": 2, "dilation_w": 3, "pad_h": 2, "pad_w": 3},
    "2x4": {"y": 2, "x": 4, "pad_h": 0, "pad_w": 3},
    "1d": {"h": 1, "y": 1, "pad_h": 0, "x": 4, "pad_w": 3, "n": 3},
    "1d_stride_2": {"h": 1, "y": 1, "pad_h": 0, "x": 5, "pad_w": 2, "n": 3, "stride_w": 2},
    "3d": {"d": 3, "z": 3, "pad_d": 1, "h": 4, "n": 1},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_geometries(direction: str, name: str) -> None:
    is_large = "7x7" in name or (direction == "bwd_data" and "stride" in name)
    tile_w = 8 if is_large and direction != "bwd_weight" else 16
    check(layer(direction, **{"channels": 16, "n": 1, **GEOMETRIES[name]}), tile_w=tile_w)


@pytest.mark.parametrize(
    "tile",
    [
        {"tile_h": 14, "tile_w": 8, "channels": 32},
        {"tile_h": 2, "tile_w": 32, "channels": 64},
        {"tile_h": 8, "tile_w": 16, "channels": 32},
    ],
)
def test_tiles(tile: dict[str, int]) -> None:
    check(layer("fwd", channels=72, n=1), **tile)
    if tile["tile_w"] % 16 == 0:
        check(layer("bwd_weight", channels=72, n=1), stages=1, **tile)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fp16(direction: str) -> None:
    check(layer(direction, channels=16, n=1, dtype="fp16"))


def test_atomic_sums_in_fp32() -> None:
    check(layer("bwd_weight", out_dtype="fp32"), atomic=True)


def test_epilogue() -> None:
    assert_finished(kernel("fwd"), layer("fwd", n=1), "silu")


SABOTAGE = {
    "no wait for the rows": ("    barrier_wait(barriers + 8 * quad, 0);\n", ""),
    "no fence before the store": ("  fence_async();\n", ""),
    "no wait for the store": ("    tma_store_wait<0>();\n", ""),
    "a pair too few is open": ("/ Rows::step + 2;", "/ Rows::step;"),
    "rows the wrong way round": ("i / 2, 2 * to + i % 2", "i % 2, 2 * to + i / 2"),
    "a shifted channel": ("own / 2 == lane % 4 &&", "own / 2 == (lane + 1) % 4 &&"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found(name: str) -> None:
    problem = layer("fwd", channels=16, n=1)
    operands = draw(problem)
    with pytest.raises((EmulationError, AssertionError)):
        out = compute(kernel("fwd"), problem, operands, edits=(SABOTAGE[name],))
        assert_right(problem, operands, out)
