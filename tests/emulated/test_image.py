"""Kernels for the gradient of a network's image in CUDA C++, emulated."""

from __future__ import annotations

from typing import Any

import pytest
from conv_cases import assert_finished, assert_right, compute, draw
from emulation import EmulationError

from tilewise.errors import KernelError
from tilewise.ops.conv.kernels.image import ImageConvKernel
from tilewise.ops.conv.problem import ConvProblem


def kernel(**changes: Any) -> ImageConvKernel:
    traits = {"dtype": "bf16", "tile_h": 4, "tile_w": 16, "stages": 2, "blocks": 1, **changes}
    return ImageConvKernel(op_name="conv_bwd_data", family="image", **traits)


def layer(**changes: Any) -> ConvProblem:
    sizes = {"n": 2, "c": 3, "k": 40, "h": 13, "w": 38, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    sizes |= {"stride_h": 2, "stride_w": 2, "dtype": "bf16"} | changes
    return ConvProblem(direction="bwd_data", **sizes)


def check(problem: ConvProblem, seed: int = 0, **changes: Any) -> None:
    operands = draw(problem)
    made = kernel(dtype=problem.dtype, **changes)
    assert_right(problem, operands, compute(made, problem, operands, seed=seed))


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_of_events(seed: int) -> None:
    check(layer(), seed)


GEOMETRIES: dict[str, dict[str, Any]] = {
    "7x7": {"y": 7, "x": 7, "pad_h": 3, "pad_w": 3},
    "11x11_stride_4": {"y": 11, "x": 11, "stride_h": 4, "stride_w": 4, "pad_h": 2, "c": 4},
    "4x4_stride_4": {"y": 4, "x": 4, "stride_h": 4, "stride_w": 4, "pad_h": 0, "pad_w": 0, "h": 18},
    "stride_1": {"stride_h": 1, "stride_w": 1, "w": 21},
    "uneven": {"y": 2, "x": 5, "stride_h": 3, "stride_w": 1, "pad_h": 0, "pad_w": 4},
    "gaps": {"y": 1, "x": 2, "stride_h": 2, "stride_w": 3, "pad_h": 0},
    "one_channel": {"c": 1, "w": 37},
    "two_channels_24": {"c": 2, "k": 24, "n": 1},
    "many": {"k": 136, "h": 9},
    "96": {"k": 96, "h": 9},
    "1d": {"h": 1, "y": 1, "pad_h": 0, "stride_h": 1, "x": 5, "pad_w": 2},
    "fp16": {"dtype": "fp16", "k": 64},
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name: str) -> None:
    check(layer(**GEOMETRIES[name]))


@pytest.mark.parametrize(
    "tile", [{"tile_h": 2, "tile_w": 32, "stages": 1}, {"tile_h": 8, "stages": 3, "blocks": 2}]
)
def test_other_tiles(tile: dict[str, int]) -> None:
    check(layer(h=40, w=70, k=96), **tile)


def test_warps_take_whole_lines_of_places() -> None:
    with pytest.raises(KernelError, match="16 places of a line"):
        kernel(tile_h=8, tile_w=8)


def test_epilogue() -> None:
    assert_finished(kernel(), layer(n=1), "relu")


SABOTAGE = {
    "no wait for the patch": ("      ring.wait_full(at);\n", ""),
    "stage never released": ("      ring.release(at.stage, lane);\n", ""),
    "the filter of one shift": ("shift = step / pairs % shifts", "shift = 0"),
    "a shift to the left": ("first + right + (int)lane % 16", "first + (int)lane % 16"),
    "channels that are not there": ("phase >= STRIDE_H || k >= channels", "phase >= STRIDE_H"),
    "beyond the image": ("&& w < result.width;", ";"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found(name: str) -> None:
    problem = layer(h=30, w=37)
    operands = draw(problem)
    with pytest.raises((EmulationError, AssertionError)):
        out = compute(kernel(), problem, operands, edits=(SABOTAGE[name],))
        assert_right(problem, operands, out)
