"""Grouped convolution kernels in CUDA C++, emulated."""

from __future__ import annotations

from typing import Any

import pytest
from conv_cases import assert_finished, assert_right, compute, draw
from emulation import EmulationError

from tilewise.ops.conv.kernels.grouped import GroupedConvKernel
from tilewise.ops.conv.problem import ConvProblem

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def kernel(direction: str, **changes: Any) -> GroupedConvKernel:
    traits = {"dtype": "bf16", "tile_h": 4, "tile_w": 16, "stages": 2, "blocks": 1, **changes}
    return GroupedConvKernel(op_name=f"conv_{direction}", family="grouped", **traits)


def layer(direction: str, channels: int = 72, group: int = 4, **changes: Any) -> ConvProblem:
    sizes = {"n": 2, "h": 7, "w": 19, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    groups = channels // group
    sizes |= {"c": channels, "k": channels, "g": groups, **changes}
    return ConvProblem(direction=direction, **sizes)


def check(problem: ConvProblem, seed: int = 0, **changes: Any) -> None:
    spreads = changes.pop("spreads_nonfinite", problem.k // problem.g < 16)
    made = kernel(problem.direction, dtype=problem.dtype, spreads_nonfinite=spreads, **changes)
    operands = draw(problem)
    assert_right(problem, operands, compute(made, problem, operands, seed=seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_any_order_of_events(direction: str, seed: int) -> None:
    check(layer(direction), seed)


@pytest.mark.parametrize("group", [8, 16, 32])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_groups(direction: str, group: int) -> None:
    check(layer(direction, channels=96, group=group, n=1))


STRIDED = {
    "stride_2": {"stride_h": 2, "stride_w": 2},
    "stride_2_even_sizes": {"stride_h": 2, "stride_w": 2, "h": 8, "w": 20, "pad_w": 0},
    "stride_2_across": {"stride_w": 2, "pad_h": 0},
    "5x5_stride_2": {"stride_h": 2, "stride_w": 2, "y": 5, "x": 5, "pad_h": 2, "pad_w": 2},
    "1x1_stride_2": {"stride_h": 2, "stride_w": 2, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "stride_3": {"stride_h": 3, "stride_w": 3, "pad_h": 2},
    "dilated": {"dilation_h": 2, "dilation_w": 3, "pad_h": 2, "pad_w": 3},
    "1x3": {"y": 1, "pad_h": 0},
    "valid": {"pad_h": 0, "pad_w": 0},
    "wide_pad": {"pad_h": 3, "pad_w": 4},
    "1d": {"h": 1, "y": 1, "pad_h": 0, "w": 37},
    "3d": {"d": 3, "z": 3, "pad_d": 1, "h": 4, "n": 1},
}


@pytest.mark.parametrize(
    ("direction", "name"),
    # All 25 sums of a 5x5 filter's gradient are more than a thread's registers.
    [
        (d, name)
        for d in DIRECTIONS
        for name in STRIDED
        if (d, name) != ("bwd_weight", "5x5_stride_2")
    ],
)
def test_geometries(direction: str, name: str) -> None:
    problem = layer(direction, **{"channels": 64, "group": 8, "n": 1, **STRIDED[name]})
    check(problem)


@pytest.mark.parametrize(
    ("direction", "c", "k"), [("fwd", 32, 64), ("bwd_weight", 32, 64), ("bwd_data", 128, 64)]
)
def test_more_channels_written_than_read(direction: str, c: int, k: int) -> None:
    sizes = {"n": 1, "h": 5, "w": 9, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    check(ConvProblem(direction=direction, c=c, k=k, g=2, **sizes))


@pytest.mark.parametrize(
    "tile",
    [
        {"tile_h": 1, "tile_w": 64},
        {"tile_h": 7, "tile_w": 8},
        {"tile_h": 8, "tile_w": 32, "stages": 3},
        {"tile_h": 14, "tile_w": 16, "stages": 1},
    ],
)
def test_tiles(tile: dict[str, int]) -> None:
    check(layer("fwd", channels=64, group=16, n=3), **tile)
    if tile["tile_w"] % 16 == 0 and tile["tile_h"] < 14:
        check(layer("bwd_weight", channels=64, group=16, n=3), **tile)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fp16(direction: str) -> None:
    check(layer(direction, channels=64, n=1, dtype="fp16"))


def test_atomic_sums_in_fp32() -> None:
    check(layer("bwd_weight", channels=64, out_dtype="fp32"), atomic=True)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
def test_epilogue(direction: str) -> None:
    assert_finished(kernel(direction), layer(direction, channels=72, n=1), "relu")


SABOTAGE = {
    "no wait for the patch": ("    ring.wait_full(at);\n", ""),
    "stage released early": ("    __syncwarp();\n    ring.release(at.stage, lane);\n", ""),
    "no fence before the store": ("    fence_async();\n", ""),
    "no wait for the store": ("tma_store_wait<1>();", "(void)0;"),
    "shifted by a pixel": ("Columns::offset(shift),\n", "Columns::offset(shift) + 1,\n"),
    "wrong swizzle": ("swizzled<read_bytes>(", "swizzled<64>("),
    "too few bytes": ("ring.expect(at, patch_bytes);", "ring.expect(at, patch_bytes - 128);"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found(name: str) -> None:
    problem = layer("fwd", channels=64, n=3)
    operands = draw(problem)
    assert_right(problem, operands, compute(kernel("fwd"), problem, operands))
    with pytest.raises((EmulationError, AssertionError)):
        out = compute(kernel("fwd"), problem, operands, edits=(SABOTAGE[name],))
        assert_right(problem, operands, out)
