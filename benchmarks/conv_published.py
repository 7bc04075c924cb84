#!/usr/bin/env python3
"""Published convolutions of a GPU beside its vendor's routine, class by class: the pool and what
a model chooses on problems that it never saw.

usage: python benchmarks/conv_published.py [OP ...] [--data datasets/h200]
                                           [--models src/tilewise/models] [--json]

Nothing is measured: times are those of the stores, choices those out of fold that training leaves
beside a model (`python benchmarks/train_models.py sm_90_conv_fwd` writes them again). The vendor's
routine is among the candidates, and taken where it is predicted level. A share of the roofline is
the time at the device's peaks, every tensor moved once, over that of the best kernel of ours.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tilewise.core.arch import Arch, load_arch
from tilewise.core.model import VENDOR_TIE
from tilewise.learn.dataset import Dataset, from_stores

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
H200 = load_arch("sm_90", "H200")


def class_of(problem: Any) -> str:
    if problem.is_depthwise:
        return "depthwise"
    if problem.g > 1:
        return (
            "groups of 32 channels and fewer" if problem.c // problem.g <= 32 else "larger groups"
        )
    if problem.ndim != 2:
        return f"{problem.ndim}-D"
    return "1x1" if problem.taps == 1 else "dense, 2-D"


def least_us(problem: Any, arch: Arch) -> float:
    """What the problem takes at the device's peaks."""
    return 1e6 * max(
        problem.flops / (arch.peak_tflops[problem.dtype] * 1e12),
        problem.bytes / (arch.memory_gb_s * 1e9),
    )


def predictions(folder: Path) -> dict[tuple[str, str], float]:
    """Problem key and kernel name -> predicted time, out of fold."""
    rows = pq.read_table(folder / "oof.parquet").to_pylist()
    return {(row["problem"], row["kernel"]): row["predicted_us"] for row in rows}


def rows_of(data: Dataset, predicted: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """One row for each problem that the vendor's routine serves, too."""
    found = []
    for index, problem in enumerate(data.problems):
        at = np.flatnonzero((data.problem_index == index) & data.is_ok)
        kernels = [data.kernels[k] for k in data.kernel_index[at]]
        times = {k.name: float(t) for k, t in zip(kernels, data.time_us[at], strict=True)}
        vendor = next((k.name for k in kernels if k.engine == "vendor"), None)
        own = [name for name in times if name != vendor]
        told = {name: predicted[problem.key, name] for name in times}
        if vendor is None or not own:
            continue
        chosen = min(told, key=lambda name: told[name])
        if told[vendor] <= told[chosen] * (1 + VENDOR_TIE):
            chosen = vendor
        best = min(times[name] for name in own)
        found.append(
            {
                "class": class_of(problem),
                "dtype": problem.dtype,
                "pool": times[vendor] / best,
                "selected": times[vendor] / times[chosen],
                "perfect": times[vendor] / min(times.values()),
                "roofline": least_us(problem, H200) / best,
            }
        )
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = {
        name: {
            "geomean": round(geometric_mean([row[name] for row in rows]), 3),
            "worst": round(min(row[name] for row in rows), 3),
        }
        for name in ("pool", "selected", "perfect")
    }
    slower = fmean(row["selected"] < 0.95 for row in rows)
    roofline = round(fmean(row["roofline"] for row in rows), 2)
    return {**ratios, "below_0.95": round(slower, 3), "roofline": roofline, "problems": len(rows)}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_class: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_class[row["class"]].append(row)
    return {name: summary(by_class[name]) for name in sorted(by_class)} | {"all": summary(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", default=OPS, metavar="OP")
    parser.add_argument("--data", type=Path, default=Path("datasets/h200"))
    parser.add_argument("--models", type=Path, default=Path("src/tilewise/models"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {}
    for op in args.ops:
        data = from_stores([args.data / op], op=op, arch=H200)
        found[op] = table(rows_of(data, predictions(args.models / f"sm_90_{op}")))
    if args.json:
        print(json.dumps(found))
        return
    for op, classes in found.items():
        print(f"\n{op}: class, problems, pool, selected (worst), perfect, below 0.95, roofline")
        for name, row in classes.items():
            print(
                f"  {name:32} {row['problems']:4} {row['pool']['geomean']:6.2f} "
                f"{row['selected']['geomean']:6.2f} ({row['selected']['worst']:.2f}) "
                f"{row['perfect']['geomean']:6.2f} {row['below_0.95']:6.2f} {row['roofline']:6.2f}"
            )


if __name__ == "__main__":
    main()
