"""Dense CUDA convolutions as values: pools, legality, launches and what NVRTC makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cuda_pools import ARCH, legal, pool

from tilewise.core.arch import load_arch
from tilewise.engines.gpu.build import build_one
from tilewise.engines.gpu.nvrtc import why_no_nvrtc
from tilewise.errors import InputError, KernelError, TensorError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import OUT, Epilogue
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.launch import launch
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import default_strides
from tilewise.ops.conv.walk import backward, pixels, taps
from tilewise.ops.launch import Pointer, Step, TensorMap, Zero

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
FEW_BYTES = 16
"""The widest tiles keep a few addresses in memory, outside of what they repeat."""
MOST = 24
"""Kernels of a family that one test compiles."""


def layer(direction: str = "fwd", **changes: Any) -> ConvProblem:
    values: dict[str, Any] = {"n": 32, "c": 256, "k": 256, "h": 56, "w": 56, "y": 3, "x": 3}
    values |= {"pad_h": 1, "pad_w": 1, "dtype": "bf16", "layout": "nhwc"}
    return ConvProblem(direction=direction, **{**values, **changes})


def kernel(direction: str = "fwd", **traits: Any) -> DenseConvKernel:
    values = {"family": "im2col", "dtype": "bf16", "tile_m": 128, "tile_n": 128, "stages": 4}
    return DenseConvKernel(op_name=f"conv_{direction}", **{**values, **traits})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_usual_layer_has_sixty_kernels(direction: str) -> None:
    kernels = legal(layer(direction), DenseConvKernel)
    assert len(kernels) >= 60
    assert {k.family for k in kernels} == {"im2col", "gather", "halo"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_kernel_comes_back_from_its_name_and_launches(direction: str) -> None:
    """Of whatever family, for the problem that it is compiled ahead for."""
    op = get_op(f"conv_{direction}")
    representative = op.module("launch").representative
    for k in load_pool(op, ARCH, engines=("cuda",)):
        assert op.kernel_from_name(k.name) == k
        assert op.kernel_from_dict(k.to_dict()) == k
        p = representative(k)
        assert op.why_unusable(k, p, ARCH) is None, k.name
        for step in launch(k, p, ARCH).steps:
            if isinstance(step, Step):
                assert len(step.arguments) == len(step.source.signature)
                assert step.threads <= ARCH.max_threads_per_block
                assert step.smem_bytes <= ARCH.smem_per_block_bytes


@pytest.mark.parametrize(
    ("traits", "changes", "why"),
    [
        ({}, {"layout": "nchw"}, "layout"),
        ({}, {"dtype": "fp16"}, "dtype"),
        ({}, {"c": 252}, "multiples of 8 channels"),
        ({}, {"c": 96, "k": 96, "g": 3}, "multiples of 64"),
        ({}, {"stride_h": 9}, "steps by 8"),
        ({}, {"y": 1, "x": 255, "dilation_w": 2, "pad_w": 254}, "beyond the image"),
        ({"family": "rows"}, {}, "1x1"),
        ({"family": "taps"}, {}, "up to 32 channels"),
        ({"family": "taps"}, {"c": 32, "y": 1, "x": 1}, "taps of"),
        ({"family": "halo"}, {"stride_w": 2}, "stride 1"),
        ({"family": "halo", "stages": 6}, {"y": 31, "x": 31, "pad_h": 15, "pad_w": 15}, "shared"),
        ({"cluster": 2, "share": "pixels"}, {"k": 64}, "two tiles"),
        ({}, {"n": 0}, "nothing"),
        ({"family": "gather", "load_warps": 4}, {"g": 32}, "at least 16"),
        ({}, {"out_dtype": "fp16"}, "bf16 or fp32"),
    ],
)
def test_what_cannot_be_served_is_named(
    traits: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    reason = get_op("conv_fwd").why_unusable(kernel(**traits), replace(layer(), **changes), ARCH)
    assert reason is not None and why in reason


@pytest.mark.parametrize("family", ["im2col", "halo"])
def test_gradients_copy_from_whole_chunks_of_a_group(family: str) -> None:
    """TMA answers a copy that begins at no multiple of 16 bytes with an illegal instruction."""
    groups = 3 if family == "halo" else 1
    made = kernel("bwd_weight", family=family, tile_m=64, tile_n=64, math_groups=groups)
    rule = get_op("conv_bwd_weight").why_unusable
    assert rule(made, layer("bwd_weight", c=144, k=144, g=2), ARCH) is None
    reason = rule(made, layer("bwd_weight", c=144, k=72, g=2), ARCH)
    assert reason is not None and "multiples of 8 channels" in reason


@pytest.mark.parametrize(
    ("traits", "why"),
    [
        ({"tile_m": 96}, "64 rows"),
        ({"tile_m": 256, "tile_n": 256}, "registers"),
        ({"pingpong": True, "math_groups": 1}, "two math groups"),
        ({"pingpong": True}, "walk over tiles"),
        ({"share": "pixels"}, "shares nothing"),
        ({"atomic": True}, "cut"),
        ({"family": "gather"}, "load warps"),
        ({"dtype": "tf32"}, "steps are of 32"),
        ({"tile_k": 128}, "steps are of 64"),
        ({"family": "taps", "cluster": 2}, "no cluster"),
        ({"blocks": 2}, "alone"),
    ],
)
def test_impossible_kernels_are_refused(traits: dict[str, Any], why: str) -> None:
    with pytest.raises(KernelError, match=why):
        kernel(**traits)


def test_other_architectures_are_refused() -> None:
    for name in ("x86_avx2", "gfx942"):
        assert get_op("conv_fwd").why_unusable(kernel(), None, load_arch(name))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("filter_size", [1, 2, 3, 5])
def test_parities_multiply_every_pair_once(stride: int, dilation: int, filter_size: int) -> None:
    """Pixels and taps of all parities are those of the definition, and nothing is a zero."""
    p = layer(
        "bwd_data", n=1, h=11, w=1, y=filter_size, x=1, pad_h=2, pad_w=0,
        stride_h=stride, dilation_h=dilation,
    )  # fmt: skip
    pairs = set()
    for _, h, _ in backward(p):
        for pixel in range(h.size):
            for tap in range(h.taps):
                source = pixel + h.corner + tap * h.reach
                place = (h.first + pixel * h.every, h.tap_first + tap * h.tap_step, source)
                assert place not in pairs
                pairs.add(place)
    inside = {place for place in pairs if 0 <= place[2] < p.out_h}
    expected = {
        (out * stride + tap * dilation - 2, tap, out)
        for out in range(p.out_h)
        for tap in range(filter_size)
    }
    assert inside == {place for place in expected if 0 <= place[0] < p.h}


def test_parities_of_a_strided_filter_share_its_taps() -> None:
    p = layer("bwd_data", stride_h=2, stride_w=2)
    assert sorted(taps(walk) for walk in backward(p)) == [1, 2, 2, 4]
    assert sum(map(pixels, backward(p))) == p.h * p.w


def test_pixels_that_no_tap_reaches_are_cleared() -> None:
    p = layer("bwd_data", y=1, x=1, pad_h=0, pad_w=0, stride_h=2, stride_w=2)
    cleared, product = launch(kernel("bwd_data"), p, ARCH).steps
    assert cleared == Zero(target=Pointer(tensor=OUT), size=2 * p.input_elements)
    assert isinstance(product, Step) and not product.overlaps
    biased = launch(kernel("bwd_data"), p, ARCH, epilogue=Epilogue(bias=True)).steps
    names = [step.source.function for step in biased if isinstance(step, Step)]
    assert sorted(names) == ["implicit", "reduce", "reduce", "reduce"]


def test_parities_overlap_where_they_only_store() -> None:
    p = layer("bwd_data", stride_h=2, stride_w=2)
    first, *rest = launch(kernel("bwd_data"), p, ARCH).steps
    assert isinstance(first, Step) and not first.overlaps
    assert all(isinstance(step, Step) and step.overlaps for step in rest)


def test_slices_fill_the_device_and_no_more() -> None:
    p = layer(n=1, h=14, w=14)
    product, add = launch(kernel(fill=1), p, ARCH).steps
    assert isinstance(product, Step) and isinstance(add, Step)
    assert 66 < product.grid[0] <= ARCH.compute_units
    assert add.source.function == "reduce"
    zero, *_ = launch(kernel(fill=1, atomic=True), p, ARCH).steps
    assert isinstance(zero, Zero)
    assert zero.size == 4 * p.output_elements


def test_tensors_beyond_two_to_the_31_keep_their_places() -> None:
    p = layer(n=1, c=128, k=128, d=128, h=512, w=512, z=3, pad_d=1)
    (step,) = launch(kernel(), p, ARCH).steps
    assert isinstance(step, Step)
    values = dict(zip(step.source.signature, step.arguments, strict=True))
    assert values["result_n"] == p.output_elements > 2**31
    assert step.source.signature["result_n"] == "i64"
    assert isinstance(values["pixels_map"], TensorMap)
    assert values["pixels_map"].strides[-1] == 2 * p.input_elements


def test_images_with_gaps_are_walked() -> None:
    p = layer(y=1, x=1, pad_h=0, pad_w=0)
    first, second, out = default_strides(p)
    wide = (first[0] + 64, *first[1:])
    dense, gaps = (
        launch(kernel(family="rows"), p, ARCH, strides=strides).steps[0]
        for strides in ((first, second, out), (wide, second, out))
    )
    assert isinstance(dense, Step) and isinstance(gaps, Step)
    assert dense.source.constants["LOADER"] == 1
    assert gaps.source.constants["LOADER"] == 0


def test_filters_gradients_take_no_epilogue() -> None:
    for family in ("im2col", "halo"):
        traits = {"tile_m": 64, "tile_n": 64, "math_groups": 3 if family == "halo" else 1}
        with pytest.raises(InputError, match="no epilogue"):
            launch(
                kernel("bwd_weight", family=family, **traits),
                layer("bwd_weight"),
                ARCH,
                epilogue=Epilogue(bias=True),
            )


def test_addresses_are_multiples_of_16() -> None:
    with pytest.raises(TensorError, match="multiple of 16"):
        launch(kernel(), layer(), ARCH, is_aligned=False)


@pytest.mark.slow
@pytest.mark.skipif(why_no_nvrtc() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", ["im2col", "rows", "gather", "halo", "taps"])
def test_kernels_compile_without_spills(family: str, direction: str) -> None:
    dense = pool(direction, DenseConvKernel)
    kernels = [k for k in dense if k.family == family and k.dtype != "fp16"]
    assert bool(kernels) == ((family, direction) != ("taps", "bwd_weight")), "taps are of pixels"
    if not kernels:
        return
    for k in kernels[:: -(-len(kernels) // MOST)]:
        build = build_one(k, ARCH)
        assert build.status == "ok", f"{k.name}: {build.message}"
        assert build.resources.spills <= FEW_BYTES, k.name
        if k.threads > 256:  # what math groups take is there: else they wait for ever
            assert build.resources.registers == 65536 // k.threads // 8 * 8, k.name
