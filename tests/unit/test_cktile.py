"""CK Tile's kernels: names round-trip, legality follows the public rules, spaces expand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.arch import load_arch
from tilewise.errors import KernelError
from tilewise.ops.cktile_rules import CkTileKernel
from tilewise.ops.configs import (
    dump_kernels,
    expand,
    expand_counted,
    filter_kernels,
    load_kernels,
    load_pool,
)
from tilewise.ops.contract import get_op
from tilewise.ops.conv.kernels.cktile import CkTileConvKernel
from tilewise.ops.conv.kernels.cktile import why_unusable as why_conv_unusable
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.kernels.cktile import CkTileGemmKernel
from tilewise.ops.gemm.kernels.cktile import why_unusable as why_gemm_unusable
from tilewise.ops.gemm.problem import GemmProblem

GFX90A, GFX942, GFX950 = (load_arch(name) for name in ("gfx90a", "gfx942", "gfx950"))

PUBLISHED_TILES = [
    *("16x64x64", "32x64x64", "64x64x64", "32x128x64", "64x128x64"),
    *("128x128x64", "16x64x128", "32x64x128", "64x64x128", "128x64x128"),
]
PUBLISHED = [
    f"grouped_conv_forward_bf16_2d_{tile}_{pipeline}"
    for tile in PUBLISHED_TILES
    for pipeline in ("compv3", "compv4", "compv5")
]
CONV_NAMES = [
    *PUBLISHED,
    "grouped_conv_forward_bf16_2d_64x64x64_compv3_intrawave_dsb_si",
    "grouped_conv_forward_bf16_3d_64x64x64_mem_interwave_gm2_dsb_si",
    "grouped_conv_forward_fp16_2d_16x64x64_basic_async_v1_intrawave",
    "grouped_conv_forward_fp16_2d_16x64x64_basic_v1_interwave_si",
    "grouped_conv_bwd_data_bf16_2d_32x64x64_comp_async_intrawave_gm2",
    "grouped_conv_bwd_weight_bf16_2d_16x64x64_compv3_intrawave_gm2_dsb_si_2stage",
    "grouped_conv_bwd_weight_bf16_2d_16x64x64_compv3_2stage",
    "grouped_conv_fwd_fp16_nhwgc_2d_compv4_cshuffle_intrawave_128x128x64_2x2x1_32x32x16",
    "grouped_conv_fwd_fp16_ndhwgc_3d_mem_default_default_64x16x16_4x1x1_16x16x16_vec1_1_1_gm8_pad110",
    "grouped_conv_bwd_weight_bf16_nhwgc_2d_compv3_cshuffle_intrawave_64x64x64_4x1x1_16x16x16"
    "_vec8_8_8_bpc2_wg2_gm2_dsb_2stage_filter1x1_stride1_pad0_explicit_gemm_streamk_tree_persistent"
    "_large_tensor_pad011",
    "grouped_conv_bwd_data_bf16_nhwgc_2d_compv3_cshuffle_intrawave_64x64x64_4x1x1_16x16x16_filter1x1_pad0",
]
GEMM_NAMES = [
    "gemm_universal_fp8_rcr_compv3_cshuffle_intrawave_False_False_False_False_128x128x128_1x4x1_16x16x128",
    "gemm_universal_fp16_ccr_compv3_cshuffle_intrawave_False_False_False_False_64x64x64_2x2x1_16x16x32",
    "gemm_fp16_rcr_compv4_default_intrawave_True_False_True_True_64x128x64_2x2x1_32x32x16",
    "gemm_universal_bf16_rrr_comp_async_default_default_True_True_True_False_128x128x64_2x2x1_32x32x16",
    "gemm_fp16_rcr_preshufflev2_default_default_False_False_False_False_128x128x64_1x4x1_16x16x32_preshuffle",
    "gemm_universal_fp16_crr_mem_cshuffle_interwave_True_True_True_True_64x64x64_2x2x1_16x16x16_vec8_4_2",
]


@pytest.mark.parametrize("name", CONV_NAMES)
def test_convolution_names_print_back(name: str) -> None:
    kernel = CkTileConvKernel.from_name(name)
    assert kernel.name == name and CkTileConvKernel.from_dict(kernel.to_dict()) == kernel


@pytest.mark.parametrize("name", GEMM_NAMES)
def test_gemm_names_print_back(name: str) -> None:
    kernel = CkTileGemmKernel.from_name(name)
    assert kernel.name == name and CkTileGemmKernel.from_dict(kernel.to_dict()) == kernel


def test_no_two_names_are_one_kernel() -> None:
    assert len({CkTileConvKernel.from_name(name) for name in CONV_NAMES}) == len(CONV_NAMES)


def test_a_short_name_does_not_invent_what_it_leaves_out() -> None:
    kernel = CkTileConvKernel.from_name("grouped_conv_forward_bf16_2d_16x64x128_compv4")
    assert kernel.op == "conv_fwd" and kernel.engine == "ck_tile"
    assert (kernel.tile_m, kernel.tile_n, kernel.tile_k) == (16, 64, 128)
    assert kernel.wave == kernel.warp_tile == (0, 0, 0) and kernel.vector_a == 0
    assert kernel.scheduler == "default" and kernel.num_groups_to_merge == 1
    assert not (kernel.double_smem_buffer or kernel.split_image or kernel.two_stage)


def test_a_long_name_says_its_vectors_by_saying_nothing() -> None:
    kernel = CkTileConvKernel.from_name(CONV_NAMES[-1])
    assert (kernel.vector_a, kernel.vector_b, kernel.vector_c) == (4, 8, 8)


@pytest.mark.parametrize(
    "name",
    [
        "grouped_conv_forward_bf16_2d_16x64x64",
        "grouped_conv_forward_bf16_2d_16x64x64_compv9",
        "grouped_conv_forward_bf16_2d_16x64x64_compv3_dsb_gm2",
        "grouped_conv_forward_bf16_2d_16x64x64_compv3_gm1",
        "grouped_conv_forward_bf16_2d_016x64x64_compv3",
        "grouped_conv_forward_bf16_2d_0x64x64_compv3",
        "grouped_conv_forward_bf16_4d_16x64x64_compv3",
        "grouped_conv_sideways_bf16_2d_16x64x64_compv3",
        "grouped_conv_fwd_fp16_ndhwgc_2d_mem_default_default_64x64x64_4x1x1_16x16x16",
        "grouped_conv_fwd_fp16_nhwgc_2d_mem_default_default_64x64x64_4x1x1_16x16x16_vec4_8_8",
        "grouped_conv_fwd_fp16_nhwgc_2d_mem_default_default_64x64x64_4x1x1_16x16x16_vec0_8_8",
        "grouped_conv_fwd_fp16_nhwgc_2d_mem_default_default_64x64x64_4x0x1_16x16x16",
        "conv_fwd_cpu_fp32",
        "",
    ],
)
def test_other_convolution_names_are_refused(name: str) -> None:
    with pytest.raises(KernelError):
        CkTileConvKernel.from_name(name)


@pytest.mark.parametrize(
    "name",
    [
        GEMM_NAMES[0] + "_vec0_0_0",
        GEMM_NAMES[0].replace("False_False_False_False", "False_False_False"),
        GEMM_NAMES[0].replace("rcr", "rcc"),
        GEMM_NAMES[0].replace("128x128x128", "128x128"),
        GEMM_NAMES[0].replace("1x4x1", "0x4x1"),
        "gemm_cpu_fp32",
    ],
)
def test_other_gemm_names_are_refused(name: str) -> None:
    with pytest.raises(KernelError):
        CkTileGemmKernel.from_name(name)


def drawn(kind: type[CkTileKernel], **fixed: Any) -> st.SearchStrategy[CkTileKernel | None]:
    """Any combination of traits, None where it is no kernel."""

    def build(values: dict[str, Any]) -> CkTileKernel | None:
        try:
            return kind(**values)
        except KernelError:
            return None

    space = {name: st.sampled_from(choices) for name, choices in kind.space().items()}
    return st.fixed_dictionaries({**space, **fixed}).map(build)


directions = st.sampled_from(("conv_fwd", "conv_bwd_data", "conv_bwd_weight"))
zeros = {
    f"{what}_{axis}": st.just(0)
    for what, axes in (("wave", "mnk"), ("warp_tile", "mnk"), ("vector", "abc"))
    for axis in axes
}
usual = {
    "layout": st.just("nhwgc"),
    "epilogue": st.just("cshuffle"),
    **{f"pad_{axis}": st.just(True) for axis in "mnk"},
    **{name: st.just(1) for name in ("block_per_cu", "num_wave_groups")},
    "specialization": st.just("default"),
    "explicit_gemm": st.just(False),
    "streamk": st.just("off"),
    "streamk_persistent": st.just(False),
}
KERNELS = [
    drawn(CkTileGemmKernel),
    drawn(CkTileConvKernel, op_name=directions),
    drawn(CkTileConvKernel, op_name=directions, **zeros, **usual),
]


@pytest.mark.parametrize("kernels", KERNELS, ids=["gemm", "conv_long", "conv_short"])
def test_names_and_json_round_trip_over_the_whole_space(kernels: Any) -> None:
    built = 0

    @settings(max_examples=150, deadline=None)
    @given(kernels, kernels)
    def check(a: CkTileKernel | None, b: CkTileKernel | None) -> None:
        nonlocal built
        for kernel in (a, b):
            if kernel is not None:
                built += 1
                assert type(kernel).from_name(kernel.name) == kernel
                assert load_kernels(dump_kernels([kernel]), get_op(kernel.op)) == [kernel]
        if a is not None and b is not None:
            assert (a.name == b.name) == (a == b)

    check()
    assert built > 50


def test_short_kernels_cannot_carry_what_their_name_cannot() -> None:
    base: dict[str, Any] = {"op_name": "conv_fwd", "dtype": "bf16", "pipeline": "mem"}
    base |= {"tile_m": 64, "tile_n": 64, "tile_k": 64}
    CkTileConvKernel(**base)
    for more in ({"pad_m": False}, {"layout": "ngchw"}, {"vector_a": 8}, {"wave_m": 2}):
        with pytest.raises(KernelError):
            CkTileConvKernel(**base, **more)


def gemm(**changes: Any) -> CkTileGemmKernel:
    values = {"dtype": "fp16", "layout": "rcr", "pipeline": "compv3"}
    tile = {"tile_m": 128, "tile_n": 128, "tile_k": 64}
    waves = {"wave_m": 2, "wave_n": 2, "wave_k": 1}
    steps = {"warp_tile_m": 32, "warp_tile_n": 32, "warp_tile_k": 16}
    return CkTileGemmKernel(**{**values, **tile, **waves, **steps, **changes})


def conv(op: str = "conv_fwd", **changes: Any) -> CkTileConvKernel:
    values = {"dtype": "bf16", "tile_m": 64, "tile_n": 64, "tile_k": 64, "pipeline": "compv3"}
    return CkTileConvKernel(op_name=op, **{**values, **changes})


WAVES_4X1 = {"wave_m": 4, "wave_n": 1, "wave_k": 1}
STEP_16 = {"warp_tile_m": 16, "warp_tile_n": 16, "warp_tile_k": 16}
STEP_128 = {**STEP_16, "warp_tile_k": 128}


@pytest.mark.parametrize(
    ("kernel", "arch", "why"),
    [
        (gemm(), GFX950, None),
        (gemm(), load_arch("sm_90"), "not on sm_90"),
        (gemm(), load_arch("x86_avx2"), "not on x86_avx2"),
        (gemm(dtype="fp8"), GFX90A, "gfx90a has no matrix instructions for fp8"),
        (gemm(wave_m=4, wave_n=4), GFX950, None),
        (gemm(wave_m=4, wave_n=4), GFX942, "no wave split 4x4x1"),
        (gemm(wave_m=2, wave_n=1, wave_k=2), GFX942, None),
        (gemm(wave_m=2, wave_n=1, wave_k=2), GFX90A, "no wave split 2x1x2"),
        (gemm(warp_tile_k=8), GFX942, None),
        (gemm(warp_tile_k=128), GFX950, "no warp tile 32x32x128 for fp16"),
        (gemm(dtype="fp8", tile_k=128, **STEP_128), GFX950, None),
        (gemm(dtype="fp8", tile_k=128, **STEP_128), GFX942, "no warp tile 16x16x128"),
        (gemm(tile_m=96), GFX950, "tile_m is 96, which wave_m x warp_tile_m = 64"),
        (gemm(tile_k=8), GFX950, "tile_k is 8, which wave_k x warp_tile_k = 16"),
        (gemm(tile_k=4), GFX950, "tile_k is 4; it must be at least 8"),
        (gemm(tile_m=256, tile_n=256, tile_k=64), GFX942, None),
        (gemm(tile_m=256, tile_n=256, tile_k=128), GFX942, "131072 bytes of LDS; gfx942 has 65536"),
        (gemm(tile_m=256, tile_n=256, tile_k=128), GFX950, None),
        (gemm(tile_m=256, tile_n=256, tile_k=64, pipeline="compv4"), GFX942, "131072 bytes"),
        (gemm(tile_m=256, tile_n=256, tile_k=128, pipeline="compv4"), GFX950, "262144 bytes"),
        (gemm(tile_m=256, tile_n=256, tile_k=64, pipeline="compv6"), GFX942, None),
        (gemm(pipeline="mem", scheduler="interwave"), GFX950, None),
        (gemm(pipeline="basic_v1", scheduler="interwave"), GFX950, None),
        (gemm(scheduler="interwave"), GFX950, "not for compv3"),
        (gemm(pipeline="basic_async_v1", scheduler="interwave"), GFX950, "not for basic_async_v1"),
        (gemm(pipeline="preshufflev2", preshuffled=True), GFX950, None),
        (gemm(preshuffled=True), GFX950, "needs preshufflev2"),
        (gemm(family="gemm_preshuffle"), GFX950, "needs preshufflev2"),
        (gemm(pipeline="preshufflev1"), GFX950, "preshufflev2 only"),
        (gemm(warp_tile_k=32, pipeline="preshufflev2"), GFX950, None),
        (gemm(warp_tile_k=32), GFX950, "no warp tile 32x32x32"),
        (gemm(vector_a=3, vector_b=8, vector_c=8), GFX950, "1 or even"),
    ],
)
def test_gemm_rules(kernel: CkTileGemmKernel, arch: Any, why: str | None) -> None:
    reason = why_gemm_unusable(kernel, None, arch)
    assert reason is None if why is None else reason is not None and why in reason


@pytest.mark.parametrize(
    ("kernel", "arch", "why"),
    [
        (conv(), GFX950, None),
        (conv(tile_m=7, tile_n=13, tile_k=5), GFX950, "at least 16"),
        (conv(tile_m=70), GFX950, "divides 70x64x64"),
        (conv(tile_m=128, tile_k=128, pipeline="compv4"), GFX950, None),
        (conv(tile_m=128, tile_k=128, pipeline="compv4"), GFX942, "98304 bytes of LDS"),
        (conv(tile_m=128, tile_k=128), GFX942, None),
        (conv(tile_m=128, tile_k=128, double_smem_buffer=True), GFX942, "98304 bytes of LDS"),
        (conv(tile_m=128, tile_k=128, double_smem_buffer=True, pipeline="basic_v1"), GFX942, None),
        (conv("conv_bwd_weight", two_stage=True), GFX950, None),
        (conv("conv_bwd_data", two_stage=True), GFX950, "backward-weight"),
        (conv(two_stage=True), GFX950, "backward-weight"),
        (conv(pipeline="compv5"), GFX950, None),
        (conv("conv_bwd_data", pipeline="compv5"), GFX950, "forward"),
        (conv("conv_bwd_weight", pipeline="compv6"), GFX950, None),
        (conv(**WAVES_4X1, **STEP_16), GFX950, None),
        (conv(tile_m=16, **WAVES_4X1, **STEP_16), GFX950, "does not divide"),
        (conv(vector_a=16, vector_b=32, vector_c=8, **WAVES_4X1, **STEP_16), GFX950, "load more"),
        (conv(explicit_gemm=True, **WAVES_4X1, **STEP_16), GFX950, "filter1x1_stride1_pad0"),
        (conv(streamk="tree", **WAVES_4X1, **STEP_16), GFX950, "stream-K"),
        (conv("conv_bwd_weight", streamk="tree", **WAVES_4X1, **STEP_16), GFX950, None),
    ],
)
def test_convolution_rules(kernel: CkTileConvKernel, arch: Any, why: str | None) -> None:
    reason = why_conv_unusable(kernel, None, arch)
    assert reason is None if why is None else reason is not None and why in reason


@pytest.mark.parametrize("name", PUBLISHED)
def test_everything_that_was_measured_is_legal(name: str) -> None:
    problem = ConvProblem(n=1, c=52, k=156, h=256, w=256, y=1, x=1, dtype="bf16")
    assert why_conv_unusable(CkTileConvKernel.from_name(name), problem, GFX950) is None


@pytest.mark.parametrize(
    ("changes", "sizes", "why"),
    [
        ({"pad_k": False, "pad_n": False}, {}, None),
        ({"pad_k": False}, {"k": 65}, "K is 65, no multiple of 64, and pad_k is off"),
        ({"pad_k": False}, {"split_k": 3}, "no multiple of 192"),
        ({"pad_n": False}, {"n": 100}, "N is 100"),
        ({"pad_m": False}, {"m": 1}, None),
        ({"pad_m": False, "layout": "ccr"}, {"m": 1, "layout": "ccr"}, "M is 1"),
        ({}, {"m": 1, "n": 3, "k": 5}, None),
        ({"vector_a": 8, "vector_b": 8, "vector_c": 8}, {"k": 68}, "K is 68, no multiple"),
        ({}, {"batch": 2}, "a batch of 2"),
        ({}, {"dtype": "bf16"}, "its dtype is fp16, not bf16"),
        ({}, {"layout": "rrr"}, "its layout is rcr, not rrr"),
    ],
)
def test_gemm_problems(changes: dict[str, Any], sizes: dict[str, Any], why: str | None) -> None:
    problem = GemmProblem(**{"m": 256, "n": 256, "k": 128, "dtype": "fp16", **sizes})
    reason = why_gemm_unusable(gemm(**changes), problem, GFX950)
    assert reason is None if why is None else reason is not None and why in reason


FULL = {**WAVES_4X1, **STEP_16}
STRIDED_1X1 = {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, "stride_h": 2}


@pytest.mark.parametrize(
    ("changes", "sizes", "why"),
    [
        ({}, {}, None),
        ({}, {"dtype": "fp16"}, "its dtype is bf16"),
        ({}, {"direction": "bwd_data"}, "it computes conv_fwd"),
        ({}, {"layout": "nchw"}, "layout"),
        ({}, {"d": 4, "z": 3}, "2 dimensions, the problem 3"),
        ({"ndim": 3}, {}, None),
        ({}, {"h": 1, "y": 1, "pad_h": 0}, None),
        ({"num_groups_to_merge": 2}, {}, "1 groups cannot be merged 2"),
        ({"num_groups_to_merge": 2}, {"g": 32}, "one channel in each"),
        ({"num_groups_to_merge": 2}, {"g": 64}, None),
        ({}, {"c": 3, "k": 5}, None),
        (FULL, {"c": 3}, "C per group is 3, no multiple of vector_a, 4"),
        (FULL, {"c": 12}, "no multiple of vector_b, 8"),
        (FULL, {"k": 12}, "K per group is 12, no multiple of vector_c, 8"),
        ({**FULL, "specialization": "filter1x1_pad0"}, {}, "one tap and no padding"),
        ({**FULL, "specialization": "filter1x1_pad0"}, STRIDED_1X1, None),
        ({**FULL, "specialization": "filter1x1_stride1_pad0"}, STRIDED_1X1, "strides of 1"),
        ({**FULL, "specialization": "filter3x3"}, {}, "one channel a group"),
    ],
)
def test_convolution_problems(
    changes: dict[str, Any], sizes: dict[str, Any], why: str | None
) -> None:
    usual = {"n": 2, "c": 64, "k": 64, "h": 14, "w": 14, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    problem = ConvProblem(**{**usual, "dtype": "bf16", **sizes})
    reason = why_conv_unusable(conv(**changes), problem, GFX950)
    assert reason is None if why is None else reason is not None and why in reason


def test_backward_directions_vectorize_other_channels() -> None:
    sizes = {"n": 2, "c": 64, "k": 12, "h": 14, "w": 14, "y": 3, "x": 3, "dtype": "bf16"}
    assert why_conv_unusable(conv(**FULL), ConvProblem(**sizes), GFX950)
    for direction in ("bwd_data", "bwd_weight"):
        problem = ConvProblem(direction=direction, **sizes)
        assert why_conv_unusable(conv(problem.op, **FULL), problem, GFX950) is None


@pytest.mark.parametrize(
    ("arch", "op", "count"),
    [
        # CK Tile's tile engine has 848 forward kernels on gfx950: 32 more are compv4 on four tiles
        # it leaves out although they are measured, 80 fewer basic_async_v1 with interwave.
        (GFX950, "conv_fwd", 848 + 32 - 80),
        # On gfx942 it has 688 and drops two tiles for the wave split its table gives them; other
        # splits fit, except where two buffers of 128x64x128 exceed the 64 KiB of LDS.
        (GFX942, "conv_fwd", 800 - 16 - 20),
        (GFX950, "conv_bwd_data", 240),
        (GFX950, "conv_bwd_weight", 480),
    ],
)
def test_pools_against_the_counts_of_the_tile_engine(arch: Any, op: str, count: int) -> None:
    pool = load_pool(get_op(op), arch, ["ck_tile"])
    asked = "dtype == 'bf16' and ndim == 2 and scheduler != 'default'"
    assert len(filter_kernels(pool, asked)) == count


def test_the_forward_pool_has_the_published_kernels() -> None:
    names = {kernel.name for kernel in load_pool(get_op("conv_fwd"), GFX950)}
    assert names >= set(PUBLISHED)


def test_wildcards_expand_waves_and_warp_tiles_per_architecture() -> None:
    traits = {"dtype": "fp16", "layout": "rcr", "tile_m": 128, "tile_n": 128, "tile_k": 64}
    wild = {"wave_m": -1, "wave_n": "*", "wave_k": -1}
    wild |= {f"warp_tile_{axis}": "*" for axis in "mnk"}
    config = [{"engine": "ck_tile", "traits": {**traits, **wild, "pipeline": "compv3"}}]
    for arch in (GFX90A, GFX942, GFX950):
        found = [k for k in expand(config, get_op("gemm"), arch) if isinstance(k, CkTileKernel)]
        possible = {
            (wave, step)
            for wave in arch.warp_splits
            for step in arch.matrix_instructions["fp16"]
            if all(t % (w * s) == 0 for t, w, s in zip((128, 128, 64), wave, step, strict=True))
        }
        assert {(k.wave, k.warp_tile) for k in found} == possible and len(found) == len(possible)


def test_cutting_dead_ends_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = {"dtype": "bf16", "tile_m": [16, 64], "tile_n": [16, 64], "tile_k": 32}
    traits |= {"wave_m": "*", "wave_n": "*", "wave_k": "*", "warp_tile_m": [16, 32]}
    traits |= {"warp_tile_n": [16, 32], "warp_tile_k": [16, 32], "pipeline": ["mem", "compv4"]}
    traits |= {"scheduler": "*", "two_stage": "*"}
    config, op = [{"engine": "ck_tile", "traits": traits}], get_op("conv_bwd_weight")
    cut = expand_counted(config, op, GFX942)
    monkeypatch.setattr(CkTileConvKernel, "is_dead_end", classmethod(lambda *_: False))
    whole = expand_counted(config, op, GFX942)
    assert cut.kernels == whole.kernels and cut.combinations == whole.combinations
    assert len(cut.kernels) > 100 and whole.illegal.total() > cut.illegal.total()
