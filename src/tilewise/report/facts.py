"""What a report tells, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.measurement import STATUSES
from tilewise.core.model import Model
from tilewise.data.store import Store
from tilewise.learn.dataset import Dataset
from tilewise.problems.coverage import Coverage, coverage
from tilewise.report.choices import Judged

MOST_POINTS = 3000
"""Points of a plot; more would be slow on a phone and tell no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One problem's fastest reading, for the roofline."""

    problem: int
    intensity: float
    tflops: float
    kernel: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that a page shows."""

    stores: tuple[str, ...]
    data: Dataset
    arch: Arch
    readings: int
    failures: dict[str, dict[str, int]]
    """Engine -> status -> how often, failures alone."""
    coverage: Coverage
    points: list[Point]
    kernels: list[dict[str, Any]]
    model: Model | None = None
    choices: Judged | None = None
    importances: dict[str, float] | None = None
    vendor: VendorShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorShare:
    """How the vendor's own routine does, on the problems that it was measured on."""

    problems: int
    won: int
    mean: float
    """Of the fastest kernel's speed, 1 being all of it."""


def vendor_share(data: Dataset) -> VendorShare | None:
    """How near the fastest kernel the vendor's routine is; None where it never ran."""
    share = (data.best_us / data.vendor_us)[np.isfinite(data.vendor_us) & data.is_whole]
    if not len(share):
        return None
    return VendorShare(problems=len(share), won=int((share >= 1).sum()), mean=float(share.mean()))


def failures(stores: Sequence[Path], op: str) -> tuple[int, dict[str, dict[str, int]]]:
    """How many readings of an op stores hold, and its failures by engine and kind."""
    readings, counts = 0, Counter[tuple[str, str]]()
    for store in stores:
        names = ["op", "engine", "status"]
        grouped = Store(store).table(names, latest=False).group_by(names)
        for row in grouped.aggregate([([], "count_all")]).to_pylist():
            if row["op"] == op:
                readings += row["count_all"]
                counts[row["engine"], row["status"]] += row["count_all"]
    found: dict[str, dict[str, int]] = {}
    for (engine, status), count in sorted(counts.items()):
        if status != "ok" and status in STATUSES:
            found.setdefault(engine, {})[status] = count
    return readings, found


def fastest(data: Dataset) -> list[Point]:
    """The fastest reading of each problem; of many problems as many as a plot can show."""
    order = np.lexsort((data.time_us, data.problem_index))
    order = order[data.is_ok[order]]
    first = order[np.r_[True, np.diff(data.problem_index[order]) != 0][: len(order)]]
    step = -(-len(first) // MOST_POINTS)
    return [
        Point(
            problem=int(data.problem_index[row]),
            intensity=float(data.problems[data.problem_index[row]].intensity),
            tflops=float(data.tflops[row]),
            kernel=data.kernels[data.kernel_index[row]].name,
            engine=data.kernels[data.kernel_index[row]].engine,
        )
        for row in first[:: max(1, step)]
    ]


def by_kernel(data: Dataset) -> list[dict[str, Any]]:
    """Each kernel: on how many problems it was tried, failed, won, and how near the best it is."""
    speed = data.best_us[data.problem_index] / data.time_us
    found = []
    for at, kernel in enumerate(data.kernels):
        rows = data.kernel_index == at
        own = speed[rows & data.is_ok]
        found.append(
            {
                "kernel": kernel.name,
                "engine": kernel.engine,
                "problems": int(rows.sum()),
                "failed": int((rows & ~data.is_ok).sum()),
                "won": int((own >= 1.0).sum()),
                "of the best, %": round(100 * float(own.mean()), 1) if len(own) else None,
            }
        )
    return sorted(found, key=lambda row: -row["won"])


def gather(
    stores: Sequence[Path],
    data: Dataset,
    model: Model | None,
    chosen: Judged | None,
    importances: dict[str, float] | None,
) -> Facts:
    """The facts about data and, where there is one, the model that chooses by it."""
    readings, failed = failures(stores, data.op)
    return Facts(
        stores=tuple(str(store) for store in stores),
        data=data,
        arch=data.arch,
        readings=readings,
        failures=failed,
        coverage=coverage(data.problems),
        points=fastest(data),
        kernels=by_kernel(data),
        model=model,
        choices=chosen,
        importances=importances,
        vendor=vendor_share(data),
    )
