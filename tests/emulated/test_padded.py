"""Kernels for small groups that TMA pads with zeros, emulated against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv_cases import assert_finished, assert_right, compute, draw
from emulation import OPS, EmulationError

from tilewise.ops.conv.kernels.padded import PaddedConvKernel, merged_groups
from tilewise.ops.conv.problem import ConvProblem

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
PIXELS = ("fwd", "bwd_data")


def kernel(p: ConvProblem, **changes: Any) -> PaddedConvKernel:
    traits = {"dtype": p.dtype, "tile_h": 4, "tile_w": 16, "stages": 2, "blocks": 1, **changes}
    spreads = merged_groups(p) > 1
    return PaddedConvKernel(op_name=p.op, family="padded", spreads_nonfinite=spreads, **traits)


def layer(direction: str, c: int = 24, k: int = 24, g: int = 3, **changes: Any) -> ConvProblem:
    """Channels are those of a group."""
    sizes = {"n": 2, "h": 7, "w": 19, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    return ConvProblem(direction=direction, c=g * c, k=g * k, g=g, **{**sizes, **changes})


def check(p: ConvProblem, seed: int = 0, edits: Any = (), **changes: Any) -> None:
    operands = draw(p)
    assert_right(p, operands, compute(kernel(p, **changes), p, operands, seed=seed, edits=edits))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_any_order_of_events(direction: str, seed: int) -> None:
    check(layer(direction), seed)


GROUPS = ((24, 24, 4), (12, 12, 6), (16, 24, 3), (8, 32, 2), (6, 6, 8), (3, 3, 16), (12, 4, 10))
FEW = ((1, 2, 32), (1, 2, 24), (2, 4, 8), (2, 1, 40))
WIDE = ((40, 40, 2), (48, 48, 3), (56, 56, 2), (20, 20, 4), (28, 24, 2), (24, 56, 2))


@pytest.mark.parametrize("groups", (*GROUPS, *FEW), ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_groups(direction: str, groups: tuple[int, int, int]) -> None:
    check(layer(direction, *groups, n=1))


@pytest.mark.parametrize("groups", WIDE, ids=str)
@pytest.mark.parametrize("direction", PIXELS)
def test_groups_in_slots_of_64(direction: str, groups: tuple[int, int, int]) -> None:
    check(layer(direction, *groups, n=1))


GEOMETRIES = {
    "stride_2": {"stride_h": 2, "stride_w": 2},
    "stride_2_even_sizes": {"stride_h": 2, "stride_w": 2, "h": 8, "w": 20, "pad_w": 0},
    "1x1_stride_2": {"stride_h": 2, "stride_w": 2, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "stride_3": {"stride_h": 3, "stride_w": 3, "pad_h": 2},
    "dilated": {"dilation_h": 2, "dilation_w": 3, "pad_h": 2, "pad_w": 3},
    "1x3": {"y": 1, "pad_h": 0},
    "valid": {"pad_h": 0, "pad_w": 0},
    "1d": {"h": 1, "y": 1, "pad_h": 0, "w": 37},
    "1x1": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_geometries(direction: str, name: str) -> None:
    check(layer(direction, **{"n": 1, **GEOMETRIES[name]}))


@pytest.mark.parametrize(
    "tile",
    [
        {"tile_h": 1, "tile_w": 32},
        {"tile_h": 7, "tile_w": 8},
        {"tile_h": 8, "tile_w": 32, "stages": 1},
        {"tile_h": 14, "tile_w": 16, "stages": 1},
    ],
)
def test_tiles(tile: dict[str, int]) -> None:
    check(layer("fwd", n=3), **tile)
    if tile["tile_w"] % 16 == 0:
        check(layer("bwd_weight", n=3), **tile)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fp16(direction: str) -> None:
    check(layer(direction, 12, 12, 4, n=1, dtype="fp16"))


def test_atomic_sums_in_fp32() -> None:
    check(layer("bwd_weight", out_dtype="fp32"), atomic=True)


@pytest.mark.parametrize("direction", PIXELS)
def test_epilogue(direction: str) -> None:
    p = layer(direction, n=1)
    assert_finished(kernel(p), p, "relu")


@pytest.mark.parametrize("groups", [(24, 24, 3), (40, 40, 2), (12, 12, 4), (20, 20, 4)], ids=str)
@pytest.mark.parametrize("direction", PIXELS)
def test_what_is_not_finite_stays_in_its_unit(direction: str, groups: tuple[int, int, int]) -> None:
    p = layer(direction, *groups, n=1)
    image, filters = draw(p)
    expected = compute(kernel(p), p, [image, filters])
    own, merged = image.shape[1] // p.g, merged_groups(p)
    image[:, (p.g - 1) * own :] = np.inf
    got = compute(kernel(p), p, [image, filters])
    others = expected.shape[1] * (p.g - merged) // p.g
    np.testing.assert_array_equal(got[:, :others], expected[:, :others])
    assert not np.isfinite(got[:, others:]).any()


SABOTAGE = {
    ("fwd", "too few bytes"): ("expect(at, patch_bytes);", "expect(at, patch_bytes - 128);"),
    ("fwd", "the first units for all"): (
        "0, w, (int)blockIdx.x * units, h, spot.n);\n    else\n",
        "0, w, 0, h, spot.n);\n    else\n",
    ),
    ("fwd", "no zeros in the filter"): ("to < all_written && is_in_filter(row, column)", "true"),
    ("bwd_weight", "all sums stored"): ("if (!is_in_filter(row, column)) return;", ""),
}


@pytest.mark.parametrize("which", SABOTAGE, ids=str)
def test_sabotage_is_found(which: tuple[str, str]) -> None:
    direction, old = which[0], SABOTAGE[which][0]
    name = "grouped_weight" if direction == "bwd_weight" else "grouped"
    assert (OPS / f"conv/cuda/{name}.cuh").read_text().count(old) == 1
    p = layer(direction, 12, 12, 8, n=1)
    with pytest.raises((EmulationError, AssertionError)):
        check(p, edits=(SABOTAGE[which],))
