"""Kernels for a network's first layer in CUDA C++, emulated."""

from __future__ import annotations

from typing import Any

import pytest
from conv_cases import assert_finished, assert_right, compute, draw
from emulation import EmulationError

from tilewise.ops.conv.kernels.stem import StemConvKernel
from tilewise.ops.conv.problem import ConvProblem

DIRECTIONS = ("fwd", "bwd_weight")


def kernel(direction: str, **changes: Any) -> StemConvKernel:
    traits = {"dtype": "bf16", "tile_h": 2, "tile_w": 16, "stages": 2, "blocks": 1, **changes}
    return StemConvKernel(op_name=f"conv_{direction}", family="stem", **traits)


def layer(direction: str, **changes: Any) -> ConvProblem:
    sizes = {"n": 2, "c": 3, "k": 40, "h": 9, "w": 40, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    sizes |= {"stride_h": 2, "stride_w": 2, "dtype": "bf16"} | changes
    return ConvProblem(direction=direction, **sizes)


def check(problem: ConvProblem, seed: int = 0, **changes: Any) -> None:
    made = kernel(problem.direction, dtype=problem.dtype, **changes)
    operands = draw(problem)
    assert_right(problem, operands, compute(made, problem, operands, seed=seed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_any_order_of_events(direction: str, seed: int) -> None:
    check(layer(direction), seed)


GEOMETRIES = {
    "7x7": {"y": 7, "x": 7, "pad_h": 3, "pad_w": 3, "h": 13},
    "4x4_stride_4": {"y": 4, "x": 4, "stride_h": 4, "stride_w": 4, "pad_h": 0, "pad_w": 0, "k": 96},
    "3x3_stride_1": {"stride_h": 1, "stride_w": 1, "w": 24},
    "four_channels": {"c": 4, "w": 18},
    "no_pad": {"pad_h": 0, "pad_w": 0, "n": 1},
    "1d": {"h": 1, "y": 1, "pad_h": 0, "stride_h": 1, "x": 5, "pad_w": 2},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_geometries(direction: str, name: str) -> None:
    check(layer(direction, **GEOMETRIES[name]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fp16_and_other_tiles(direction: str) -> None:
    check(layer(direction, dtype="fp16", k=72), tile_h=4, tile_w=32, stages=1)


def test_atomic_sums_in_fp32() -> None:
    check(layer("bwd_weight", out_dtype="fp32"), atomic=True)


def test_epilogue() -> None:
    assert_finished(kernel("fwd"), layer("fwd", n=1), "relu")


SABOTAGE = {
    "no wait for the patch": ("    ring.wait_full(at);\n", ""),
    "stage never released": ("    ring.release(at.stage, lane);\n", ""),
    "no fence before the store": ("    fence_async();\n", ""),
    "a run too long": ("y < FILTER_H && at < run)", "y < FILTER_H)"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found(name: str) -> None:
    problem = layer("fwd")
    operands = draw(problem)
    with pytest.raises((EmulationError, AssertionError)):
        out = compute(kernel("fwd"), problem, operands, edits=(SABOTAGE[name],))
        assert_right(problem, operands, out)
