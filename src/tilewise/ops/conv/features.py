"""What a convolution and a kernel look like together, as numbers, in every direction."""

from __future__ import annotations

from tilewise.core.dtypes import DTYPES, OPERAND_DTYPES
from tilewise.core.features import FeatureSet
from tilewise.ops.conv.cpu_work import CPU_FEATURES, CPU_HELPERS
from tilewise.ops.conv.gpu_work import GPU_FEATURES, GPU_HELPERS, TIME_HELPERS
from tilewise.ops.conv.kernels import KERNEL_TYPES
from tilewise.ops.conv.problem import DIRECTIONS, LAYOUTS, ConvProblem
from tilewise.ops.conv.torch_work import TORCH_FEATURES, TORCH_HELPERS
from tilewise.ops.fields import arch_fields, kernel_fields, problem_fields
from tilewise.ops.tiling import (
    APART,
    AXES,
    CALIBRATED_FEATURES,
    DTYPE_HELPERS,
    HARDWARE_FEATURES,
    TILE_FEATURES,
    TILE_HELPERS,
    calibration_fields,
    calibration_helpers,
    on_cpu,
    trait_features,
    word_features,
)

_WORDS = {
    "direction": DIRECTIONS,
    "layout": LAYOUTS,
    "dtype": OPERAND_DTYPES,
    "out_dtype": tuple(DTYPES),
}
_PROBLEM = problem_fields(ConvProblem, _WORDS)
_KERNEL = (*kernel_fields(KERNEL_TYPES), *calibration_fields())
_DIMS = (("d", "z"), ("h", "y"), ("w", "x"))
_FWD, _DATA, _WEIGHT = (f'p_direction == "{name}"' for name in DIRECTIONS)

_HELPERS = {
    **DTYPE_HELPERS,
    **{f"reach_{d}": f"(p_{f} - 1) * p_dilation_{d} + 1" for d, f in _DIMS},
    **{f"out_{d}": f"(p_{d} + 2 * p_pad_{d} - reach_{d}) // p_stride_{d} + 1" for d, _ in _DIMS},
    # Of a strided filter only every so many taps reach a given input pixel.
    **{
        f"taps_{d}": f"ceil_div(p_{f}, p_stride_{d} // gcd(p_stride_{d}, p_dilation_{d}))"
        for d, f in _DIMS
    },
    "taps": "p_z * p_y * p_x",
    "out_pixels": "p_n * out_d * out_h * out_w",
    "in_pixels": "p_n * p_d * p_h * p_w",
    "group_c": "p_c // p_g",
    "group_k": "p_k // p_g",
    "groups": "p_g",
    "gm": f"out_pixels if {_FWD} else in_pixels if {_DATA} else group_k",
    "gn": f"group_k if {_FWD} else group_c if {_DATA} else group_c * taps",
    "gk": f"group_c * taps if {_FWD} else group_k * taps_d * taps_h * taps_w if {_DATA} "
    "else out_pixels",
    "flops": "2 * out_pixels * p_k * group_c * taps",
    "input_elements": "in_pixels * p_c",
    "filter_elements": "p_k * group_c * taps",
    "output_elements": "out_pixels * p_k",
    "out_elements": f"output_elements if {_FWD} else input_elements if {_DATA} "
    "else filter_elements",
    "bytes": "(input_elements + filter_elements + output_elements - out_elements) * element_bytes "
    "+ out_elements * out_bytes",
    # Channels are packed in nhwc and pixels in nchw; loads are as wide as their count allows.
    "packed_in": 'group_c if p_layout == "nhwc" else p_w',
    "packed_out": 'group_k if p_layout == "nhwc" else out_w',
    "packed": f"packed_in if {_FWD} else packed_out",
    "vector": "8 if packed % 8 == 0 else 4 if packed % 4 == 0 else 2 if packed % 2 == 0 else 1",
    "store_vector": "8 if packed_out % 8 == 0 else 4 if packed_out % 4 == 0 else "
    "2 if packed_out % 2 == 0 else 1",
    "is_strided_load": "0",
    "merged": "max(1, k_num_groups_to_merge)",
    **{name: TILE_HELPERS[name] for name in ("is_vendor", "tm", "tn", "tk")},
    **CPU_HELPERS,
    **GPU_HELPERS,
    "rows": on_cpu("cpu_rows", "own_rows if is_ours else gm"),
    "cols": on_cpu("cpu_cols", "own_cols if is_ours else gn"),
    "passes": on_cpu("cpu_passes", "1"),
    "copied": on_cpu("cpu_copied", "0"),
    "tile_groups": on_cpu(
        "(1 if is_merged else p_g)", "own_groups if is_ours else ceil_div(p_g, merged)"
    ),
    **{name: text for name, text in TILE_HELPERS.items() if name != "analytic_us"},
    "misaligned": on_cpu("is_other_loop", TILE_HELPERS["misaligned"]),
    "steps": on_cpu(
        "cpu_steps", f"ceil_div(own_steps, split) if is_ours else {TILE_HELPERS['steps']}"
    ),
    "split": f"own_slices if is_ours else {TILE_HELPERS['split']}",
    "rate": f"own_rate if is_ours else {TILE_HELPERS['rate']}",
    "tile_volume": "tm * tn * tk * tile_taps",
    "tile_loads": "(tm / halo_taps + tn) * tk",
    "fill_k": "class_taps * source_c / (steps * split * tk) "
    f"if is_ours and not ({_WEIGHT}) else {TILE_HELPERS['fill_k']}",
    **TIME_HELPERS,
    **TORCH_HELPERS,
    "analytic_us": "cpu_us if not is_gpu else conv_us if is_ours "
    "else vendor_us if is_vendor else gpu_us",
    # Beside the vendor's, our own estimates are too short: without a model they are held so.
    "estimate_us": 'analytic_us * (4 if k_family == "gather" else 2) if is_gpu and is_ours '
    "else analytic_us",
    **AXES,
    "at_taps": "log2(taps)",
    "at_stride": "log2(p_stride_d * p_stride_h * p_stride_w)",
    "at_dilation": "log2(p_dilation_d * p_dilation_h * p_dilation_w)",
    "at_layout": f'{APART} if p_layout == "nchw" else 0',
    **calibration_helpers(),
}

_PROBLEM_FEATURES = {
    **{
        f.name.removeprefix("p_"): f.name
        for f in _PROBLEM
        if f.name.removeprefix("p_") not in _WORDS
    },
    "out_depth": "out_d",
    "out_height": "out_h",
    "out_width": "out_w",
    "gemm_m": "gm",
    "gemm_n": "gn",
    "gemm_k": "gk",
    "log2_n": "log2(p_n)",
    "log2_c": "log2(p_c)",
    "log2_k": "log2(p_k)",
    "log2_g": "log2(p_g)",
    "log2_h": "log2(p_h)",
    "log2_w": "log2(p_w)",
    "log2_spatial": "log2(p_d * p_h * p_w)",
    "log2_filter": "log2(taps)",
    "log2_output": "log2(out_d * out_h * out_w)",
    "log2_flops": "log2(flops)",
    "log2_bytes": "log2(bytes)",
    "arithmetic_intensity": "flops / max(1, bytes)",
    "filter_area": "taps",
    "is_1x1_conv": "taps == 1",
    "is_3x3_conv": "p_y == 3 and p_x == 3",
    "is_pointwise": "taps == 1 and p_pad_d + p_pad_h + p_pad_w == 0 and in_pixels == out_pixels",
    "is_3d": "p_d > 1 or p_z > 1 or p_pad_d > 0",
    "is_strided": "p_stride_d > 1 or p_stride_h > 1 or p_stride_w > 1",
    "is_dilated": "p_dilation_d > 1 or p_dilation_h > 1 or p_dilation_w > 1",
    "channels_per_group": "group_c",
    "output_channels_per_group": "group_k",
    "log2_channels_per_group": "log2(group_c)",
    "log2_output_channels_per_group": "log2(group_k)",
    "channels_product_per_group": "group_c * group_k",
    "is_depthwise": "p_g > 1 and p_c == p_g",
    "group_density": "p_g / max(1, p_c)",
    "is_small_group": "group_c < 16 or group_k < 16",
    "batch_group_product": "p_n * p_g",
    "is_small_batch_grouped": "p_n <= 4 and p_g > 1",
    "aspect_ratio_hw": "p_h / p_w",
    "aspect_ratio_filter": "p_y / p_x",
    "aspect_ratio_mn": "gm / max(1, gn)",
    "aspect_ratio_mk": "gm / max(1, gk)",
    "aspect_ratio_nk": "gn / max(1, gk)",
    "filter_share": "filter_elements / max(1, input_elements + output_elements)",
    "halo_share": "input_elements * taps / max(1, out_pixels * p_c)",
    "load_vector": "vector",
    "result_vector": "store_vector",
    "c_mod_64": "group_c % 64",
    "k_mod_16": "group_k % 16",
    "is_k_multiple_of_8": "group_k % 8 == 0",
    "roofline_time_us": "roofline_us",
    "fits_l2": "bytes <= a_l2_bytes",
    "input_kib": "input_elements * element_bytes / 1024",
    "filter_kib": "filter_elements * element_bytes / 1024",
    "output_kib": "output_elements * out_bytes / 1024",
}

_TILE_FEATURES = {
    "groups_merged": "merged",
    "merge_fill": "p_g / (tile_groups * merged)",
    "channels_to_tile_k": "group_c / tk",
    "taps_per_step": "tk / max(1, group_c)",
    "pixels_to_tile_m": "out_h * out_w / tm",
    "filter_steps": "taps * serial_steps",
    # Of CPU kernels: how rows of pixels and channels fill vectors, and what stays in cache.
    "row_fill": "out_w / (ceil_div(out_w, max(1, k_lanes)) * max(1, k_lanes))",
    "row_fill_in": "p_w / (ceil_div(p_w, max(1, k_lanes)) * max(1, k_lanes))",
    "lane_fill_c": "group_c / (ceil_div(group_c, max(1, k_lanes)) * max(1, k_lanes))",
    "lane_fill_k": "group_k / (ceil_div(group_k, max(1, k_lanes)) * max(1, k_lanes))",
    "blocks_per_image": "out_h * out_w / k_block if k_block > 0 else 0",
    "share_fill": "tiles / (ceil_div(tiles, units) * units)",
    "group_share_fill": "tile_groups * p_n / (ceil_div(tile_groups * p_n, units) * units)",
    "block_kib": "k_block * min(group_c, max(1, k_kc)) * element_bytes / 1024 "
    "if k_block > 0 else 0",
}


def _words_of(name: str) -> dict[str, str]:
    return word_features(name, next(f for f in _PROBLEM if f.name == f"p_{name}"))


FEATURES = FeatureSet(
    (*_PROBLEM, *_KERNEL, *arch_fields()),
    _HELPERS,
    {
        **_PROBLEM_FEATURES,
        **_words_of("direction"),
        **_words_of("layout"),
        **_words_of("dtype"),
        "result_bytes": "out_bytes",
        **trait_features(_KERNEL),
        **TILE_FEATURES,
        **_TILE_FEATURES,
        **CPU_FEATURES,
        **GPU_FEATURES,
        **TORCH_FEATURES,
        **HARDWARE_FEATURES,
        **CALIBRATED_FEATURES,
    },
)
