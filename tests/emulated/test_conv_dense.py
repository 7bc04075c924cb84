"""Dense CUDA convolutions of every family and direction, run without a GPU against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conv_calls import check
from emulation import EmulationError

from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.reshape import reshaped

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
DEFAULTS = {"n": 2, "c": 72, "k": 80, "h": 7, "w": 9, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one image": {"n": 1, "c": 64, "k": 64, "h": 8, "w": 8},
    "unpadded": {"pad_h": 0, "pad_w": 0},
    "dilated": {"h": 11, "dilation_h": 2, "dilation_w": 3, "pad_h": 2, "pad_w": 3},
    "strided": {"stride_h": 2, "stride_w": 2},
    "uneven": {"w": 12, "y": 3, "x": 5, "stride_h": 2, "stride_w": 3, "dilation_h": 2, "pad_w": 2},
    "strided 1x1": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, "stride_h": 2, "stride_w": 2},
    "1x1": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "groups": {"c": 128, "k": 128, "g": 2},
    "line": {"h": 1, "w": 40, "y": 1, "pad_h": 0, "x": 3, "dilation_w": 2, "pad_w": 4},
    "volume": {"d": 5, "z": 3, "pad_d": 1, "stride_d": 2, "h": 5, "w": 6},
    "fp16": {"dtype": "fp16"},
    "wide result": {"out_dtype": "fp32"},
    "few channels": {"c": 24, "k": 40, "stride_h": 3},
    "fewer channels": {"c": 12, "k": 20},
    "odd channels": {"c": 3, "k": 5, "stride_w": 2},
    "small groups": {"c": 72, "k": 40, "g": 2},
}
TMA_LAYERS = tuple(LAYERS)[:13]
PATCHES = ("plain", "one image", "unpadded", "dilated", "groups", "volume", "fp16")


def problem(layer: str, direction: str) -> ConvProblem:
    values = {"dtype": "bf16", "layout": "nhwc", **DEFAULTS, **LAYERS[layer]}
    return ConvProblem(direction=direction, **values)


def kernel(direction: str, **traits: Any) -> DenseConvKernel:
    gathers = {"load_warps": 4} if traits.get("family") == "gather" else {}
    defaults = {"dtype": "bf16", "tile_m": 64, "tile_n": 64, "stages": 3, "math_groups": 1}
    return DenseConvKernel(op_name=f"conv_{direction}", **{**defaults, **gathers, **traits})


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", TMA_LAYERS)
def test_im2col(layer: str, direction: str) -> None:
    p = problem(layer, direction)
    check(kernel(direction, family="im2col", dtype=p.dtype), p)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gather(layer: str, direction: str) -> None:
    p = problem(layer, direction)
    check(kernel(direction, family="gather", dtype=p.dtype), p)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("layer", [*PATCHES, "line", "1x1"])
def test_halo(layer: str, direction: str) -> None:
    p = problem(layer, direction)
    check(kernel(direction, family="halo", dtype=p.dtype), p)


@pytest.mark.parametrize("layer", ["strided", "uneven", "strided 1x1"])
def test_halo_by_parities(layer: str) -> None:
    check(kernel("bwd_data", family="halo"), problem(layer, "bwd_data"))


@pytest.mark.parametrize("pixels", [64, 128, 256])
@pytest.mark.parametrize("layer", PATCHES)
def test_halo_gradient(layer: str, pixels: int) -> None:
    p = problem(layer, "bwd_weight")
    traits = {"dtype": p.dtype, "tile_k": pixels, "math_groups": 3, "stages": 2, "fill": 1}
    check(kernel("bwd_weight", family="halo", **traits), p)


def test_halo_gradient_of_a_line() -> None:
    check(kernel("bwd_weight", family="halo", math_groups=1), problem("line", "bwd_weight"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows(direction: str) -> None:
    check(kernel(direction, family="rows"), problem("1x1", direction))


FEW: dict[str, dict[str, Any]] = {
    "32": {"c": 32, "k": 32},
    "24 and 8": {"c": 24, "k": 8},
    "16 and 40": {"c": 16, "k": 40},
    "8 and 32": {"c": 8, "k": 32},
}
FEW_LAYERS = ("plain", "dilated", "strided", "uneven", "line", "volume", "fp16", "wide result")


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("layer", FEW_LAYERS)
def test_several_taps_in_a_step(layer: str, few: str, direction: str) -> None:
    sizes = FEW[few] if direction == "fwd" else dict(zip("kc", FEW[few].values(), strict=True))
    p = replace(problem(layer, direction), **sizes)
    check(kernel(direction, family="taps", dtype=p.dtype), p)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize(
    "way",
    [
        {"tile_m": 128, "tile_n": 96, "math_groups": 2, "load_warps": 2},
        {"tile_m": 256, "tile_n": 128, "math_groups": 2, "persistent": True},
        {"fill": 1},
        {"fill": 2, "atomic": True},
        {"pingpong": True, "math_groups": 2, "persistent": True, "tile_n": 32},
    ],
)
def test_ways_to_divide_several_taps(way: dict[str, Any], direction: str) -> None:
    read, written = ("c", "k") if direction == "fwd" else ("k", "c")
    for count in (16, 32):
        p = replace(problem("plain", direction), n=3, y=5, pad_h=2, **{read: count, written: 136})
        check(kernel(direction, family="taps", **way), p)
        check(kernel(direction, family="taps", **way), p, seed=1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left > step_taps ? step_taps : left", "left > step_taps ? step_taps : 1"),
        ("row_bytes == 64 ? 1 : 2", "row_bytes == 64 ? 2 : 1"),
        ("walk, skipped * step_taps", "walk, skipped"),
        ("BACKWARD ? row_k * 128 : TILE_N * row_bytes", "TILE_N * 128"),
    ],
)
def test_taps_out_of_place_are_found(old: str, new: str) -> None:
    p = replace(problem("plain", "fwd"), c=16, n=1)
    with pytest.raises((EmulationError, AssertionError)):
        check(kernel("fwd", family="taps", fill=2), p, edits=((old, new),))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", ["im2col", "gather", "halo"])
def test_patches_in_simpler_shapes(family: str, direction: str) -> None:
    """One line of results an image, or parities of one tap; over what the filter would cross."""
    square = {"h": 6, "w": 30, "y": 3, "x": 3, "stride_h": 3, "stride_w": 3}
    p = reshaped(ConvProblem(direction=direction, n=3, c=8, k=80, dtype="bf16", **square))
    assert (p.c, p.w, p.x) == (24, 10, 1)
    lines = {"math_groups": 3} if (family, direction) == ("halo", "bwd_weight") else {}
    check(kernel(direction, family=family, **lines), p)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_whole_images_as_rows(direction: str) -> None:
    p = ConvProblem(direction=direction, n=70, c=8, k=72, h=3, w=3, y=3, x=3, dtype="bf16")
    check(kernel(direction, family="rows"), reshaped(p))


WAYS: dict[str, dict[str, Any]] = {
    "cooperative": {"tile_m": 128, "math_groups": 2},
    "two blocks of rows": {"tile_m": 256, "tile_n": 128, "math_groups": 2},
    "three groups": {"tile_m": 192, "math_groups": 3},
    "two load warps": {"load_warps": 2},
    "walking": {"persistent": True},
    "cut": {"fill": 1},
    "cut, atomics": {"fill": 1, "atomic": True},
}
TURNS = {"pingpong": True, "math_groups": 2, "persistent": True}
PAIR = {"tile_m": 128, "math_groups": 2, "cluster": 2}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_divide_the_work(way: str, direction: str) -> None:
    shared = {"fill": 1} if (way, direction) == ("walking", "bwd_weight") else {}
    check(kernel(direction, family="im2col", **WAYS[way], **shared), problem("plain", direction))


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize(
    "way", [PAIR, {**PAIR, "share": "pixels"}, TURNS, {**TURNS, "load_warps": 2, "cluster": 2}]
)
def test_clusters_and_turns(way: dict[str, Any], direction: str) -> None:
    p = replace(problem("plain", direction), n=3, c=136, k=136)
    check(kernel(direction, family="im2col", **way), p)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("way", [PAIR, {**PAIR, "load_warps": 2}, {"fill": 1}])
def test_halo_in_clusters_and_slices(way: dict[str, Any], direction: str) -> None:
    p = replace(problem("plain", direction), n=3, c=136, k=136, h=17)
    check(kernel(direction, family="halo", **way), p)


def test_gathering_with_more_load_warps() -> None:
    for direction in DIRECTIONS:
        way = {"load_warps": 8, "tile_m": 128, "tile_n": 128, "math_groups": 2}
        check(kernel(direction, family="gather", **way), problem("few channels", direction))


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("way", [TURNS, {**TURNS, "load_warps": 8}, {"persistent": True}])
def test_gathering_blocks_walk_and_take_turns(way: dict[str, Any], direction: str) -> None:
    p = replace(problem("strided", direction), n=3)
    check(kernel(direction, family="gather", **way), p)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", ["gather", "rows", "halo"])
def test_three_groups_of_math_warps(family: str, direction: str) -> None:
    traits: dict[str, Any] = {"math_groups": 3, "load_warps": 8 if family == "gather" else 2}
    if (family, direction) != ("halo", "bwd_weight"):  # its groups take a line of the filter each
        traits["tile_m"] = 192
    p = problem("1x1" if family == "rows" else "plain", direction)
    check(kernel(direction, family=family, **traits), p)


@pytest.mark.parametrize("family", ["im2col", "gather", "halo"])
def test_tf32(family: str) -> None:
    p = replace(problem("plain", "fwd"), dtype="tf32", out_dtype="fp32", c=36)
    check(kernel("fwd", family=family, dtype="tf32", tile_k=32), p)


@pytest.mark.parametrize("family", ["im2col", "gather", "halo"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_epilogue(family: str, activation: str) -> None:
    epilogue = Epilogue(bias=True, residual=True, activation=activation)
    check(kernel("fwd", family=family), problem("plain", "fwd"), epilogue)


@pytest.mark.parametrize("family", ["im2col", "halo"])
def test_epilogue_of_slices(family: str) -> None:
    epilogue = Epilogue(bias=True, residual=True, activation="relu")
    p = replace(problem("plain", "fwd"), c=136)
    check(kernel("fwd", family=family, fill=1), p, epilogue)


SUMMED: dict[str, dict[str, Any]] = {
    "one group": {"family": "im2col"},
    "a pair": {"family": "im2col", **PAIR},
    "in turns": {"family": "im2col", **TURNS},
    "gathered": {"family": "gather", "tile_m": 128},
    "several taps": {"family": "taps", "tile_m": 128, "math_groups": 2},
    "patches": {"family": "halo", "tile_m": 128, "math_groups": 2, "cluster": 2},
}


@pytest.mark.parametrize("way", SUMMED)
def test_sums_over_pixels(way: str) -> None:
    p = replace(problem("plain", "fwd"), n=3, k=136, c=24 if way == "several taps" else 72)
    check(kernel("fwd", **SUMMED[way]), p, Epilogue(sums=True, bias=True, activation="relu"))


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("family", ["im2col", "gather"])
@pytest.mark.parametrize("sizes", [{}, {"n": 1, "k": 64}, {"c": 136, "k": 136, "n": 5}])
def test_blocks_share_the_steps_of_a_gradient(
    sizes: dict[str, int], family: str, atomic: bool
) -> None:
    """Tiles have as many parts as blocks reach them; slices that nobody reaches are cleared."""
    p = replace(problem("plain", "bwd_weight"), **sizes)
    for units in (2, 5, 7):
        made = kernel("bwd_weight", family=family, fill=1, persistent=True, atomic=atomic)
        check(made, p, units=units)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("family", ["im2col", "halo"])
def test_tiles_that_are_no_multiple_of_64_wide(family: str, direction: str) -> None:
    p = replace(problem("plain", direction), c=200, k=200)
    narrow = replace(p, c=96, k=96)  # one tile, whose last box reaches beyond the tensor
    for made in (p, replace(p, out_dtype="fp32"), narrow):
        check(kernel(direction, family=family, tile_n=96), made)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_order_of_events(direction: str, seed: int) -> None:
    way = {} if direction == "bwd_weight" else PAIR
    p = replace(problem("plain", direction), n=3)
    check(kernel(direction, family="im2col", **way), p, seed=seed)
    check(kernel(direction, family="gather"), p, seed=seed)
    lines = {"math_groups": 3} if direction == "bwd_weight" else PAIR
    check(kernel(direction, family="halo", **lines), p, seed=seed)


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("im2col", "step > 0 || k > 0", "k > 0"),
        ("im2col", "    ring.wait_full(at);\n", ""),
        ("im2col", "    late.step(ring, at, thread);\n", ""),
        ("gather", "ring.init(loads_of_a_stage, tile_groups)", "ring.init(1, tile_groups)"),
        ("halo", "        filters.wait_full(at);\n", ""),
        ("halo", "channel, first.w, first.h, first.n)", "channel, first.h, first.w, first.n)"),
    ],
)
def test_sabotage_is_found(family: str, old: str, new: str) -> None:
    with pytest.raises((EmulationError, AssertionError)):
        check(kernel("fwd", family=family), problem("plain", "fwd"), edits=((old, new),))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("      turns.wait();\n", ""),
        ("      at.skip(work.last - work.first);\n", ""),
        ("  turns.pass(has_next);", "  turns.pass(false);"),
    ],
)
def test_groups_out_of_turn_are_found(old: str, new: str) -> None:
    p = replace(problem("plain", "fwd"), n=3, c=136, k=136)
    with pytest.raises((EmulationError, AssertionError)):
        check(kernel("fwd", family="im2col", **TURNS), p, edits=((old, new),))
