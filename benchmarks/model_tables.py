#!/usr/bin/env python3
"""Tables of what whole_models.py timed, in Markdown: a line for each model, task, batch and mode.

usage: python benchmarks/model_tables.py ROWS.jsonl [SIDE]

ROWS is what `whole_models.py --out` wrote, SIDE one of its --sides (fused). A later row of a case
takes the place of an earlier one. The ratio is PyTorch's time over ours in the same mode, with its
spread from round to round; the first step counts patching and preparing. `apart` is the largest
difference of results over the largest result, and that of the first parameter's gradient by norms.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whole_models import rows_in

HEADS = (
    "model",
    "batch",
    "mode",
    "PyTorch ms",
    "tilewise ms",
    "ratio",
    "first step s",
    "memory GB",
)
MORE = ("apart", "served by tilewise")


def cells(row: Mapping[str, Any], side: str) -> list[str]:
    plain, ours = row["torch"], row["sides"][side]
    served = ours["served"]
    own = sum(count for by, count in served.items() if by.startswith("tilewise"))
    spread = f"{ours['ratio']:.3f} +-{100 * ours['spread']:.0f} %"
    return [
        *(f"{row['model']} {row['task']}", str(row["batch"]), row["mode"]),
        *(f"{plain['ms']:.2f}", f"{ours['ms']:.2f}", spread),
        f"{plain['first_s']:.1f} / {ours['first_s']:.1f}",
        f"{plain['memory_gb']:.2f} / {ours['memory_gb']:.2f}",
        f"{ours['apart']:.0e} / {ours['gradients_apart']:.0e}",
        f"{own} of {sum(served.values())}",
    ]


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    side = sys.argv[2] if len(sys.argv) == 3 else "fused"
    found = {
        (row["task"], row["batch"], row["model"], row["mode"]): row
        for row in rows_in(Path(sys.argv[1]))
        if side in row["sides"]
    }
    shown = [cells(row, side) for _, row in sorted(found.items())]
    for line in ((*HEADS, *MORE), ["---"] * len((*HEADS, *MORE)), *shown):
        print(f"| {' | '.join(line)} |")
    return 0 if shown else 2


if __name__ == "__main__":
    sys.exit(main())
