"""CK's wavelet, multi-D and depthwise convolutions: names come back whole, rules hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tilewise.core.arch import load_arch
from tilewise.errors import KernelError
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem

WAVELET = "DeviceGroupedConvBwdWeight_Xdl_WaveletModel_CShuffleV3"
NAMES = {
    f"{WAVELET}<256l+256m, 128, 128, 32, Default, 8, 2, 2, 4, 4, 4, 4, 1, 1, 8>": "wavelet",
    f"{WAVELET}<256l+128m, 64, 128, 32, Filter1x1Stride1Pad0, 8, 1, 2, 2, 2, 4, 4, 1, 1, 8, 4>": (
        "wavelet"
    ),
    "DeviceGroupedConvBwdWeightMultipleD_Xdl_CShuffle"
    "<256, 128, 128, 4, Default, 8, 2, 2, 8, 8, 8, 8, 1, 1, 8>": "multiple_d",
    "DeviceGroupedConvFwdMultipleABD_Xdl_CShuffle"
    "<256, 128, 128, 32, Default, 32, 32, 2, 2, 8, 8, 8, 1, 1, 1>": "multiple_abd",
    "DeviceGroupedConvFwdMultipleD_Xdl_CShuffle_Large_Tensor"
    "<256, 256, 128, 32, Default, 32, 32, 4, 2, 8, 8, 8, 1, 1>": "multiple_d",
    "DeviceGroupedConvBwdDataMultipleD_Xdl_CShuffle_v1"
    "<256, 128, 256, 32, 8, 4, Filter1x1Stride1Pad0, 32, 32, 2, 4, 8, 4, 1, 1>": "multiple_d",
    "grouped_conv_fwd_depthwise_bf16_nhwgc_2d_16x8_f5_s2x1_p2x0_nb4_sub1x2_vec8_4": "depthwise",
    "grouped_conv_fwd_depthwise_fp16_ndhwgc_3d_8x8_f3_s1x1_p1x1_nb1_sub1x1_vec1_1": "depthwise",
    "grouped_conv_fwd_depthwise_fp16_ngchw_2d_8x8_f3_s1x1_p1x1_nb8_sub2x2_vec2_2": "depthwise",
}


WAVES = {
    "256l+256m": ((128, 128, 2, 2), (64, 64, 1, 1), (128, 64, 2, 1), (64, 128, 1, 2)),
    "256l+128m": ((64, 64, 1, 2), (128, 64, 2, 2), (64, 128, 2, 2)),
}
"""Load and math threads of CK's wavelet instances, with tiles and products a wave."""


def op_of(name: str) -> str:
    backward = {"BwdWeight": "conv_bwd_weight", "BwdData": "conv_bwd_data"}
    return next((op for word, op in backward.items() if word in name), "conv_fwd")


@pytest.mark.parametrize("name", NAMES)
def test_names_and_values_come_back_whole(name: str) -> None:
    op = get_op(op_of(name))
    kernel = op.kernel_from_name(name)
    assert kernel.name == name and kernel.engine == "ck"
    assert kernel.family == NAMES[name]  # type: ignore[attr-defined]
    assert op.kernel_from_dict(kernel.to_dict()) == kernel


def test_load_and_math_waves_are_told_apart() -> None:
    kernel = get_op("conv_bwd_weight").kernel_from_name(list(NAMES)[1])
    values = kernel.to_dict()
    assert (values["load_threads"], values["threads"], kernel.tile) == (256, 128, (64, 128, 32))  # type: ignore[attr-defined]
    assert values["num_groups_to_merge"] == 4


@pytest.mark.parametrize("specialization", ["Default", "Filter1x1Stride1Pad0"])
@pytest.mark.parametrize("waves", WAVES)
def test_all_wavelet_instances_come_back_whole(waves: str, specialization: str) -> None:
    op, found = get_op("conv_bwd_weight"), set()
    for m, n, repeat_m, repeat_n in WAVES[waves]:
        listed = f"{m}, {n}, 32, {specialization}, 8, {repeat_m}, {repeat_n}, 4, 4, 2, 4, 1, 1, 8"
        kernel = op.kernel_from_name(f"{WAVELET}<{waves}, {listed}>")
        assert kernel.name == f"{WAVELET}<{waves}, {listed}>"
        assert op.kernel_from_dict(json.loads(json.dumps(kernel.to_dict()))) == kernel
        found.add(kernel)
    assert len(found) == len(WAVES[waves])


@pytest.mark.parametrize(
    ("index", "sizes", "why"),
    [
        (0, {}, None),
        (0, {"d": 4, "z": 3, "pad_d": 1}, None),
        (0, {"h": 1, "y": 1, "pad_h": 0}, "two or three dimensions"),
        (0, {"k": 66}, "K per group is 66, no multiple of 4"),
        (0, {"c": 68}, "C per group is 68, no multiple of 8"),
        (0, {"dtype": "fp32"}, "16 bits"),
        (1, {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, "g": 4}, None),
        (1, {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, "g": 2}, "cannot be merged 4"),
        (1, {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, "g": 4, "stride_h": 2}, "one tap"),
    ],
)
def test_wavelet_problems(index: int, sizes: dict[str, Any], why: str | None) -> None:
    op = get_op("conv_bwd_weight")
    values = {"n": 2, "c": 64, "k": 64, "h": 14, "w": 14, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    problem = ConvProblem(direction="bwd_weight", **{**values, "dtype": "bf16", **sizes})
    reason = op.why_unusable(op.kernel_from_name(list(NAMES)[index]), problem, load_arch("gfx942"))
    assert reason is None if why is None else reason is not None and why in reason


def test_depthwise_kernels_of_volumes_serve_no_images() -> None:
    op, arch = get_op("conv_fwd"), load_arch("gfx942")
    volume = next(name for name in NAMES if "_3d_" in name)
    problem = ConvProblem(n=1, c=8, k=8, g=8, h=9, w=9, y=3, x=3, pad_h=1, pad_w=1, dtype="fp16")
    assert "volumes" in str(op.why_unusable(op.kernel_from_name(volume), problem, arch))


@pytest.mark.parametrize(
    "name",
    [
        f"{WAVELET}<256, 128, 128, 32, Default, 8, 2, 2, 4, 4, 4, 4, 1, 1, 8>",
        f"{WAVELET}<256l+256m, 128, 128>",
        f"{WAVELET}<256l+256m, 128, 128, 32, Sideways, 8, 2, 2, 4, 4, 4, 4, 1, 1, 8>",
        f"{WAVELET}<256l+256m, 128, 0128, 32, Default, 8, 2, 2, 4, 4, 4, 4, 1, 1, 8>",
        "DeviceGroupedConvSideways_Xdl<256, 1>",
        "grouped_conv_fwd_depthwise_fp16_ngchw_2d_8x8_f3_s1x1_p1x1_nb8_sub2x2",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(KernelError):
        get_op(op_of(name)).kernel_from_name(name)


def test_rules_keep_kernels_to_their_problems() -> None:
    gfx942, sm_90 = load_arch("gfx942"), load_arch("sm_90")
    layer = {"n": 1, "c": 64, "k": 64, "h": 14, "w": 14, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    problem = ConvProblem(direction="bwd_weight", dtype="bf16", **layer)  # type: ignore[arg-type]
    op = get_op("conv_bwd_weight")
    usual, merged = (op.kernel_from_name(name) for name in list(NAMES)[:2])
    assert op.why_unusable(usual, problem, gfx942) is None
    assert "AMD" in str(op.why_unusable(usual, problem, sm_90))
    assert "one tap" in str(op.why_unusable(merged, problem, gfx942))
    depthwise = get_op("conv_fwd").kernel_from_name(list(NAMES)[-1])
    own = ConvProblem(dtype="fp16", layout="nchw", **{**layer, "g": 64})  # type: ignore[arg-type]
    assert get_op("conv_fwd").why_unusable(depthwise, own, gfx942) is None
    other = ConvProblem(dtype="fp16", layout="nchw", **{**layer, "g": 64, "stride_h": 2})  # type: ignore[arg-type]
    assert "made for another" in str(get_op("conv_fwd").why_unusable(depthwise, other, gfx942))
