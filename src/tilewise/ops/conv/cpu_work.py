"""What a CPU convolution kernel does for a problem, counted as its loops run.

Tiles reach over the ends of rows, blocks and images; families differ in which of these ends they
meet. The counts go into `rows`, `cols`, `steps`, `copied` and `passes`, which the analytic model is
made of, so that its estimates hold for shapes that nobody has measured.
"""

from __future__ import annotations

_IS_CPU = 'k_engine == "cpu"'
_FWD, _DATA, _WEIGHT = (f'p_direction == "{name}"' for name in ("fwd", "bwd_data", "bwd_weight"))

CPU_HELPERS = {
    # Backward, the pixels of an image fall into as many views as there are strides.
    **{
        f"lines_{d}": f"ceil_div(p_{d}, p_stride_{d}) if {_DATA} else max(1, out_{d})"
        for d in ("d", "h", "w")
    },
    "views": f"p_stride_d * p_stride_h * p_stride_w if {_DATA} else 1",
    "view_images": "p_n * views * lines_d",
    # A padded copy of some rows: how far taps reach beyond them, and planes by remainder of stride.
    "span_h": "((p_y - 1) * p_dilation_h) // p_stride_h",
    "span_w": "((p_x - 1) * p_dilation_w) // p_stride_w",
    "pitch": "lines_w + span_w",
    "planes": f"p_z if {_DATA} else p_z * min(p_stride_h, p_y) * min(p_stride_w, p_x)",
    "is_whole_image": 'k_family == "depthwise"',
    "block_rows": "lines_h if is_whole_image else max(1, min(lines_h, k_block // lines_w))",
    "cuts": "ceil_div(lines_h, block_rows)",
    "last_rows": "lines_h - (cuts - 1) * block_rows",
    "plane_floats": "view_images * cuts * (block_rows + span_h) * pitch * planes",
    "sources": f"p_k if {_DATA} else p_c",
    # Panels of pixels per family, and the pixels that they have room for.
    "run_panels": "ceil_div((block_rows - 1) * pitch + lines_w, tm)",
    "last_panels": "ceil_div((last_rows - 1) * pitch + lines_w, tm)",
    "direct_rows": "view_images * ((cuts - 1) * run_panels + last_panels) * tm",
    "image_rows": "p_n * views * ceil_div(lines_d * lines_h * lines_w, tm) * tm",
    "flat_rows": "views * ceil_div(p_n * lines_d * lines_h * lines_w, tm) * tm",
    "merged_rows": "view_images * lines_h * ceil_div(lines_w, tm) * tm",
    "is_square_filter": "p_y == k_kc and p_x == k_kc and p_z == 1 and p_stride_h == 1 "
    "and p_stride_w == 1 and p_dilation_h == 1 and p_dilation_w == 1",
    "square_rows": "view_images * ceil_div(lines_h, max(1, k_mr)) * max(1, k_mr) "
    "* ceil_div(lines_w, max(1, k_lanes)) * max(1, k_lanes)",
    "pixel_rows": 'direct_rows if k_family == "direct" else merged_rows if k_family == "merged" '
    'else image_rows if k_family == "pointwise" and p_layout == "nchw" '
    'else flat_rows if k_family == "implicit" or k_family == "pointwise" '
    "else square_rows if is_square_filter else direct_rows",
    # The gradient of the filter: by products of channels tap by tap, or by dots along pixels.
    "is_dot": f'{_WEIGHT} and k_vector == "pixel"',
    "weight_rows": "group_c * ceil_div(taps, max(1, k_nv)) * tm if is_dot else "
    'p_k if k_family == "merged" else group_k',
    "weight_cols": 'group_k if is_dot else gn if k_family == "merged" else '
    "ceil_div(group_c, tn) * tn * taps",
    "dot_pixels": "view_images * cuts * ceil_div((block_rows - 1) * pitch + lines_w, "
    "max(1, k_lanes)) * max(1, k_lanes)",
    "slabs": "max(1, k_block // max(1, lines_h * lines_w)) if cuts == 1 else 1",
    "pixel_blocks": "ceil_div(view_images * cuts, slabs)",
    "is_merged": 'k_family == "merged"',
    # Sums that do not fit their cache are done in parts, each with copies of its own.
    "panels_x": "ceil_div(group_c, tn)",
    "panels_y": "ceil_div(group_k, tm)",
    "sums_bytes": "taps * panels_y * tm * tn * 4",
    "is_parted": 'k_split == "channels" and k_family == "direct" and not is_dot',
    "parts_x": "min(panels_x, ceil_div(panels_x * sums_bytes, 393216)) if is_parted else 1",
    "parts_y": "min(panels_y, ceil_div(sums_bytes, 786432)) "
    "if is_parted and parts_x == panels_x else 1",
    # Another loop serves what the usual one cannot: sources spread over lanes, filters of another
    # size, and images read in place of which every channel begins on a page of its own.
    "is_other_loop": "group_c * group_k > 1 if is_merged else not is_square_filter "
    'if is_whole_image else k_family == "pointwise" and p_layout == "nchw" '
    "and lines_d * lines_h * lines_w >= 1024",
    "cpu_rows": f"weight_rows if {_WEIGHT} else pixel_rows",
    "cpu_cols": f"weight_cols if {_WEIGHT} else groups * gn if is_merged else gn",
    "cpu_steps": "(dot_pixels if is_dot else gk) / tk",
    "cpu_passes": f"pixel_blocks if {_WEIGHT} else 1 if k_kc < 1 or is_merged or is_whole_image "
    'else ceil_div(ceil_div(sources, groups), k_kc) if k_family == "direct" '
    "else ceil_div(gk, k_kc)",
    "cpu_copied": "filter_elements + (plane_floats * p_c * parts_y + "
    f"(dot_pixels if is_dot else out_pixels) * p_k * parts_x if {_WEIGHT} else "
    'groups * gm * gk if k_family == "implicit" else '
    '0 if k_family == "pointwise" else plane_floats * sources)',
}
"""Counts of CPU kernels; they mean nothing for others."""

CPU_FEATURES = {
    "pixels_padded": f"cpu_rows / max(1, gm) if {_IS_CPU} else 0",
    "columns_padded": f"cpu_cols / max(1, gn) if {_IS_CPU} else 0",
    "reduction_passes": f"cpu_passes if {_IS_CPU} else 0",
    "is_filter_held": f'is_square_filter if {_IS_CPU} and k_family == "depthwise" else 0',
    "rows_per_block": f"block_rows if {_IS_CPU} else 0",
    "copy_per_mac": f"cpu_copied / max(1, flops) if {_IS_CPU} else 0",
    "image_block_kib": "(block_rows + span_h) * pitch * planes * min(max(1, k_kc), sources) / 256 "
    f"if {_IS_CPU} else 0",
    "filter_panel_kib": f"gk * tn / 256 if {_IS_CPU} else 0",
    "sums_kib": f"weight_rows * weight_cols / 256 if {_IS_CPU} and {_WEIGHT} else 0",
}
