"""What a row sum and a kernel look like together, as numbers."""

from __future__ import annotations

from tilewise.core.features import FeatureSet
from tilewise.ops.fields import arch_fields, kernel_fields, problem_fields
from tilewise.ops.tiling import (
    AXES,
    CALIBRATED_FEATURES,
    DTYPE_HELPERS,
    TILE_FEATURES,
    TILE_HELPERS,
    calibration_fields,
    calibration_helpers,
    trait_features,
)
from toy_op.kernels import KERNEL_TYPES
from toy_op.problem import RowSumProblem

_PROBLEM = problem_fields(RowSumProblem, {"dtype": ("fp32",), "out_dtype": ("fp32",)})
_KERNEL = (*kernel_fields(KERNEL_TYPES), *calibration_fields())
_HELPERS = {
    **DTYPE_HELPERS,
    "groups": "1",
    "gm": "p_rows",
    "gn": "1",
    "gk": "p_columns",
    "rows": "gm",
    "cols": "gn",
    "tile_groups": "1",
    "is_strided_load": "0",
    "passes": "1",
    "copied": "0",
    "flops": "2 * p_rows * p_columns",
    "out_elements": "p_rows",
    "bytes": "4 * p_rows * (p_columns + 1)",
    "vector": "gcd(p_columns, 8)",
    **TILE_HELPERS,
    **AXES,
    **calibration_helpers(),
}

FEATURES = FeatureSet(
    (*_PROBLEM, *_KERNEL, *arch_fields()),
    _HELPERS,
    {
        "log2_rows": "log2(p_rows)",
        "log2_columns": "log2(p_columns)",
        **trait_features(_KERNEL),
        **TILE_FEATURES,
        **CALIBRATED_FEATURES,
    },
)
