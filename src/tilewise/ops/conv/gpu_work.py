"""What a GPU convolution kernel does for a problem: tiles, steps, slices, and an estimate of time.

Families differ in how they walk taps and channels, hence in what they pad, re-read and multiply by
zero. A tile lies on pixels x channels of the result, or on filters x entries of the gradient.
Backward-data falls into classes of pixels by their remainder of the stride, each with taps of its
own and a launch of its own: on average it has a share of the taps, and all together have each once.
"""

from __future__ import annotations

from tilewise.ops.gemm.kernels import BY_FAMILY
from tilewise.ops.tiling import LIBRARY_TILES

_DATA, _WEIGHT = (f'p_direction == "{name}"' for name in ("bwd_data", "bwd_weight"))

TAPS = ("implicit", "im2col", "ragged", "rows")
"""Matrix products one tap at a time, channels padded to whole steps."""
PRODUCT = ("gemm",)
"""One matrix product over all pixels, by a GEMM kernel: some lay tiles on its transpose."""
PACKED = ("packed", "gather", "taps")
"""Taps and channels in one row, or several taps of few channels in a step."""
PANELS = ("im2col", "rows")
"""A filter's gradient lies on whole panels of 64 channels, one tap's behind the other's."""
HALO = ("halo",)
"""Patches with their rim are read once, and taps read them shifted."""
MERGED = ("merged",)
"""Groups side by side in a tile, foreign products by zero."""
VECTOR = ("direct", "channelwise")
"""Channel by channel on the vector units, all groups in one row."""
STREAM = ("grouped", "padded", "depthwise", "stem", "image")
"""Few channels on the matrix units, filters in registers: bound by memory. A tile is `tile_h` by
`tile_w` pixels of an image, and its rim is read besides."""
WALKING = ("grouped", "padded", "stem", "image", "channelwise")
"""As many blocks as run at once walk over tiles; depthwise ones do for gradients of filters."""
RATES = {
    **{"implicit": 0.45, "packed": 0.3, "merged": 0.4},
    **{"im2col": 0.82, "rows": 0.82, "gather": 0.65, "halo": 0.86, "gemm": 0.8, "ragged": 0.82},
    "taps": 0.1,  # never run on a GPU: behind those that were
}
"""The share of the matrix units' peak that a family was seen to reach; others are set apart."""
POINTER = ("implicit", "packed", "merged", "direct")
"""They load through pointers, which draws less from L2 than copies do."""


def _one_of(families: tuple[str, ...]) -> str:
    words = ", ".join(f'"{name}"' for name in families)
    return f"is_ours and k_family in [{words}]"


def _rate() -> str:
    text = "0.5"
    for family, share in RATES.items():
        text = f'{share} if k_family == "{family}" else {text}'
    return text


_CLASSES = " * ".join(
    f"min(p_{taps}, p_{dim}, p_stride_{dim} // gcd(p_stride_{dim}, p_dilation_{dim}))"
    for dim, taps in zip("dhw", "zyx", strict=True)
)
_VENDOR_TILES = ", ".join(
    f"library_{m}x{n} * max(128 * units / (peak_tflops * 700000), 0.25 / {m * n})"
    for m, n in LIBRARY_TILES
)
_COPYING = ", ".join(f'"{name}"' for name, kind in BY_FAMILY.items() if kind.copies_by_tma)

GPU_HELPERS = {
    "is_ours": 'k_engine == "triton" or k_engine == "cuda"',
    "is_packed": _one_of(PACKED),
    "is_panels": _one_of(PANELS),
    "is_halo": f'{_one_of(HALO)} or k_loader == "halo"',
    "is_ragged": 'k_family == "ragged"',
    "is_padded": 'k_family == "padded"',
    "is_image": 'k_family == "image"',
    "is_merging": _one_of(MERGED),
    "is_vector": _one_of(VECTOR),
    "is_product": _one_of(PRODUCT),
    "is_pointer": f"{_one_of(POINTER)} or is_product and not (k_product in [{_COPYING}])",
    "is_turned": 'is_product and (k_swap > 0 or k_product in ["skinny", "gemv"] and gm < gn '
    f'or k_product == "tma" and p_dtype == "tf32" and {_DATA})',
    "is_stream": _one_of(STREAM),
    "is_strips": 'is_ours and k_family == "channelwise"',
    "is_walking": f"({_one_of(WALKING)}) or is_stream and {_WEIGHT}",
    "source_c": f"max(1, group_k if {_DATA} else group_c)",
    "result_c": f"max(1, group_c if {_DATA} else group_k)",
    # Classes that no tap reaches are cleared and count nowhere.
    "classes": f"{_CLASSES} if {_DATA} else 1",
    "class_pixels": "p_n * ceil_div(p_d, p_stride_d) * ceil_div(p_h, p_stride_h) "
    f"* ceil_div(p_w, p_stride_w) if {_DATA} else out_pixels",
    "class_taps": "taps / classes",
    **{f"line_{d}": f"ceil_div(p_{d}, p_stride_{d}) if {_DATA} else out_{d}" for d in "dhw"},
    # Halo kernels cut images into blocks of 8 by 8; their gradients of filters up to 16 by 16.
    "block_h": f"(8 if tk < 128 else 16) if {_WEIGHT} else 8",
    "block_w": f"(8 if tk < 256 else 16) if {_WEIGHT} else 8",
    "halo_blocks": "p_n * line_d * ceil_div(line_h, block_h) * ceil_div(line_w, block_w)",
    "class_tiles": "ceil_div(halo_blocks * 64 if is_halo else class_pixels, tm)",
    "merge_room": f"min(tm // result_c, tn // source_c) if {_WEIGHT} "
    "else min(tn // result_c, tk // source_c)",
    "groups_held": "max(1, min(merge_room, p_g)) if is_merging else 1",
    "is_wide": "is_vector or is_stream",
    # Several taps of a step have rows of 16 or 32 channels each.
    "packed_c": '(16 if source_c <= 16 else 32) if k_family == "taps" else source_c',
    "own_rows": "(gn if is_turned else gm) if is_product else "
    f"(p_k if is_wide else groups_held * result_c) if {_WEIGHT} "
    "else classes * class_tiles * tm if is_halo or classes > 1 and not is_wide "
    "else classes * class_pixels",
    "own_cols": "(gm if is_turned else gn) if is_product else "
    "(source_c * ceil_div(taps, tn) * tn if is_wide else taps * source_c if is_packed "
    "else taps * ceil_div(source_c, 64) * 64 if is_panels "
    "else (p_z if is_halo else taps) * ceil_div(groups_held * source_c, tn) * tn) "
    f"if {_WEIGHT} else p_g * result_c if is_wide else groups_held * result_c",
    "own_groups": "1 if is_wide else ceil_div(p_g, groups_held)",
    "own_steps": f"(halo_blocks if is_halo else ceil_div(out_pixels, tk)) if {_WEIGHT} "
    "else class_taps * source_c if is_vector "
    "else ceil_div(class_taps * packed_c, tk) if is_packed "
    "else class_taps * ceil_div(groups_held * source_c, tk)",
    "own_tiles": "own_groups * ceil_div(own_rows, tm) * ceil_div(own_cols, tn)",
    # Patches are cut by their channels and depths, never between taps that read the same one.
    "cut_steps": f"p_z * ceil_div(source_c, tk) if is_halo and not ({_WEIGHT}) else own_steps",
    # Products of few tiles are cut as often as fills the GPU once, by stream-K and last waves.
    "product_slices": "max(1, k_split_k) if k_split_k > 1 or not (k_fill > 0 or "
    'k_product == "streamk") else max(1, min(a_compute_units * max(1, k_blocks) // own_tiles, '
    'own_steps if k_product == "streamk" else min(own_steps, 16)))',
    "own_slices": "product_slices if is_product else max(1, min(k_fill * a_compute_units "
    "* max(1, k_blocks) * classes // own_tiles, cut_steps)) if k_fill > 0 else 1",
    # Launches one after the other; those that sum slices up wait for the others.
    "own_launches": "(1 if is_wide else classes) * (2 if own_slices > 1 else 1)",
    # A halo kernel's gradient of the filter keeps the sums of every tap; else it saves reading.
    "halo_taps": f"taps if is_halo and not ({_WEIGHT}) else 1",
    "tile_taps": f"p_y * p_x if is_halo and {_WEIGHT} else 1",
    # Of a group's last step, ragged kernels multiply whole instructions alone.
    "multiplied": "ceil_div(source_c, 16) * 16 / (ceil_div(source_c, tk) * tk) if is_ragged else 1",
    # Of groups that are padded: as many as have whole chunks of channels are a unit.
    "unit_groups": "max(8 // gcd(8, source_c), 8 // gcd(8, result_c))",
    "block_result_c": "unit_groups * result_c * (4 if unit_groups * result_c <= 16 "
    "else 2 if unit_groups * result_c <= 32 else 1) if is_padded else 64",
    "stream_waste": "ceil_div(unit_groups * source_c, 16) * ceil_div(unit_groups * result_c, 16) "
    "* 256 / (unit_groups * source_c * result_c) if is_padded "
    # A period's pixels are whole blocks of eight columns, each read by every place of a patch.
    "else ceil_div(p_stride_h * p_stride_w * p_c, 8) * 8 * ceil_div(p_y, p_stride_h) "
    "* ceil_div(p_x, p_stride_w) / (taps * p_c) if is_image "
    # A row of a first layer's filter is whole chunks of eight elements, for 64 channels at a time.
    "else p_y * ceil_div(p_x * p_c, 8) * 8 / (taps * p_c) * ceil_div(p_k, 64) * 64 / p_k "
    'if k_family == "stem" else max(1, 16 / source_c)',
    "own_rate": "0.35 * a_peak_fp32 / peak_tflops if is_vector "
    f"else {RATES['implicit']} if is_product and is_pointer else {_rate()}",
}
"""Counts of tilewise's GPU kernels; they mean nothing for others."""

GRANULES = {
    "granule_c": "gcd(group_c, 64)",
    "granule_k": "gcd(group_k, 64)",
    "granule": "min(granule_c, granule_k)",
}
"""The largest power of two, 64 at most, that channels of a group are a multiple of."""
LAYER_CLASSES = {
    "is_small_group_layer": "p_g > 1 and max(group_c, group_k) <= 32",
    "is_depthwise_layer": "p_g > 1 and group_c == 1",
    "is_volume": "p_d > 1 or p_z > 1 or p_pad_d > 0",
    "is_line": "p_d * p_h == 1 and p_w > 1",
    # Groups that cuDNN neither merges, as it does with equal powers of two, nor has tiles for.
    "is_uneven_layer": "p_g > 1 and group_c > 1 "
    "and not (group_c == group_k and granule_c == group_c)",
}

TIME_HELPERS = {
    **GRANULES,
    **LAYER_CLASSES,
    # Blocks that share a multiprocessor share its rates; a block alone is bound by latency.
    "tiles_at_once": "tiles / classes if is_ours and split > 1 else tiles",
    "together": "min(resident, ceil_div(tiles_at_once, units))",
    "rounds": "tiles / tiles_at_once * ceil_div(tiles_at_once, units * together)",
    "l2_gb_s": "a_memory_gb_s * (1.1 if is_vector else 1.5 if is_pointer else 3)",
    "own_step_us": "max(2 * multiplied * tile_volume * units / (peak_tflops * 1000000 * rate), "
    "tile_loads * element_bytes * units / (l2_gb_s * 1000))",
    "chain_us": "rounds * steps * max(together * own_step_us, 0.08) "
    "+ rounds * together * tm * tn * tile_taps * out_bytes * units * (1 if is_pointer else 0.4) "
    "/ (a_memory_gb_s * 1000)",
    "traffic_us": "bytes / (a_memory_gb_s * 880)",
    "slices_us": "2 * split * out_elements * 4 / (a_memory_gb_s * 1000) if split > 1 else 0",
    **{f"tile_{d}": f"max(1, k_tile_{d})" for d in "hw"},
    **{f"strip_{d}": f"p_{d} if {_DATA} else out_{d}" for d in "dhw"},
    "patch_tiles": "ceil_div(p_n * strip_d * strip_h * (ceil_div(strip_w, max(1, k_strip)) + 1), "
    "warps) if is_strips else p_n * line_d * ceil_div(line_h, tile_h) * ceil_div(line_w, tile_w)",
    "patch_fill": "1 if is_strips "
    "else p_n * line_d * line_h * line_w / (patch_tiles * tile_h * tile_w)",
    **{f"patch_{d}": f"(tile_{d} + (reach_{d} - 1) / p_stride_{d}) / tile_{d}" for d in "hw"},
    "patch_columns": f"ceil_div(p_k if {_WEIGHT} else p_g * result_c, "
    "k_channels if k_channels > 0 else block_result_c) "
    f"* ((p_z * p_y if is_strips else p_z) if {_WEIGHT} else 1)",
    "patch_blocks": "patch_tiles * patch_columns",
    # Tiles that a block walks over, and blocks side by side: slices of a filter's gradient.
    "patch_walk": "ceil_div(patch_tiles, max(1, slots // patch_columns)) if is_walking else 1",
    "patch_walkers": "ceil_div(patch_tiles, patch_walk)",
    "patch_rounds": "patch_walk * ceil_div(patch_columns * patch_walkers, slots)",
    "patch_round_fill": "patch_blocks / (patch_rounds * slots)",
    # Rims come from L2; the last round of blocks leaves memory idle, the less the more there are.
    "stream_layer_us": "max(traffic_us * (0.8 + 0.3 * patch_h * patch_w) "
    "* (1 + 0.5 * (1 / patch_round_fill - 1) / patch_rounds), "
    "flops * stream_waste / (patch_fill * peak_tflops * 500000))",
    "conv_us": "a_launch_us / 2 * (own_launches if is_ours else 1) + slices_us + "
    "(stream_layer_us if is_stream else max(chain_us, traffic_us))",
    # What cuDNN 9.19 was seen to take on an H200. Dense layers: waves of the best of its tiles, 64
    # channels of a tap a step, each of which takes its quarter of a microsecond however small; a
    # gradient of the filter is spread over the device. Channels that are no multiple of 8, and
    # lines, are copied before. Small groups take a multiple of one pass over the data, more so
    # with every tap. Uneven groups are copied, padded to 64 channels.
    "vendor_padding": "ceil_div(group_c, 64) * ceil_div(group_k, 64) * 4096 / (group_c * group_k)",
    "vendor_tiles_us": f"class_taps * ceil_div(source_c, 64) * min({_VENDOR_TILES})",
    "vendor_dense_us": "(2 + max(flops * vendor_padding / (peak_tflops * 650000), "
    f"1.2 * traffic_us) if {_WEIGHT} else max(vendor_tiles_us, 1.1 * traffic_us)) "
    "+ (8 + 3 * traffic_us if granule < 8 else 0) "
    "+ (8 + 5 * traffic_us if is_line and taps > 1 else 0)",
    "vendor_uneven_us": "25 + 3 * traffic_us "
    "+ flops * vendor_padding / (peak_tflops * (250000 if granule >= 8 else 70000))",
    "vendor_us": "a_launch_us + 1 + (traffic_us * (0.6 + 0.16 * taps) if is_depthwise_layer "
    "else vendor_uneven_us if is_uneven_layer "
    "else traffic_us * (4 if max(group_c, group_k) <= 16 else 3) if is_small_group_layer "
    "else vendor_dense_us)",
}
"""Estimates in microseconds; after the helpers of tiles, which they are made of."""

GPU_FEATURES = {
    "pixel_classes": "classes",
    "taps_per_class": "class_taps",
    "taps_of_most": "taps_d * taps_h * taps_w",
    "groups_in_tile": "groups_held if is_ours else merged",
    "zero_products": "groups_held - 1 if is_ours else 0",
    "padded_work": "tiles * steps * tile_volume * 2 / max(1, flops) if is_ours else 0",
    "padded_channels": "source_c / (ceil_div(source_c, tk) * tk) if is_ours else 0",
    "reduction_slices": "split if is_ours else 0",
    "launches": "own_launches if is_ours else 0",
    "tiles_before_slices": "own_tiles if is_ours else 0",
    "im2col_reads": "own_groups * ceil_div(own_cols, tn) * class_taps * classes / halo_taps "
    "if is_ours else 0",
    "halo_saves": "halo_taps",
    "image_fill_8": "out_h * out_w / (ceil_div(out_h, 8) * ceil_div(out_w, 8) * 64)",
    "image_fill_4": "out_h * out_w / (ceil_div(out_h, 4) * ceil_div(out_w, 16) * 64)",
    "row_fill_64": "out_w / (ceil_div(out_w, 64) * 64)",
    "channel_fill_64": "source_c / (ceil_div(source_c, 64) * 64)",
    "result_fill_64": "result_c / (ceil_div(result_c, 64) * 64)",
    "copies_16_bytes": "source_c * element_bytes % 16 == 0",
    "family_rate": "own_rate if is_ours else 0",
    "patch_filled": "patch_fill if is_stream else 0",
    "patch_reread": "patch_h * patch_w if is_stream else 0",
    "patch_round_filled": "patch_round_fill if is_wide else 0",
    "patch_rounds_of_blocks": "patch_rounds if is_wide else 0",
    "patch_blocks_in_all": "patch_blocks if is_wide else 0",
    "patch_blocks_of_slots": "patch_blocks / slots if is_wide else 0",
    "patch_partial_sums": "8 * patch_walkers * out_elements / max(1, bytes) "
    f"if is_wide and {_WEIGHT} else 0",
    "blocks_together": "together if is_ours else 0",
    "rounds_of_blocks": "rounds if is_ours else 0",
    "round_fill": "tiles / (rounds * units * together) if is_ours else 0",
    "chain_time_us": "chain_us if is_ours else 0",
    "traffic_time_us": "traffic_us",
    "slices_time_us": "slices_us if is_ours else 0",
    "conv_time_us": "conv_us if is_ours else 0",
    "vendor_time_us": "vendor_us",
    "vendor_to_traffic": "vendor_us / max(0.001, traffic_us) if is_gpu else 0",
    "padding_to_64": "vendor_padding if is_gpu else 0",
    "narrow_channels": "min(group_c, group_k) if is_gpu else 0",
    "wide_channels": "max(group_c, group_k) if is_gpu else 0",
    **{f"{name}_of_64": f"{name} if is_gpu else 0" for name in GRANULES},
    "conv_to_vendor": "conv_us / max(0.001, vendor_us) if is_ours else 0",
    "conv_to_traffic": "conv_us / max(0.001, traffic_us) if is_ours else 0",
    **{f"layer_{name.removeprefix('is_')}": f"{name} and is_gpu" for name in LAYER_CLASSES},
}
