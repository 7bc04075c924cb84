"""The noise ceiling: what a second measurement of the oracle itself would score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.core.compile_expr import Array
from tilewise.learn.dataset import Dataset
from tilewise.learn.readings import SECOND_CONTESTS
from tilewise.learn.score import judge

_ENOUGH = 0.5
"""The share of rows with a spread, or of problems measured again, that a ceiling needs."""


def noise_ceiling(data: Dataset, *, draws: int = 200) -> dict[str, Any] | None:
    """The better founded of both estimates, and both; None where nothing is known of the noise."""
    found = {"remeasured": remeasured(data), "drawn": drawn(data, draws)}
    for how, numbers in found.items():
        if numbers is not None:
            return {"how": how, **numbers, **found}
    return None


def remeasured(data: Dataset) -> dict[str, float] | None:
    """The kernel that was fastest when first read, judged by how all did when read again.

    Sweeps read every kernel once and those near the best again, in turn; only readings that were
    taken together are compared. A winner that was too far ahead to be in doubt counts as found,
    unless only a sample of the problems was read again, which tells nothing of the others.
    """
    if data.first_us is None or data.again_us is None:
        return None
    twice = np.isfinite(data.first_us) & np.isfinite(data.again_us) & data.is_ok
    problems = len(np.unique(data.problem_index[data.is_ok]))
    found = len(np.unique(data.problem_index[twice]))
    is_sample = found < _ENOUGH * problems
    if is_sample and found < SECOND_CONTESTS:
        return None
    again = replace(data, time_us=np.where(twice, data.again_us, np.nan))
    outcome = judge(again, np.where(twice, -data.first_us, -np.inf))
    clear = np.ones(0 if is_sample else problems - found)
    return {**_numbers(np.r_[outcome.efficiency, clear]), "problems": len(outcome.problems)}


def drawn(data: Dataset, draws: int) -> dict[str, float] | None:
    """The kernel that looks fastest when times are drawn anew, judged by those recorded.

    Two readings of one median differ by the square root of two times the error of each.
    """
    ok = data.is_ok & np.isfinite(data.spread_us) & (data.repeats > 1)
    if not ok.any() or ok.sum() < _ENOUGH * data.is_ok.sum():
        return None
    # The standard error of a median of n values with an interquartile range r: 1.253 r / 1.349 n^.5
    error = np.where(ok, 0.929 * data.spread_us / np.sqrt(np.maximum(data.repeats, 1)), 0.0)
    random = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        again = data.time_us + np.sqrt(2) * error * random.standard_normal(len(data))
        found.append(judge(data, np.where(data.is_ok, -again, -np.inf)).efficiency)
    return _numbers(np.array(found))


def _numbers(efficiency: Array) -> dict[str, float]:
    e = 100 * efficiency
    return {
        "mean": round(float(e.mean()), 3),
        "median": round(float(np.percentile(e, 50)), 3),
        "p10": round(float(np.percentile(e, 10)), 3),
        "p1": round(float(np.percentile(e, 1)), 3),
        "min": round(float(e.min()), 3),
    }
