"""Dense kernels for groups that end within a step, run without a GPU against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv_calls import ARCH, check
from conv_cases import compute, draw
from emulation import OPS, EmulationError

from tilewise.ops.contract import get_op
from tilewise.ops.conv import launch_dense
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.kernels.ragged import RaggedConvKernel, spreads
from tilewise.ops.conv.launch_pieces import by_group
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.launch import TensorMap

DIRECTIONS = ("fwd", "bwd_data")
DEFAULTS = {"n": 2, "c": 72, "k": 72, "g": 3, "h": 7, "w": 9, "y": 3, "x": 3, "pad_h": 1}
LAYERS: dict[str, dict[str, Any]] = {
    "24": {},
    "whole quarters": {"c": 96, "k": 96, "g": 2},
    "40 to 56": {"c": 80, "k": 112, "g": 2},
    "a step and a rest": {"c": 176, "k": 144, "g": 2},
    "three steps": {"c": 336, "k": 336, "g": 2, "h": 5, "n": 1},
    "one to many": {"c": 48, "k": 160, "g": 2},
    "16 beside 64": {"c": 32, "k": 48, "g": 2},
    "unpadded": {"pad_h": 0, "pad_w": 0},
    "dilated": {"h": 11, "dilation_h": 2, "dilation_w": 3, "pad_h": 2, "pad_w": 3},
    "line": {"h": 1, "w": 40, "y": 1, "pad_h": 0, "dilation_w": 2, "pad_w": 4},
    "volume": {"d": 4, "z": 3, "pad_d": 1, "h": 5, "w": 6},
    "1x1": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "fp16": {"dtype": "fp16"},
    "wide result": {"out_dtype": "fp32"},
    "strided": {"stride_h": 2, "stride_w": 2},
    "uneven": {"w": 12, "x": 5, "stride_h": 2, "stride_w": 3, "dilation_h": 2, "pad_w": 2},
}
STRIDED = ("strided", "uneven")


def problem(layer: str, direction: str) -> ConvProblem:
    values = {"dtype": "bf16", "layout": "nhwc", "pad_w": 1, **DEFAULTS, **LAYERS[layer]}
    return ConvProblem(direction=direction, **values)


def kernel(p: ConvProblem, loader: str, **traits: Any) -> RaggedConvKernel:
    """The one that may serve: what a group meets follows from the problem."""
    defaults = {"tile_m": 64, "tile_n": 64, "stages": 3, "math_groups": 1, "family": "ragged"}
    given = {**defaults, **traits, "dtype": p.dtype, "loader": loader}
    made = RaggedConvKernel(op_name=p.op, **given)
    return replace(made, spreads_nonfinite=spreads(made, p))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_im2col(layer: str, direction: str) -> None:
    p = problem(layer, direction)
    check(kernel(p, "im2col"), p)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_halo(layer: str, direction: str) -> None:
    p = problem(layer, direction)
    if layer in STRIDED and direction == "fwd":
        reason = get_op(p.op).why_unusable(kernel(p, "halo"), p, ARCH)
        assert reason is not None and "stride 1" in reason
    else:
        check(kernel(p, "halo"), p)


WAYS: dict[str, dict[str, Any]] = {
    "narrow": {"tile_n": 32},
    "96 wide": {"tile_n": 96},
    "two blocks of rows": {"tile_m": 256, "tile_n": 128, "math_groups": 2},
    "three groups, two load warps": {"tile_m": 192, "math_groups": 3, "load_warps": 2},
    "walking": {"persistent": True},
    "a pair": {"tile_m": 128, "math_groups": 2, "cluster": 2},
    "cut": {"fill": 1},
}
TURNS = {"pingpong": True, "math_groups": 2, "persistent": True}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("loader", ["im2col", "halo"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_divide_the_work(way: str, loader: str, direction: str) -> None:
    p = replace(problem("a step and a rest", direction), n=3)
    check(kernel(p, loader, **WAYS[way]), p)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("way", [TURNS, {**WAYS["a pair"], "share": "pixels"}])
def test_turns_and_shared_pixels(way: dict[str, Any], direction: str) -> None:
    p = replace(problem("a step and a rest", direction), n=3)
    check(kernel(p, "im2col", **way), p)


@pytest.mark.parametrize("loader", ["im2col", "halo"])
def test_tf32(loader: str) -> None:
    p = replace(problem("24", "fwd"), dtype="tf32", out_dtype="fp32", c=60)
    check(kernel(p, loader, tile_k=32), p)


@pytest.mark.parametrize("loader", ["im2col", "halo"])
def test_epilogue_and_sums(loader: str) -> None:
    p = problem("40 to 56", "fwd")
    check(kernel(p, loader), p, Epilogue(bias=True, residual=True, activation="relu"))
    check(kernel(p, loader), p, Epilogue(sums=True, bias=True, activation="relu"))


@pytest.mark.parametrize("layer", ["24", "40 to 56", "a step and a rest", "strided"])
def test_gradients_of_their_filters_need_no_kernel_of_their_own(layer: str) -> None:
    """What is read of the next group lies in rows and columns that are not stored."""
    p = problem(layer, "bwd_weight")
    made = DenseConvKernel(
        op_name=p.op, family="im2col", dtype=p.dtype, tile_m=64, tile_n=64, stages=3, math_groups=1
    )
    check(made, p)
    check(replace(made, tile_n=128, fill=1), p)
    if layer not in STRIDED:
        check(replace(made, family="halo", math_groups=3), p)
    pointwise = replace(p, y=1, x=1, pad_h=0, pad_w=0, stride_h=1, stride_w=1)
    check(replace(made, family="rows"), pointwise)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("loader", ["im2col", "halo"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_order_of_events(direction: str, loader: str, seed: int) -> None:
    p = replace(problem("24", direction), n=3)
    check(kernel(p, loader, **WAYS["a pair"]), p, seed=seed)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("layer", "loader"),
    [("24", "halo"), ("a step and a rest", "halo"), ("24", "im2col"), ("volume", "halo"),
     ("whole quarters", "im2col"), ("whole quarters", "halo")],
)  # fmt: skip
def test_what_is_not_finite_stays_where_the_kernel_says(
    layer: str, loader: str, direction: str
) -> None:
    """Of images and of filters: the others' results are as they were without."""
    p = replace(problem(layer, direction), n=1)
    chosen, operands = kernel(p, loader), draw(p)
    expected = compute(chosen, p, operands)
    image, filters = (operand.copy() for operand in operands)
    last = p.g - 1
    own_read, own_filters, own_written = image.shape[1] // p.g, p.k // p.g, expected.shape[1] // p.g
    image[:, last * own_read :] = np.inf
    filters[last * own_filters :] = np.inf
    got = compute(chosen, p, [image, operands[1]])
    others = slice(0, last * own_written)
    assert np.isfinite(got[:, others]).all() == (not chosen.spreads_nonfinite)
    assert not np.isfinite(got[:, last * own_written :]).any()
    got = compute(chosen, p, [operands[0], filters])
    np.testing.assert_array_equal(got[:, others], expected[:, others])


@pytest.mark.parametrize(
    ("direction", "old", "new"),
    [
        ("bwd_data", "filters.full(at), work.group,", "filters.full(at), 0,"),
        ("fwd", "within, group, corner.w", "within, 0, corner.w"),
        ("fwd", "multiply_step<LAST_PARTS>(sums, late", "multiply_step<1>(sums, late"),
    ],
)
def test_sabotage_is_found(direction: str, old: str, new: str) -> None:
    p = problem("24", direction)
    assert (OPS / "conv/cuda/halo.cuh").read_text().count(old) == 1
    with pytest.raises((EmulationError, AssertionError)):
        check(kernel(p, "halo"), p, edits=((old, new),))


def test_a_map_that_does_not_know_the_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward the filter is read across: beyond a group's filters lie the next group's."""
    p = problem("24", "bwd_data")
    chosen = kernel(p, "im2col")
    sizes: list[tuple[int, ...]] = []

    def forgetful(made: TensorMap, at: int, groups: int) -> TensorMap:
        cut = by_group(made, at, groups)
        sizes.append(cut.sizes)
        return replace(cut, sizes=(*cut.sizes[:2], made.sizes[2], 1))

    monkeypatch.setattr(launch_dense, "by_group", forgetful)
    with pytest.raises((EmulationError, AssertionError)):
        check(chosen, p)
    assert sizes == [(24, 9, 24, 3)]
