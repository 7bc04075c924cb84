"""What a matrix product and a kernel look like together, as numbers."""

from __future__ import annotations

from tilewise.core.dtypes import DTYPES, OPERAND_DTYPES
from tilewise.core.features import FeatureSet
from tilewise.ops.fields import arch_fields, kernel_fields, problem_fields
from tilewise.ops.gemm.kernels import KERNEL_TYPES
from tilewise.ops.gemm.problem import LAYOUTS, GemmProblem
from tilewise.ops.tiling import (
    AXES,
    CALIBRATED_FEATURES,
    DTYPE_HELPERS,
    HARDWARE_FEATURES,
    TILE_FEATURES,
    TILE_HELPERS,
    calibration_fields,
    calibration_helpers,
    trait_features,
    word_features,
)

_PROBLEM = problem_fields(
    GemmProblem,
    {"dtype": OPERAND_DTYPES, "out_dtype": tuple(DTYPES), "layout": LAYOUTS},
)
_KERNEL = (*kernel_fields(KERNEL_TYPES), *calibration_fields())

_HELPERS = {
    **DTYPE_HELPERS,
    "groups": "p_batch",
    "gm": "p_m",
    "gn": "p_n",
    "gk": "p_k",
    "tile_groups": "groups",
    "flops": "2 * p_batch * p_m * p_n * p_k",
    "out_elements": "p_batch * p_m * p_n",
    "operand_elements": "p_batch * (p_m * p_k + p_k * p_n)",
    "bytes": "operand_elements * element_bytes + out_elements * out_bytes",
    # The dimension along which each operand is packed decides how wide its loads can be.
    "packed_a": 'p_k if p_layout in ["rcr", "rrr"] else p_m',
    "packed_b": 'p_n if p_layout in ["rrr", "crr"] else p_k',
    "vector": "8 if packed_a % 8 == 0 and packed_b % 8 == 0 else "
    "4 if packed_a % 4 == 0 and packed_b % 4 == 0 else "
    "2 if packed_a % 2 == 0 and packed_b % 2 == 0 else 1",
    **TILE_HELPERS,
    **AXES,
    **calibration_helpers(),
}

_PROBLEM_FEATURES = {
    "m": "p_m",
    "n": "p_n",
    "k": "p_k",
    "batch": "p_batch",
    "asked_split_k": "p_split_k",
    "log2_m": "log2(p_m)",
    "log2_n": "log2(p_n)",
    "log2_k": "log2(p_k)",
    "log2_mnk": "log2(p_m * p_n * p_k)",
    "log2_flops": "log2(flops)",
    "log2_bytes": "log2(bytes)",
    "arithmetic_intensity": "flops / max(1, bytes)",
    "aspect_ratio_mn": "p_m / max(1, p_n)",
    "aspect_ratio_mk": "p_m / max(1, p_k)",
    "aspect_ratio_nk": "p_n / max(1, p_k)",
    "is_vector_like": "p_m == 1 or p_n == 1",
    "short_side": "min(p_m, p_n)",
    "long_side": "max(p_m, p_n)",
    "load_vector": "vector",
    "m_mod_16": "p_m % 16",
    "n_mod_16": "p_n % 16",
    "k_mod_16": "p_k % 16",
    "k_mod_64": "p_k % 64",
    "roofline_time_us": "roofline_us",
    "operand_kib": "operand_elements * element_bytes / 1024",
    "fits_l2": "bytes <= a_l2_bytes",
    "b_kib": "p_k * p_n * element_bytes / 1024",
    "a_kib": "p_k * p_m * element_bytes / 1024",
}

_PADDING_FEATURES = {
    feature: source
    for d in "mnk"
    for feature, source in (
        (f"needs_padding_{d}", f"g{d} % t{d} != 0"),
        (f"has_padding_when_needed_{d}", f"g{d} % t{d} != 0 and k_pad_{d} > 0"),
        (f"missing_required_padding_{d}", f"g{d} % t{d} != 0 and k_pad_{d} == 0"),
    )
}

FEATURES = FeatureSet(
    (*_PROBLEM, *_KERNEL, *arch_fields()),
    _HELPERS,
    {
        **_PROBLEM_FEATURES,
        **word_features("layout", next(f for f in _PROBLEM if f.name == "p_layout")),
        **word_features("dtype", next(f for f in _PROBLEM if f.name == "p_dtype")),
        "result_bytes": "out_bytes",
        **trait_features(_KERNEL),
        **TILE_FEATURES,
        **_PADDING_FEATURES,
        "missing_any_required_padding": " or ".join(
            f"(g{d} % t{d} != 0 and k_pad_{d} == 0)" for d in "mnk"
        ),
        **HARDWARE_FEATURES,
        **CALIBRATED_FEATURES,
    },
)
