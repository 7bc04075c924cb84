"""The scorer's C++ source: generated features, then the headers that use them."""

from __future__ import annotations

from pathlib import Path

from tilewise.core.compile_expr import C_PRELUDE
from tilewise.selection.codegen import BLOCK, Layout

INCLUDE = Path(__file__).parent / "include"


def scorer_source(layout: Layout) -> str:
    """The whole translation unit of a model; its headers are in `INCLUDE`."""
    sizes = {
        "BLOCK": BLOCK,
        "VALUES": len(layout.problem_values),
        "MIXED": len(layout.mixed_outputs),
        "KERNEL_VALUES": len(layout.kernel_values),
        "ROWS": max(1, layout.most_columns),
    }
    head = "#define TW_RESTRICT __restrict__\n"
    head += "".join(f"#define TW_{name} {size}\n" for name, size in sizes.items())
    features = layout.problem_source() + layout.mixed_source()
    return head + C_PRELUDE + features + '#include "scorer.hpp"\n'
