"""CK's wavelet, multi-D and depthwise convolutions: names come back whole, rules hold."""

from __future__ import annotations

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
    "grouped_conv_fwd_depthwise_fp16_ngchw_2d_8x8_f3_s1x1_p1x1_nb8_sub2x2_vec2_2": "depthwise",
}


def op_of(name: str) -> str:
    return "conv_bwd_weight" if "BwdWeight" in name else "conv_fwd"


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
