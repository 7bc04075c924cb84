"""Old model against new: whether the new one may replace it.

Mean and median may fall by half a percent, P10 by two, and no problem by more than ten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tilewise.errors import InputError
from tilewise.learn.dataset import Dataset
from tilewise.learn.evaluate import Evaluation, evaluate

RULES = {"mean": 0.5, "median": 0.5, "p10": 2.0}
MAX_DROP = 10.0


def compare(old: Path | str, new: Path | str, data: Dataset) -> dict[str, Any]:
    """Both models on the problems that both can be judged on, and the verdict by rule."""
    return compare_evaluations(evaluate(old, data), evaluate(new, data))


def compare_evaluations(old: Evaluation, new: Evaluation) -> dict[str, Any]:
    """The verdict on two evaluations of the same data."""
    before, after = _by_problem(old), _by_problem(new)
    common = sorted(set(before) & set(after))
    if not common:
        raise InputError("the models share no problem that both can be judged on")
    a = 100 * np.array([before[p] for p in common])
    b = 100 * np.array([after[p] for p in common])
    checks = []
    for name, allowed in RULES.items():
        was, now = _statistic(name, a), _statistic(name, b)
        checks.append(
            {
                "rule": f"{name} falls by at most {allowed} %",
                "old": round(was, 3),
                "new": round(now, 3),
                "passed": bool(now >= was * (1 - allowed / 100)),
            }
        )
    drop = np.where(a > 0, 100 * (1 - b / np.maximum(a, 1e-9)), 0.0)
    worst = int(np.argmax(drop))
    checks.append(
        {
            "rule": f"no problem falls by more than {MAX_DROP} %",
            "old": round(float(a[worst]), 3),
            "new": round(float(b[worst]), 3),
            "passed": bool(drop[worst] <= MAX_DROP),
        }
    )
    fallen = [i for i in np.argsort(-drop) if drop[i] > MAX_DROP]
    return {
        "problems": len(common),
        "passed": all(c["passed"] for c in checks),
        "checks": checks,
        "fallen": [
            {
                "problem": old.data.problems[common[i]].to_dict(),
                "old": round(float(a[i]), 2),
                "new": round(float(b[i]), 2),
            }
            for i in fallen[:10]
        ],
        "better": int(np.sum(b > a + 0.5)),
        "worse": int(np.sum(b < a - 0.5)),
    }


def _by_problem(evaluation: Evaluation) -> dict[int, float]:
    outcome = evaluation.outcome
    return {int(p): float(e) for p, e in zip(outcome.problems, outcome.efficiency, strict=True)}


def _statistic(name: str, values: Any) -> float:
    if name == "mean":
        return float(values.mean())
    return float(np.percentile(values, 50 if name == "median" else 10))
