"""Features: golden values by hand, and equal results as batch, as single rows and as C."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.arch import load_arch
from tilewise.core.compile_expr import C_PRELUDE, encode, evaluate, log2, to_c
from tilewise.core.expressions import parse
from tilewise.core.features import ABSENT, ARCH, KERNEL, MIXED, PROBLEM, FeatureSet, Field, Rows
from tilewise.core.features import columns as field_columns
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.engines.toolchain import Unit, compile_units, why_no_compiler
from tilewise.errors import ExpressionError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.features import FEATURES as CONV
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.fields import arch_values, kernel_values, problem_values
from tilewise.ops.gemm.features import FEATURES as GEMM
from tilewise.ops.gemm.problem import LAYOUTS, GemmProblem
from tilewise.ops.vendor import VendorKernel

GFX950 = load_arch("gfx950")
CONV_KERNEL = get_op("conv_fwd").kernel_from_name("grouped_conv_forward_bf16_2d_64x128x32_compv3")


def rows_of(features: FeatureSet, problem: Problem, kernel: Kernel) -> Rows:
    def cells(scope: int, values: dict[str, Any]) -> dict[str, Any]:
        return field_columns(features.fields_of(scope), [values])

    arch = {k: float(v[0]) for k, v in cells(ARCH, arch_values(GFX950)).items()}
    zero = np.zeros(1, np.int64)
    return Rows(
        cells(PROBLEM, problem_values(problem)),
        cells(KERNEL, kernel_values(kernel)),
        arch,
        zero,
        zero,
    )


def values_of(features: FeatureSet, problem: Problem, kernel: Kernel) -> dict[str, float]:
    names = [*features.helpers, *features.features]
    found = features.evaluate(rows_of(features, problem, kernel), names)
    return {name: float(value[0]) for name, value in found.items()}


def test_there_are_at_least_as_many_as_the_reference_has() -> None:
    assert len(GEMM.features) >= 72
    assert len(CONV.features) >= 97


def test_convolution_by_hand() -> None:
    # 2 images of 64 channels, 56x56, 3x3, 128 filters: M = 2*56*56, N = 128, K = 64*9.
    problem = ConvProblem(n=2, c=64, k=128, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1, dtype="bf16")
    v = values_of(CONV, problem, CONV_KERNEL)
    assert (v["gemm_m"], v["gemm_n"], v["gemm_k"]) == (6272, 128, 576)
    assert (v["tile_m"], v["tile_n"], v["tile_k"]) == (64, 128, 32)
    assert v["num_tiles_m"] == 98
    assert v["num_tiles_n"] == 1
    assert v["num_tiles_k"] == 18
    assert v["total_output_tiles"] == 98
    assert v["wave_count"] == 1
    assert v["cu_utilization"] == 98 / 256
    assert v["tile_eff_m"] == v["tile_eff_n"] == v["tile_eff_k"] == 1.0
    assert v["flops"] == 2 * 6272 * 128 * 576
    assert v["bytes"] == 2 * (2 * 56 * 56 * 64 + 128 * 576 + 6272 * 128)
    assert v["smem_bytes"] == (64 + 128) * 32 * 2
    assert v["is_3x3_conv"] == 1
    assert v["kernel_pipeline_is_compv3"] == 1
    assert v["kernel_pipeline_is_compv4"] == 0


def test_partial_tiles_count_by_their_true_share() -> None:
    # 65 rows take two tiles of 64: the reference calls that 1/64 full, it is 65/128.
    problem = ConvProblem(n=1, c=8, k=100, h=5, w=13, y=1, x=1, dtype="bf16")
    v = values_of(CONV, problem, CONV_KERNEL)
    assert v["num_tiles_m"] == 2
    assert v["tile_eff_m"] == 65 / 128
    assert v["last_tile_m"] == 1 / 64
    assert v["tile_eff_n"] == 100 / 128
    assert v["tile_eff_k"] == 8 / 32
    assert v["problem_smaller_than_tile_k"] == 1


def cpu_values(name: str, **sizes: int) -> dict[str, float]:
    """What the analytic model counts for a CPU convolution kernel."""
    op, layout = name.split("_cpu_")[0], "nchw" if "_nchw_" in name else "nhwc"
    direction = op.removeprefix("conv_")
    problem = ConvProblem(direction=direction, dtype="fp32", layout=layout, **sizes)  # type: ignore[arg-type]
    return values_of(CONV, problem, get_op(op).kernel_from_name(name))


def test_a_cpu_kernels_work_by_hand() -> None:
    """Seven images of one pixel: `direct` has a panel of eight for each, `implicit` one for all."""
    single = {"n": 7, "c": 1344, "k": 896, "h": 1, "w": 1, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    kernel = "conv_fwd_cpu_fp32_tofp32_avx512_{}_overtiles"
    copied = 896 * 1344 * 9 + 7 * 9 * 1344  # the filter, and every image padded or unfolded to 3x3
    direct = cpu_values(kernel.format("direct_nhwc_byk_m8_v3_k64_b512"), **single)
    assert [direct[n] for n in ("rows", "blocks_m", "blocks_n")] == [56, 7, 19]
    assert (direct["steps"], direct["passes"], direct["copied"]) == (1344 * 9 / 64, 21, copied)
    implicit = cpu_values(kernel.format("implicit_nhwc_byk_m8_v3_k512_b128"), **single)
    assert [implicit[n] for n in ("rows", "blocks_m", "passes")] == [8, 1, 24]
    assert implicit["copied"] == copied


def test_gradients_on_a_cpu_by_hand() -> None:
    """Dots run over rows of 9 + 2 in vectors of 16; backward, a stride of 2 makes four views."""
    sizes = {
        "n": 2,
        "c": 6,
        "k": 10,
        "g": 2,
        "h": 8,
        "w": 9,
        "y": 3,
        "x": 3,
        "pad_h": 1,
        "pad_w": 1,
    }
    name = "conv_bwd_weight_cpu_fp32_tofp32_avx512_direct_nchw_bypixel_m4_v3_k0_b1024_overchannels"
    dots = cpu_values(name, **sizes)
    assert (dots["blocks_m"], dots["blocks_n"]) == (3 * 3, 2)  # channels x thirds of the taps
    assert dots["steps"] * 1024 == 2 * 96  # (8 - 1) * 11 + 9 pixels in six vectors, two images
    assert dots["passes"] == 1

    strided = {
        **sizes,
        "n": 1,
        "c": 4,
        "k": 4,
        "g": 4,
        "h": 6,
        "w": 7,
        "stride_h": 2,
        "stride_w": 2,
    }
    name = "conv_bwd_data_cpu_fp32_tofp32_avx512_depthwise_nchw_bypixel_m2_v4_k3_b0_overtiles"
    assert cpu_values(name, **strided)["rows"] == 4 * 64
    assert cpu_values(name, **{**strided, "stride_h": 1, "stride_w": 1})["rows"] == 6 * 16


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"stride_h": 2, "stride_w": 3},
        {"dilation_d": 2, "z": 2, "d": 9},
        {"y": 1, "x": 1},
        {"y": 1, "x": 1, "h": 3, "w": 3, "pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2},
    ],
)
def test_convolution_features_agree_with_the_problem(direction: str, layer: dict[str, int]) -> None:
    sizes = {"n": 3, "c": 32, "k": 64, "g": 4, "h": 17, "w": 23, "y": 3, "x": 3, **layer}
    problem = ConvProblem(direction=direction, dtype="bf16", **sizes)
    kernel = VendorKernel(op_name=problem.op, library="torch")
    v = values_of(CONV, problem, kernel)
    view = problem.gemm
    assert (v["groups"], v["gm"], v["gn"], v["gk"]) == (view.groups, view.m, view.n, view.k)
    assert v["flops"] == problem.flops
    assert v["bytes"] == problem.bytes
    assert (v["out_depth"], v["out_height"], v["out_width"]) == (
        problem.out_d,
        problem.out_h,
        problem.out_w,
    )
    assert v["is_depthwise"] == problem.is_depthwise
    assert v["is_pointwise"] == problem.is_pointwise


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k", "cycles"),
    [
        # A row of tiles: two of 8 x 3 vectors in 12, one of 8 x 1 in 4.5; below them 2 rows, in 4.
        ("unpacked_inplace_m8_n48_mc0_kc0_nc0_u1_p0_bygrid", 10, 100, 7, 7 * (28.5 + 12)),
        # The short side is always a whole tile: three of 4 x 4 vectors in 8, one of 4 x 1 in 4.
        ("skinny_strip_m4_n64_mc0_kc16_nc0_u1_p0_bylong", 3, 200, 5, 5 * 28),
        ("skinny_strip_m4_n64_mc0_kc16_nc0_u1_p0_bylong", 200, 3, 5, 5 * 28),
        # Three tiles of 6 x 4 dots: three vectors in 12 each, and 72 to fold.
        ("skinny_dot_m6_n4_mc0_kc0_nc0_u1_p0_bylong", 3, 10, 33, 3 * (36 + 72)),
    ],
)
def test_cycles_of_register_tiles_by_hand(
    kernel: str, m: int, n: int, k: int, cycles: float
) -> None:
    found = get_op("gemm").kernel_from_name(f"gemm_cpu_fp32_tofp32_avx512_{kernel}_k1")
    v = values_of(GEMM, GemmProblem(m=m, n=n, k=k, dtype="fp32"), found)
    assert v["cpu_cycles"] == cycles


def test_int8_takes_two_steps_at_a_time() -> None:
    name = "gemm_cpu_int8_toint32_avx512_packed_panels_m8_n48_mc96_kc256_nc512_u1_p0_bygrid_k1"
    v = values_of(
        GEMM, GemmProblem(m=8, n=48, k=7, dtype="int8"), get_op("gemm").kernel_from_name(name)
    )
    assert v["cpu_cycles"] == 4 * 12


@pytest.mark.parametrize(
    ("k", "a", "b", "held"),
    [(8192, 128 * 128 / 8 / 256, 16 * 128 / 8 / 256, 0), (8193, 64, 8, 2 * (64 + 8))],
)
def test_loads_of_a_thread_by_hand(k: int, a: float, b: float, held: float) -> None:
    """Four warps of 64. Rows of odd length come by two bytes each, which wait in registers."""
    kernel = get_op("gemm").kernel_from_name("gemm_triton_skinny_bf16_m128_n16_k128_w4_s3_z4_g8_b1")
    v = values_of(GEMM, GemmProblem(m=4096, n=16, k=k, dtype="bf16"), kernel)
    assert [v[f"thread_{n}"] for n in ("loads_a", "loads_b", "holds")] == [a, b, held]


def test_matrix_product_by_hand() -> None:
    problem = GemmProblem(m=300, n=4096, k=1000, dtype="fp16", layout="rcr")
    name = (
        "gemm_fp16_rcr_compv4_cshuffle_intrawave_False_False_False_False_256x128x64_2x2x1_32x32x16"
    )
    kernel = get_op("gemm").kernel_from_name(name) if _is_name(name) else _any_cktile()
    v = values_of(GEMM, problem, kernel)
    tm, tn, tk = kernel.tile  # type: ignore[attr-defined]
    tiles = -(-300 // tm) * -(-4096 // tn)
    assert v["total_tiles"] == tiles
    assert v["wave_count"] == -(-tiles // 256)
    assert v["num_steps"] == -(-1000 // tk)
    assert v["arithmetic_intensity"] == 2 * 300 * 4096 * 1000 / problem.bytes
    assert v["load_vector"] == 8
    assert v["tile_eff_m"] == 300 / (-(-300 // tm) * tm)
    assert v["needs_padding_k"] == (1000 % tk != 0)
    assert v["hw_num_cus"] == 256
    assert v["hw_peak_tflops"] == GFX950.peak_tflops["fp16"]


@cache
def _any_cktile() -> Kernel:
    return load_pool(get_op("gemm"), GFX950)[0]


def _is_name(name: str) -> bool:
    try:
        get_op("gemm").kernel_from_name(name)
    except ValueError:
        return False
    return True


def test_unknown_words_have_a_code_of_their_own() -> None:
    words = ("compv3", "compv4")
    assert encode("compv3", words) == 1
    assert encode("compv9", words) == 0
    expression = parse('pipeline == "compv9"', {"pipeline"})
    found = evaluate(expression, {"pipeline": np.array([0.0, 1.0])}, {"pipeline": words})
    assert found.tolist() == [0.0, 0.0]


def test_traits_that_a_kernel_lacks_are_absent() -> None:
    v = values_of(
        CONV,
        ConvProblem(n=1, c=8, k=8, w=4, x=1),
        VendorKernel(op_name="conv_fwd", library="torch"),
    )
    assert v["kernel_num_groups_to_merge"] == ABSENT
    assert v["kernel_pipeline"] == 0


def test_scopes_follow_from_fields() -> None:
    assert CONV.scopes["gm"] == PROBLEM
    assert CONV.scopes["tm"] == KERNEL
    assert CONV.scopes["tiles"] == MIXED
    assert CONV.scopes["units"] == ARCH


def test_definitions_survive_json() -> None:
    again = FeatureSet.from_dict(CONV.to_dict())
    assert list(again.helpers.items()) == list(CONV.helpers.items())
    assert list(again.features.items()) == list(CONV.features.items())
    assert again.fields == CONV.fields


def test_a_restricted_set_keeps_only_what_it_needs() -> None:
    small = CONV.restricted(["gemm_m"])
    assert set(small.features) == {"gemm_m"}
    assert "tm" not in small.helpers
    assert "gm" in small.helpers


def test_a_name_defined_twice_is_refused() -> None:
    twice = FeatureSet((Field(name="p_m"),), {"a": "p_m"}, {"a": "p_m + 1"})
    with pytest.raises(ExpressionError, match="defined twice"):
        _ = twice.expressions


conv_problems = st.builds(
    ConvProblem,
    direction=st.sampled_from(["fwd", "bwd_data", "bwd_weight"]),
    n=st.integers(1, 300),
    c=st.integers(1, 5000).map(lambda v: 4 * v),
    k=st.integers(1, 5000).map(lambda v: 4 * v),
    g=st.sampled_from([1, 2, 4]),
    h=st.integers(16, 2000),
    w=st.integers(16, 2000),
    y=st.integers(1, 4),
    x=st.integers(1, 4),
    stride_h=st.integers(1, 3),
    stride_w=st.integers(1, 3),
    pad_h=st.integers(0, 3),
    pad_w=st.integers(0, 3),
    dilation_h=st.integers(1, 4),
    dilation_w=st.integers(1, 4),
    dtype=st.sampled_from(["fp32", "bf16", "fp8"]),
    layout=st.sampled_from(["nhwc", "nchw"]),
)
gemm_problems = st.builds(
    GemmProblem,
    m=st.integers(1, 100_000),
    n=st.integers(1, 100_000),
    k=st.integers(1, 100_000),
    batch=st.integers(1, 64),
    dtype=st.sampled_from(["fp32", "fp16", "int8"]),
    layout=st.sampled_from(LAYOUTS),
)


@pytest.fixture(scope="module")
def c_features() -> dict[str, Any]:
    """Every helper and feature of both sets, compiled as plain C functions."""
    if why_no_compiler():
        pytest.skip("no compiler")
    units = []
    for features in (GEMM, CONV):
        names = {f.name: f"x[{i}]" for i, f in enumerate(features.fields)}
        lines = []
        for i, (name, expression) in enumerate(features.expressions.items()):
            lines.append(f"double v_{name} = {to_c(expression, names, features.words)};")
            lines.append(f"out[{i}] = v_{name};")
            names[name] = f"v_{name}"
        api = 'extern "C" __attribute__((visibility("default")))'
        body = "\n".join(lines)
        source = f"{C_PRELUDE}\n{api} void go(const double *x, double *out) {{\n{body}\n}}"
        units.append(Unit(source=source, flags=("-O1", "-ffp-contract=off", "-w")))
    made = compile_units(units)
    return {n: _function(m.library) for n, m in zip(("gemm", "conv"), made, strict=True)}


def _function(library: Path | None) -> Any:
    assert library is not None
    call = ctypes.CDLL(str(library)).go
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return call


def compare_with_c(features: FeatureSet, call: Any, problem: Problem, kernel: Kernel) -> None:
    rows = rows_of(features, problem, kernel)
    names = list(features.expressions)
    batch = Rows(
        {k: np.repeat(v, 3) for k, v in rows.problems.items()},
        {k: np.repeat(v, 2) for k, v in rows.kernels.items()},
        rows.arch,
        np.array([2, 0, 1]),
        np.array([0, 1, 0]),
    )
    single, many = features.evaluate(rows, names), features.evaluate(batch, names)
    flat = {**rows.problems, **rows.kernels, **{k: np.array([v]) for k, v in rows.arch.items()}}
    given_values = np.array([float(flat[f.name][0]) for f in features.fields])
    out = np.zeros(len(names))
    call(given_values.ctypes.data, out.ctypes.data)
    for i, name in enumerate(names):
        assert np.isfinite(single[name]).all(), name
        assert (many[name] == single[name][0]).all(), name
        assert out[i] == single[name][0], f"{name}: C {out[i]!r}, NumPy {single[name][0]!r}"


@given(problem=gemm_problems)
def test_gemm_features_are_equal_in_c(c_features: dict[str, Any], problem: GemmProblem) -> None:
    compare_with_c(GEMM, c_features["gemm"], problem, _any_cktile())


@given(problem=conv_problems)
def test_conv_features_are_equal_in_c(c_features: dict[str, Any], problem: ConvProblem) -> None:
    compare_with_c(CONV, c_features["conv"], problem, CONV_KERNEL)


@given(st.integers(1, 2**53), st.integers(1, 2**26))
def test_integer_arithmetic_is_exact(a: int, b: int) -> None:
    fields = {"a", "b"}
    values = {"a": np.array([float(a)]), "b": np.array([float(b)])}
    for source, exact in (("a // b", a // b), ("ceil_div(a, b)", -(-a // b)), ("a % b", a % b)):
        assert evaluate(parse(source, fields), values, {})[0] == exact
        assert parse(source, fields)({"a": a, "b": b}) == exact


@given(st.floats(1e-300, 1e300))
def test_log2_is_right(value: float) -> None:
    found = float(log2(np.array([value]))[0])
    assert found == pytest.approx(np.log2(value), rel=4e-16, abs=2e-16)


def test_log2_of_powers_of_two_is_exact() -> None:
    powers = np.arange(-1000, 1000)
    assert log2(np.ldexp(1.0, powers)).tolist() == powers.tolist()
    assert log2(np.array([0.0, -1.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "tf32"])
@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
def test_tiles_of_gpu_kernels_are_the_kernels_own(dtype: str, layout: str) -> None:
    arch = load_arch("sm_90")
    pool = [k for k in load_pool(get_op("gemm"), arch, ["triton"]) if k.dtype == dtype]
    for m, n in ((100, 8192), (8192, 100)):
        problem = GemmProblem(m=m, n=n, k=1024, dtype=dtype, layout=layout)
        usable = [k for k in pool if get_op("gemm").why_unusable(k, problem, arch) is None]
        assert usable
        for kernel in {k.family: k for k in usable}.values():
            if kernel.family in ("gemv", "smallk"):  # these walk strips, not tiles
                continue
            v = values_of(GEMM, problem, kernel)
            assert (v["blocks_m"], v["blocks_n"]) == kernel.tiles(problem), kernel.name


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
@pytest.mark.parametrize(("m", "n"), [(8, 4096), (4096, 8), (64, 64)])
def test_kernels_and_features_agree_on_who_swaps(layout: str, m: int, n: int) -> None:
    """The rule stands twice, in Python for launches and as an expression that becomes C."""
    seen = set()
    for kernel in load_pool(get_op("gemm"), load_arch("sm_90"), ["triton"]):
        problem = GemmProblem(m=m, n=n, k=256, layout=layout, dtype=kernel.dtype)
        found = GEMM.evaluate(rows_of(GEMM, problem, kernel), ["swapped"])["swapped"][0]
        assert bool(found) is kernel.swaps(problem), kernel.name
        seen.add((kernel.family, bool(found)))
    assert len(seen) > 8
