#!/usr/bin/env python3
"""Tables of what gpu_vs_vendor.py measured of convolutions, in Markdown: by class and by family.

usage: python benchmarks/vendor_tables.py ROWS.jsonl

ROWS is what `gpu_vs_vendor.py --out` wrote. Ratios are the vendor's time over ours: geometric mean,
worst and count. `pool` is the fastest kernel of ours, `selected` what the shipped model picks with
the vendor among the candidates, `share` the least time by the device's ceilings (its memory, its
matrix units) over the time of our fastest, as a geometric mean, and how many layers each ceiling
bounds. A family has the layers on which one of its kernels was among those timed in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conv_contest import COPY_TBS, PRODUCT_TFLOPS, geomean, least_us
from gpu_vs_vendor import Row, rows_in

from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem

BELOW = 0.95


def problem_of(row: Row) -> ConvProblem:
    return ConvProblem.from_dict(row.problem)


def is_bound_by_memory(row: Row) -> bool:
    p = problem_of(row)
    return p.bytes / COPY_TBS > p.flops / PRODUCT_TFLOPS


def ratios(values: Sequence[float]) -> str:
    return f"{geomean(values):.2f} ({min(values):.2f}, {len(values)})" if values else "-"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def by_class(rows: Sequence[Row]) -> list[str]:
    """Of each class of layers, the sums of all in the end."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.shape_class, []).append(row)
    shown = []
    for name, members in (*groups.items(), ("all", rows)):
        picked = [row.selected_ratio for row in members if row.selected_ratio is not None]
        behind = sum(ratio < BELOW for ratio in picked)
        memory = sum(map(is_bound_by_memory, members))
        shares = geomean([row.roofline for row in members if row.roofline])
        bounds = f"{memory} / {len(members) - memory}"
        cells = [ratios([row.ratio for row in members]), ratios(picked), str(behind)]
        shown.append([name, *cells, f"{100 * shares:.0f} %", bounds])
    heads = ["class", "pool", "selected", f"below {BELOW}", "share", "memory / matrix units"]
    return table(heads, shown)


def by_family(rows: Sequence[Row]) -> list[str]:
    """Of each family of kernels, by its fastest kernel on each layer."""
    found: dict[str, list[tuple[Row, float]]] = {}
    wins: dict[str, int] = {}
    for row in rows:
        best: dict[str, float] = {}
        for name, us in row.final_us.items():
            kernel: Any = get_op(row.op).kernel_from_name(name)
            if kernel.engine != "vendor":
                best[kernel.family] = min(us, best.get(kernel.family, us))
        for family, us in best.items():
            found.setdefault(family, []).append((row, us))
        first = min(best, key=best.__getitem__, default="")
        wins[first] = wins.get(first, 0) + 1
    shown = []
    for family, members in sorted(found.items(), key=lambda entry: -wins.get(entry[0], 0)):
        share = geomean([least_us(problem_of(row)) / us for row, us in members])
        beside = ratios([row.vendor_us / us for row, us in members])
        shown.append([family, str(wins.get(family, 0)), beside, f"{100 * share:.0f} %"])
    return table(["family", "fastest on", "over the vendor", "share"], shown)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    rows = [row for row in rows_in(Path(sys.argv[1])) if row.op != "gemm"]
    latest = {(row.op, str(row.problem)): row for row in rows}
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in latest.values() if row.op == op]
        print("\n".join([f"## {op}", "", *by_class(own), "", *by_family(own), ""]))
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
