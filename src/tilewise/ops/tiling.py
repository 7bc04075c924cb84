"""Helpers and features that every op shares: tiles, waves, occupancy and the analytic model.

An op's own helpers come first and give `groups`, `gm`, `gn`, `gk` (the product behind the op, per
group), `rows` and `cols` (the same result as the kernel's tile lies on it), `flops`, `bytes`,
`out_elements`, `vector` (elements that one aligned load can take), `tile_groups` (groups after
merging), `copied` (elements that a kernel copies before it computes), `passes` (how often partial
results go through memory) and `is_strided_load` (a kernel's threads read along the wrong
dimension). Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.core.features import Field

DTYPE_HELPERS = {
    "element_bytes": '4 if p_dtype in ["fp32", "tf32"] else '
    '2 if p_dtype in ["fp16", "bf16"] else 1',
    "out_bytes": '2 if p_out_dtype in ["fp16", "bf16"] else 4',
    "peak_tflops": 'a_peak_fp32 if p_dtype == "fp32" else a_peak_tf32 if p_dtype == "tf32" else '
    'a_peak_fp16 if p_dtype == "fp16" else a_peak_bf16 if p_dtype == "bf16" else '
    'a_peak_fp8 if p_dtype == "fp8" else a_peak_bf8 if p_dtype == "bf8" else a_peak_int8',
}

LIBRARY_TILES = ((64, 64), (128, 64), (128, 128), (128, 256), (256, 128))

TILE_HELPERS = {
    "is_vendor": 'k_engine == "vendor"',
    "is_gpu": 'a_kind == "gpu"',
    # A vendor's routine has tiles of its own that nobody knows; a middling one stands for them.
    "tm": "128 if is_vendor else max(1, k_tile_m)",
    "tn": "128 if is_vendor else max(1, k_tile_n)",
    "tk": "64 if is_vendor else max(1, k_tile_k)",
    "split": "max(1, k_split_k)",
    "rate": "k_efficiency if k_efficiency > 0 else 1",
    "stages": "k_stages if k_stages > 0 else "
    '2 if k_pipeline == "compv4" or k_double_smem_buffer > 0 else 1',
    "warps": "k_warps if k_warps > 0 else "
    "max(1, k_wave_m) * max(1, k_wave_n) * max(1, k_wave_k) if k_wave_m > 0 else 4",
    "threads": "warps * a_warp_size",
    "tile_volume": "tm * tn * tk",
    "tile_loads": "(tm + tn) * tk",
    "accumulators_per_thread": "tm * tn / threads",
    "units": "a_compute_units",
    "slots": "units * max(1, k_blocks)",
    "xcd_units": "max(1, a_compute_units // max(1, a_num_xcd))",
    "blocks_m": "ceil_div(rows, tm)",
    "blocks_n": "ceil_div(cols, tn)",
    "steps": "ceil_div(ceil_div(gk, tk), split)",
    "tiles": "tile_groups * blocks_m * blocks_n * split",
    "waves": "ceil_div(tiles, slots)",
    "smem": "tile_loads * element_bytes * stages",
    "resident": "max(1, min(a_smem_bytes // max(1, smem), a_max_warps_per_cu // warps, "
    "a_registers_per_cu // (threads * (accumulators_per_thread + 48)))) if is_gpu else 1",
    "fill_m": "rows / (blocks_m * tm)",
    "fill_n": "cols / (blocks_n * tn)",
    "fill_k": "gk / (steps * split * tk)",
    "wave_fill": "tiles / (waves * slots)",
    "serial_steps": "waves * steps",
    "misaligned": "8 / vector - 1",
    # The analytic model: waves of tiles at the rate of the arithmetic, or bytes at that of memory.
    "compute_us": "serial_steps * units * 2 * tile_volume / (peak_tflops * 1000000 * rate)",
    "strip_bytes": "tiles * steps * tile_loads * element_bytes",
    # Tiles in flight share rows and columns; walking `group_m` rows together squares their block.
    "flight_m": "min(blocks_m, max(1, k_group_m))",
    "flight_n": "min(blocks_n, ceil_div(min(tiles, slots), flight_m))",
    "flight_bytes": "waves * (flight_m * tm + flight_n * tn) * steps * tk * element_bytes",
    "cache_bytes": "a_l3_bytes if a_l3_bytes > 0 else a_l2_bytes",
    "reread_bytes": "max(0, strip_bytes - bytes) if bytes > cache_bytes else 0",
    "memory_us": "(bytes + reread_bytes * 0.25) / (a_memory_gb_s * 1000)",
    "reduce_us": "(split - 1) * out_elements * 8 / (a_memory_gb_s * 1000)",
    "roofline_us": "max(flops / (peak_tflops * 1000000), bytes / (a_memory_gb_s * 1000))",
    # On a GPU a step is bound by its products or by the operands it streams in; steps of a tile
    # follow each other, and results leave at the end. The constants are those that rank the 188
    # problems of AMD's training rows (gfx950) best; one large L2 streams about twice as fast.
    "stream_gb_s": "a_memory_gb_s * (1.5 if a_l2_bytes > 16000000 else 0.75)",
    "stream_us": "tile_loads * element_bytes * units / (stream_gb_s * 1000)",
    "step_us": "max(2 * tile_volume * units / (peak_tflops * 1000000 * rate), stream_us)",
    "epilogue_us": "2 * tm * tn * out_bytes * units / (a_memory_gb_s * 1000)",
    "gpu_us": "a_launch_us / 2 + 0.3 * steps + reduce_us "
    "+ max(serial_steps * step_us + waves * epilogue_us, memory_us)",
    # Copies go through a cache that is about four times as fast as memory, read and written.
    "copy_us": "copied * 2 * element_bytes / (4 * a_memory_gb_s * 1000)",
    "cpu_us": "a_launch_us + max(compute_us, memory_us) + 0.3 * min(compute_us, memory_us) "
    "+ reduce_us + copy_us",
    "analytic_us": "gpu_us if is_gpu else cpu_us",
    # What a library with a choice of tiles would need, whichever of them suits the problem best.
    **{
        f"library_{m}x{n}": f"ceil_div(groups * ceil_div(gm, {m}) * ceil_div(gn, {n}), units) "
        f"* {m * n}"
        for m, n in LIBRARY_TILES
    },
    "library_us": f"min({', '.join(f'library_{m}x{n}' for m, n in LIBRARY_TILES)}) "
    "* 2 * gk * units / (peak_tflops * 1000000)",
}

APART = 4.0
"""Octaves between problems that differ in kind (a layout), not in size."""
AXES = {
    "at_m": "log2(max(1, gm))",
    "at_n": "log2(max(1, gn))",
    "at_k": "log2(max(1, gk))",
    "at_groups": "log2(max(1, groups))",
    "at_vector": "log2(vector)",
}
"""A problem's place among others, in octaves."""

CALIBRATION_TERMS = {
    "one": "1",
    "steps": "steps",
    "serial_steps": "serial_steps",
    "waves": "waves",
    "tile_steps": "tiles * steps / units",
    "tiles": "tiles / units",
    "bytes": "bytes / (a_memory_gb_s * 1000)",
    "flops": "flops / (peak_tflops * 1000000)",
    "outputs": "out_elements * 0.000001",
    "misaligned_steps": "steps * misaligned",
    "misaligned_serial": "serial_steps * misaligned",
    "partial_sums": "(split - 1) * out_elements * 0.000001",
    "copied": "copied * 0.000001",
    "passes": "(passes - 1) * out_elements * 0.000001",
    "flight": "flight_bytes / (a_memory_gb_s * 1000)",
    "library": "library_us if is_vendor else 0",
    "strided": "bytes * is_strided_load / (a_memory_gb_s * 1000)",
    "misaligned_bytes": "bytes * misaligned / (a_memory_gb_s * 1000)",
}
"""What a kernel's time is a sum of, each with a factor that training finds per kernel."""


def on_cpu(mine: str, other: str) -> str:
    """An expression that is `mine` for CPU kernels and `other` for the rest."""
    return f'{mine} if k_engine == "cpu" else ({other})'


def calibration_helpers() -> dict[str, str]:
    """`term_*` and `calibrated_us`, over the factors `k_factor_*`."""
    terms = {f"term_{name}": source for name, source in CALIBRATION_TERMS.items()}
    total = " + ".join(f"k_factor_{name} * term_{name}" for name in CALIBRATION_TERMS)
    return {**terms, "calibrated_us": f"max(0.01, {total})"}


def calibration_fields() -> tuple[Field, ...]:
    return tuple(Field(name=f"k_factor_{name}") for name in CALIBRATION_TERMS)


TILE_FEATURES = {
    "tile_m": "tm",
    "tile_n": "tn",
    "tile_k": "tk",
    "tile_mn": "tm * tn",
    "tile_aspect": "tm / tn",
    "num_warps": "warps",
    "num_stages": "stages",
    "smem_bytes": "smem",
    "smem_ratio": "smem / a_smem_per_block_bytes",
    "tile_intensity": "tm * tn / (tm + tn)",
    "registers_per_thread": "accumulators_per_thread",
    "volume": "tile_volume",
    "loads_per_step": "tile_loads",
    "rate_of_peak": "rate",
    "resident_blocks": "resident",
    "num_tiles_m": "blocks_m",
    "num_tiles_n": "blocks_n",
    "num_tiles_k": "ceil_div(gk, tk)",
    "num_steps": "steps",
    "total_output_tiles": "tile_groups * blocks_m * blocks_n",
    "total_tiles": "tiles",
    "tile_eff_m": "fill_m",
    "tile_eff_n": "fill_n",
    "tile_eff_k": "fill_k",
    "last_tile_m": "(rows - (blocks_m - 1) * tm) / tm",
    "last_tile_n": "(cols - (blocks_n - 1) * tn) / tn",
    "last_tile_k": "(gk - (ceil_div(gk, tk) - 1) * tk) / tk",
    "overall_tile_efficiency": "fill_m * fill_n * fill_k",
    "cu_utilization": "wave_fill",
    "units_busy": "min(1, tiles / units)",
    "slots_busy": "min(1, tiles / slots)",
    "tiles_per_unit": "tiles / units",
    "wave_count": "waves",
    "last_wave": "tiles / slots - waves + 1",
    "even_steps": "tiles * steps / slots",
    "flight_traffic": "flight_bytes",
    "flight_reuse": "flight_bytes / max(1, bytes)",
    "copied_elements": "copied",
    "copied_share": "copied * element_bytes / max(1, bytes)",
    "result_passes": "passes",
    "resident_waves": "ceil_div(tiles, units * resident)",
    "resident_wave_fill": "tiles / (ceil_div(tiles, units * resident) * units * resident)",
    "xcd_waves": "ceil_div(ceil_div(tiles, max(1, a_num_xcd)), xcd_units)",
    "serial_work": "serial_steps",
    "serial_volume": "serial_steps * tile_volume",
    "serial_loads": "serial_steps * tile_loads",
    "chain_volume": "steps * tile_volume",
    "chain_loads": "steps * tile_loads",
    "ratio_m_to_tile_m": "rows / tm",
    "ratio_n_to_tile_n": "cols / tn",
    "ratio_k_to_tile_k": "gk / tk",
    "problem_smaller_than_tile_m": "rows < tm",
    "problem_smaller_than_tile_n": "cols < tn",
    "problem_smaller_than_tile_k": "gk < tk",
    "any_dim_too_small": "rows < tm or cols < tn or gk < tk",
    "wasted_outputs": "groups * (blocks_m * tm * blocks_n * tn - gm * gn)",
    "padded_outputs": "blocks_m * tm * blocks_n * tn",
    "strip_traffic": "strip_bytes",
    "strip_reuse": "strip_bytes / max(1, bytes)",
    "tiles_swapped": "tile_groups * ceil_div(rows, tn) * ceil_div(cols, tm)",
    "fill_n_by_tile_m": "cols / (ceil_div(cols, tm) * tm)",
    "fill_m_by_tile_n": "rows / (ceil_div(rows, tn) * tn)",
    "misaligned_work": "serial_steps * misaligned",
    "split_slices": "split",
    "partial_sum_bytes": "(split - 1) * out_elements * 8",
    "analytic_compute_us": "compute_us",
    "analytic_memory_us": "memory_us",
    "analytic_total_us": "analytic_us",
    "analytic_step_us": "step_us",
    "analytic_chain_us": "serial_steps * step_us + waves * epilogue_us",
    "analytic_ratio": "analytic_us / max(0.001, roofline_us + a_launch_us)",
    "compute_to_memory": "compute_us / max(0.000001, memory_us)",
    "library_estimate_us": "library_us",
    "analytic_to_library": "analytic_us / max(0.001, max(library_us, memory_us) + a_launch_us)",
    "chain_to_library": "serial_steps * step_us / max(0.001, library_us)",
    "strided_loads": "is_strided_load",
}

CALIBRATED_FEATURES = {
    "calibrated_ratio": "calibrated_us / max(0.001, roofline_us + a_launch_us)",
    "calibrated_total_us": "calibrated_us",
}

HARDWARE_FEATURES = {
    "hw_num_cus": "a_compute_units",
    "hw_simds_per_cu": "a_simds_per_cu",
    "hw_total_simds": "a_compute_units * a_simds_per_cu",
    "hw_shader_engines": "a_shader_engines",
    "hw_max_clock_mhz": "a_clock_mhz",
    "hw_max_waves_per_cu": "a_max_warps_per_cu",
    "hw_wavefront_size": "a_warp_size",
    "hw_lds_capacity": "a_smem_bytes",
    "hw_l1_cache_kb": "a_l1_bytes / 1024",
    "hw_l2_cache_kb": "a_l2_bytes / 1024",
    "hw_l3_cache_kb": "a_l3_bytes / 1024",
    "hw_num_xcd": "a_num_xcd",
    "hw_memory_gb_s": "a_memory_gb_s",
    "hw_peak_tflops": "peak_tflops",
}


def trait_features(fields: Iterable[Field]) -> dict[str, str]:
    """Every kernel field as it is, and each word of a text field as a flag of its own."""
    made: dict[str, str] = {}
    for field in fields:
        name = field.name.removeprefix("k_")
        if name.startswith("factor_"):
            continue
        made[f"kernel_{name}"] = field.name
        for word in field.words:
            made[f"kernel_{name}_is_{word}"] = f'{field.name} == "{word}"'
    return made


def word_features(prefix: str, field: Field) -> dict[str, str]:
    """A text field of the problem as a code and as flags."""
    flags = {f"{prefix}_is_{word}": f'{field.name} == "{word}"' for word in field.words}
    return {prefix: field.name, **flags}
