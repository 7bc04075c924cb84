"""Dense CUDA kernels for groups that end within a step: pool, legality, maps, what NVRTC makes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import cuda_pools
import pytest
from cuda_pools import ARCH

from tilewise.engines.gpu.build import build_one
from tilewise.engines.gpu.nvrtc import why_no_nvrtc
from tilewise.errors import KernelError
from tilewise.ops.contract import get_op
from tilewise.ops.conv.kernels.ragged import RaggedConvKernel
from tilewise.ops.conv.launch import launch
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.launch import Step, TensorMap

pool = partial(cuda_pools.pool, kind=RaggedConvKernel)
legal = partial(cuda_pools.legal, kind=RaggedConvKernel)
DIRECTIONS = ("fwd", "bwd_data")
REGNETS = (24, 40, 48, 56, 72, 112, 120, 168, 232, 264, 328)
"""Channels of their groups that are no multiple of 64."""


def layer(direction: str = "fwd", count: int = 56, **changes: Any) -> ConvProblem:
    values: dict[str, Any] = {"n": 32, "c": 4 * count, "k": 4 * count, "g": 4, "h": 28, "w": 28}
    values |= {"y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    return ConvProblem(direction=direction, **{**values, **changes})


def kernel(direction: str = "fwd", **traits: Any) -> RaggedConvKernel:
    values = {"family": "ragged", "loader": "halo", "dtype": "bf16"}
    values |= {"tile_m": 128, "tile_n": 64, "stages": 4}
    return RaggedConvKernel(op_name=f"conv_{direction}", **{**values, **traits})


@pytest.mark.parametrize("count", REGNETS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_groups_of_regnets_are_served_by_patches_and_by_im2col(direction: str, count: int) -> None:
    """Those over patches of images let nothing spread; im2col's do not between whole products."""
    kernels = legal(layer(direction, count))
    spreading = {k.loader for k in kernels if k.spreads_nonfinite}
    assert {k.loader for k in kernels} == {"halo", "im2col"}
    assert spreading == ({"im2col"} if count % 16 else set())
    assert {k.loader for k in legal(layer(direction, count, h=1, y=1, pad_h=0))} >= {"im2col"}


@pytest.mark.parametrize(
    ("traits", "changes", "why"),
    [
        ({}, {"c": 256, "k": 256}, "no multiple of 64"),
        ({}, {"g": 1, "c": 56, "k": 56}, "no multiple of 64"),
        ({}, {"c": 4 * 60, "k": 4 * 60}, "rows of multiples of 8"),
        ({}, {"c": 4 * 8, "k": 4 * 8}, "at least 16"),
        ({}, {"stride_w": 2}, "stride 1"),
        ({"loader": "im2col"}, {}, "meet those of the next"),
        ({"loader": "im2col", "spreads_nonfinite": True}, {"c": 192}, "do not meet"),
        ({"spreads_nonfinite": True}, {}, "do not meet"),
        ({}, {"d": 4, "z": 3, "pad_d": 1}, "meet those of the next"),
        ({}, {"layout": "nchw"}, "layout"),
        ({}, {"dtype": "fp16"}, "dtype"),
    ],
)
def test_what_cannot_be_served_is_named(
    traits: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    reason = get_op("conv_fwd").why_unusable(kernel(**traits), replace(layer(), **changes), ARCH)
    assert reason is not None and why in reason


def test_backward_both_counts_are_whole_chunks() -> None:
    """Of what is read, TMA's copies begin there; of what is written, rows of the filter do."""
    rule = get_op("conv_bwd_data").why_unusable
    made = kernel("bwd_data")
    assert rule(made, layer("bwd_data", c=4 * 24, k=4 * 40), ARCH) is None
    for c, k, why in ((24, 44, "rows of"), (44, 24, "filters of")):
        reason = rule(made, layer("bwd_data", c=4 * c, k=4 * k), ARCH)
        assert reason is not None and f"TMA copies {why} multiples of 8" in reason
    assert get_op("conv_fwd").why_unusable(kernel(), layer(c=4 * 24, k=4 * 44), ARCH) is None


def test_only_what_fills_no_product_knows_the_groups() -> None:
    """Groups that fill their last product are copied as ever; zeros would cost a dimension."""

    def maps(direction: str, count: int) -> dict[str, tuple[int, ...]]:
        (step,) = launch(kernel(direction), layer(direction, count), ARCH).steps
        assert isinstance(step, Step)
        assert step.source.constants["RAGGED"] == (count % 16 != 0)
        named = zip(step.source.signature, step.arguments, strict=True)
        return {name: given.sizes for name, given in named if isinstance(given, TensorMap)}

    assert maps("fwd", 48) == {"image_map": (192, 28, 28, 32), "filter_map": (48, 9, 192)}
    assert maps("fwd", 56) == {"image_map": (56, 4, 28, 28, 32), "filter_map": (56, 9, 224)}
    assert maps("bwd_data", 56)["filter_map"] == (56, 9, 56, 4)


def test_its_dense_kernel_has_its_rules() -> None:
    assert kernel().dense.name == "conv_fwd_cuda_halo_bf16_m128_n64_k64_s4_g2_l1_c1_filter_b1_f0"
    with pytest.raises(KernelError, match="registers"):
        kernel(tile_m=256, tile_n=256)
    with pytest.raises(KernelError, match="conv_fwd and conv_bwd_data"):
        kernel("bwd_weight")


@pytest.mark.slow
@pytest.mark.skipif(why_no_nvrtc() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kernels_compile_without_spills(direction: str) -> None:
    for k in [k for k in pool(direction) if k.dtype == "bf16"][::4]:
        build = build_one(k, ARCH)
        assert build.status == "ok", f"{k.name}: {build.message}"
        assert build.resources.spills == 0, k.name
