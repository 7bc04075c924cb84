"""What a matrix product and a kernel look like together, as numbers."""

from __future__ import annotations

from tilewise.core.dtypes import DTYPES, OPERAND_DTYPES
from tilewise.core.features import FeatureSet
from tilewise.ops.fields import arch_fields, kernel_fields, problem_fields, tactic_fields
from tilewise.ops.gemm.cpu_work import CPU_HELPERS
from tilewise.ops.gemm.kernels import KERNEL_TYPES
from tilewise.ops.gemm.problem import LAYOUTS, GemmProblem
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
from tilewise.ops.vendor import TACTIC

_PROBLEM = problem_fields(
    GemmProblem,
    {"dtype": OPERAND_DTYPES, "out_dtype": tuple(DTYPES), "layout": LAYOUTS},
)
_KERNEL = (*kernel_fields(KERNEL_TYPES), *calibration_fields())

# Most kernels deal out tiles. `streamk` deals out steps, and `fill` cuts the reduction of a last
# wave's tiles in as many slices as end soonest; leaving and adding up a slice costs a few steps.
# Launches decide with costs that depend on the tile (`launch_hopper`); these are those of small
# ones, and models were trained with them.
_CUTS = [
    f"ceil_div(tiles % slots * {cut}, slots) * (steps / {cut} + 2) + {1.7 * cut:.1f}"
    for cut in (2, 3, 4, 6, 8, 12, 16)
]
_SERIAL_STEPS = (
    'ceil_div(tiles * steps, slots) if k_family == "streamk" else '
    f"tiles // slots * steps + min({', '.join(['steps', *_CUTS])}) "
    "if k_fill > 0 and tiles % slots > 0 else waves * steps"
)

# What the vendor's library said it would do: its tiles, its split of K, its clusters, in which
# neighbours share what they load.
_TACTIC_HELPERS = {
    "has_tactic": "v_algorithm > 0",
    "its_m": "max(1, v_tile_m)",
    "its_n": "max(1, v_tile_n)",
    "its_split": "max(1, v_split)",
    "its_blocks_m": "ceil_div(gm, its_m)",
    "its_blocks_n": "ceil_div(gn, its_n)",
    "its_programs": "groups * its_blocks_m * its_blocks_n * its_split",
    "its_waves": "ceil_div(its_programs, units)",
    "its_steps": "its_waves * gk / its_split",
    "its_compute_us": "its_steps * its_m * its_n * 2 * units / (peak_tflops * 1000000)",
    "its_traffic": "its_programs * gk / its_split * element_bytes "
    "* (its_m / max(1, v_cluster_n) + its_n / max(1, v_cluster_m))",
    # Bytes of whole cache lines that a multiply-add costs: 128 bytes of a row that does not begin
    # on a line lie on two. True of rows along K; of others about.
    "its_lines": "(its_m / max(1, v_cluster_n) * (2 - gcd(packed_a * element_bytes, 128) / 128) "
    "+ its_n / max(1, v_cluster_m) * (2 - gcd(packed_b * element_bytes, 128) / 128)) "
    "* element_bytes / (its_m * its_n)",
}
_TACTIC_FEATURES = {
    f"tactic_{name}": f"{source} if has_tactic else 0"
    for name, source in (
        *((name, f"v_{name}") for name in TACTIC),
        ("tile_mn", "its_m * its_n"),
        ("fill_m", "gm / (its_blocks_m * its_m)"),
        ("fill_n", "gn / (its_blocks_n * its_n)"),
        ("programs", "its_programs"),
        ("wave_fill", "its_programs / (its_waves * units)"),
        ("steps", "its_steps"),
        ("compute_us", "its_compute_us"),
        ("compute_ratio", "its_compute_us * peak_tflops * 1000000 / max(1, flops)"),
        ("traffic", "its_traffic"),
        ("reuse", "its_traffic / max(1, bytes)"),
        ("lines", "its_lines"),
    )
}

_HELPERS = {
    **DTYPE_HELPERS,
    "groups": "p_batch",
    "gm": "p_m",
    "gn": "p_n",
    "gk": "p_k",
    # Some kernels compute the transpose of C, the tile's rows lying on its columns: those that
    # say so, those that put the longer (GPU) or the shorter (CPU) side on the rows, and those of
    # tf32 by TMA, which take an operand across K from registers.
    "is_thin": 'k_family in ["skinny", "gemv"]',
    "is_across_k": 'k_family == "tma" and p_dtype == "tf32" and p_layout == "rrr"',
    "is_swapped": "k_swap > 0 or is_across_k or "
    'is_thin and (p_m < p_n if k_engine == "triton" else p_n < p_m)',
    "rows": "gn if is_swapped else gm",
    "cols": "gm if is_swapped else gn",
    "tile_groups": "groups",
    # Thin kernels read their long operand along K.
    "is_long_along_k": 'p_layout in ["rcr", "ccr"] if p_m <= p_n else p_layout in ["rcr", "rrr"]',
    "is_strided_load": "is_thin and not is_long_along_k",
    "passes": "ceil_div(p_k, k_kc) if k_kc > 0 else 1",
    "copied": '(p_batch * p_m * p_k if k_access == "panels" else 0) '
    '+ (p_batch * p_k * p_n if k_access in ["panels", "bpanels"] else 0)',
    "flops": "2 * p_batch * p_m * p_n * p_k",
    "out_elements": "p_batch * p_m * p_n",
    "operand_elements": "p_batch * (p_m * p_k + p_k * p_n)",
    "bytes": "operand_elements * element_bytes + out_elements * out_bytes",
    # The dimension along which each operand is packed decides how wide its loads can be.
    "packed_a": 'p_k if p_layout in ["rcr", "rrr"] else p_m',
    "packed_b": 'p_n if p_layout in ["rrr", "crr"] else p_k',
    "vector": "gcd(gcd(packed_a, packed_b), 8)",
    # A vendor's fast routines want aligned rows of the result as well; ours store what they must.
    "aligned_to": 'gcd(vector, p_n) if k_engine == "vendor" else vector',
    **CPU_HELPERS,
    **TILE_HELPERS,
    "misaligned": "8 / aligned_to - 1",
    # Loads of up to 16 bytes that a thread of a GPU kernel issues a step. Below four bytes they
    # cannot go around the registers: whole stages wait there, and spill.
    "wide": "16 // element_bytes",
    "loads_a": "(tn if is_swapped else tm) * tk / gcd(packed_a, wide) / threads",
    "loads_b": "(tm if is_swapped else tn) * tk / gcd(packed_b, wide) / threads",
    "waits": "gcd(gcd(packed_a, packed_b), wide) * element_bytes < 4",
    # Counted in cycles on a CPU.
    "serial_steps": on_cpu("(cpu_cycles / (units * wave_fill))", _SERIAL_STEPS),
    "compute_us": on_cpu("(serial_steps / a_clock_mhz)", TILE_HELPERS["compute_us"]),
    **_TACTIC_HELPERS,
    **AXES,
    "at_layout_a": f'{APART} if p_layout in ["crr", "ccr"] else 0',
    "at_layout_b": f'{APART} if p_layout in ["rrr", "crr"] else 0',
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
    "result_vector": "8 if p_n % 8 == 0 else 4 if p_n % 4 == 0 else 2 if p_n % 2 == 0 else 1",
    "long_along_k": "is_long_along_k",
    "m_mod_16": "p_m % 16",
    "n_mod_16": "p_n % 16",
    "k_mod_16": "p_k % 16",
    "k_mod_64": "p_k % 64",
    "roofline_time_us": "roofline_us",
    "operand_kib": "operand_elements * element_bytes / 1024",
    "fits_l2": "bytes <= a_l2_bytes",
    "b_kib": "p_k * p_n * element_bytes / 1024",
    "a_kib": "p_k * p_m * element_bytes / 1024",
    "result_kib": "p_m * p_n * out_bytes / 1024",
    # Rows that begin on few cache lines or pages get in each other's way.
    "pitch_a_mod_128": "packed_a * element_bytes % 128",
    "pitch_b_mod_128": "packed_b * element_bytes % 128",
    "pitch_c_mod_128": "p_n * out_bytes % 128",
    "pitch_a_pages": "packed_a * element_bytes % 4096 == 0",
    "pitch_b_pages": "packed_b * element_bytes % 4096 == 0",
    "pitch_c_pages": "p_n * out_bytes % 4096 == 0",
}

_OWN_FEATURES = {
    "rows_aligned_to": "aligned_to",
    "thread_loads_a": "loads_a if is_gpu else 0",
    "thread_loads_b": "loads_b if is_gpu else 0",
    "thread_loads": "loads_a + loads_b if is_gpu else 0",
    "thread_holds": "(loads_a + loads_b) * max(1, stages - 1) if is_gpu and waits else 0",
    "swapped": "is_swapped",
    "rows_on_tile": "rows",
    "cols_on_tile": "cols",
    "slice_of_k": "gk / split",
    # Of CPU kernels: what threads share, and what stays in which cache.
    "shared_blocks": 'blocks_m if k_split == "m" else '
    'blocks_n if k_split in ["n", "long"] else blocks_m * blocks_n',
    "share_fill_m": "blocks_m / (ceil_div(blocks_m, units) * units)",
    "share_fill_n": "blocks_n / (ceil_div(blocks_n, units) * units)",
    "blocks_mc": "p_m / k_mc if k_mc > 0 else 0",
    "blocks_nc": "p_n / k_nc if k_nc > 0 else 0",
    "depth": "min(p_k, k_kc) if k_kc > 0 else p_k",
    "panel_kib": "(min(p_k, k_kc) if k_kc > 0 else p_k) * max(1, k_nr) * element_bytes / 1024",
    "block_kib": "min(p_m, k_mc) * min(p_k, k_kc) * element_bytes / 1024 if k_mc > 0 else 0",
    "register_cycles": 'log2(cpu_cycles) if k_engine == "cpu" else 0',
    "register_fill": 'flops / (4 * lanes * cpu_cycles) if k_engine == "cpu" else 0',
    "edge_rows": "p_m % max(1, k_mr)",
    "edge_cols": "p_n % max(1, k_nr)",
}

_PADDING_FEATURES = {
    feature: source
    for d, size in (("m", "rows"), ("n", "cols"), ("k", "gk"))
    for feature, source in (
        (f"needs_padding_{d}", f"{size} % t{d} != 0"),
        (f"has_padding_when_needed_{d}", f"{size} % t{d} != 0 and k_pad_{d} > 0"),
        (f"missing_required_padding_{d}", f"{size} % t{d} != 0 and k_pad_{d} == 0"),
    )
}

FEATURES = FeatureSet(
    (*_PROBLEM, *tactic_fields(), *_KERNEL, *arch_fields()),
    _HELPERS,
    {
        **_PROBLEM_FEATURES,
        **word_features("layout", next(f for f in _PROBLEM if f.name == "p_layout")),
        **word_features("dtype", next(f for f in _PROBLEM if f.name == "p_dtype")),
        "result_bytes": "out_bytes",
        **trait_features(_KERNEL),
        **TILE_FEATURES,
        **_OWN_FEATURES,
        **_PADDING_FEATURES,
        **_TACTIC_FEATURES,
        "missing_any_required_padding": " or ".join(
            f"({size} % t{d} != 0 and k_pad_{d} == 0)"
            for d, size in (("m", "rows"), ("n", "cols"), ("k", "gk"))
        ),
        **HARDWARE_FEATURES,
        **CALIBRATED_FEATURES,
    },
)
