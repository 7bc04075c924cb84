"""What a CPU kernel of a matrix product has to do, in cycles of its register tiles.

Loops run as in include/: whole tiles, then at the borders the smallest tile that covers what is
left; thin products always take the whole height. What is loaded and stored is not counted.
"""

from __future__ import annotations


def _step(rows: str, vectors: str) -> str:
    """Cycles of a register tile's step: two FMAs or loads each, and four until a sum is back."""
    return f"max({rows} * {vectors} / 2, ({rows} + {vectors}) / 2, 4)"


CPU_HELPERS = {
    "slots_k": 'ceil_div(p_k, 2) if p_dtype == "int8" else p_k',  # int8 goes by pairs
    "lanes": '16 if k_isa == "avx512" else 8',
    "mr": "max(1, k_mr)",
    "nr": "max(1, k_nr)",
    "tile_v": "nr / lanes",
    "left_r": "rows % mr",
    "edge_v": "ceil_div(cols % nr, lanes)",
    # Tiles at the border are the smallest of four heights that covers what is left.
    "edge_r": "0 if left_r == 0 else (mr + 3) // 4 if left_r <= (mr + 3) // 4 else "
    "(mr + 1) // 2 if left_r <= (mr + 1) // 2 else "
    "(3 * mr + 3) // 4 if left_r <= (3 * mr + 3) // 4 else mr",
    "row_cycles": f"cols // nr * {_step('mr', 'tile_v')} + "
    f"({_step('mr', 'edge_v')} if edge_v > 0 else 0)",
    "edge_cycles": f"(cols // nr * {_step('edge_r', 'tile_v')} + "
    f"({_step('edge_r', 'edge_v')} if edge_v > 0 else 0)) if edge_r > 0 else 0",
    "dot_cycles": f"ceil_div(rows, mr) * ceil_div(cols, nr) * "
    f"(ceil_div(slots_k, lanes) * {_step('mr', 'nr')} + 3 * mr * nr)",
    "tile_cycles": "ceil_div(rows, mr) * row_cycles if is_thin else "
    "rows // mr * row_cycles + edge_cycles",
    "cpu_cycles": 'p_batch * (dot_cycles if k_access == "dot" else tile_cycles * slots_k)',
}
"""Counts of CPU kernels; they mean nothing for others."""
