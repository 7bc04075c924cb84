"""CUDA kernels that pad small groups: pool, legality, maps, and what NVRTC makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import cuda_pools
import pytest
from cuda_pools import ARCH

from tilewise.engines.gpu.build import build_one
from tilewise.engines.gpu.nvrtc import why_no_nvrtc
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.padded import PaddedConvKernel
from tilewise.ops.conv.launch import launch, why_unfused
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.launch import Step, TensorMap

pool = partial(cuda_pools.pool, kind=PaddedConvKernel)
legal = partial(cuda_pools.legal, kind=PaddedConvKernel)
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def layer(direction: str = "fwd", c: int = 24, k: int = 24, **changes: Any) -> ConvProblem:
    """Channels are those of a group."""
    g = changes.pop("g", 8)
    values: dict[str, Any] = {"n": 32, "h": 28, "w": 28, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    values |= {"dtype": "bf16", **changes}
    return ConvProblem(direction=direction, c=g * c, k=g * k, g=g, **values)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("c", "k", "shares"),
    [
        *((24, 24, False), (12, 12, True), (6, 6, True), (16, 24, False)),
        *((8, 24, False), (3, 3, True), (1, 2, True)),
    ],
)
def test_small_groups_are_served(c: int, k: int, shares: bool, direction: str) -> None:
    """Units that need no products of their groups' neighbours let nothing spread."""
    kernels = legal(layer(direction, c, k))
    assert len(kernels) >= 4
    assert {x.spreads_nonfinite for x in kernels} == {shares}


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("c", [20, 28, 40, 48, 56])
def test_units_of_33_to_64_channels_are_served_over_pixels(c: int, direction: str) -> None:
    assert len(legal(layer(direction, c, c))) >= 4
    assert not legal(layer("bwd_weight", c, c)), "their sums are more than a thread's registers"


@pytest.mark.parametrize(
    ("p", "why"),
    [
        (layer(g=1), "cannot lie side by side"),
        (layer(c=32, k=32), "cannot lie side by side"),
        (layer(c=12, k=12, g=9), "9 groups are no whole units of 2"),
        (layer(c=24, k=44), "88 channels; it is for 16 to 64"),
        (layer(c=72, k=72), "72 channels"),
        (layer(c=2, k=2), "8 channels"),
        (layer(d=4, z=3, pad_d=1), "images"),
        (layer(layout="nchw"), "layout"),
    ],
)
def test_what_cannot_be_served_is_named(p: ConvProblem, why: str) -> None:
    made = legal(layer())[0]
    reason = get_op("conv_fwd").why_unusable(made, p, ARCH)
    assert reason is not None and why in reason


def test_what_groups_share_is_in_the_name() -> None:
    made, rule = legal(layer())[0], get_op("conv_fwd").why_unusable
    shared = replace(made, spreads_nonfinite=True)
    assert "need no products" in str(rule(shared, layer(), ARCH))
    assert "share products" in str(rule(made, layer(c=12, k=12), ARCH))
    assert shared.name == f"{made.name}_spreads"


def test_maps_have_the_channels_of_a_unit_and_the_units() -> None:
    p = layer(g=3)
    (step,) = launch(legal(p)[0], p, ARCH).steps
    assert isinstance(step, Step)
    assert step.grid[0] == 2
    image = next(given for given in step.arguments if isinstance(given, TensorMap))
    assert image.sizes == (24, 28, 3, 28, 32)
    assert image.strides == (144, 48, 144 * 28, 144 * 28 * 28)
    assert (image.box[0], image.box[2], image.swizzle) == (32, 2, 64)


def test_sums_over_pixels_are_left_to_others() -> None:
    assert why_unfused(legal(layer())[0], layer(), Epilogue(sums=True)) is not None


@pytest.mark.slow
@pytest.mark.skipif(why_no_nvrtc() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kernels_compile_without_spills(direction: str) -> None:
    for k in [k for k in pool(direction) if k.dtype == "bf16"][::3]:
        build = build_one(k, ARCH)
        assert build.status == "ok", f"{k.name}: {build.message}"
        assert build.resources.spills == 0, k.name
