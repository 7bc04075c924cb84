"""How good a ranking is: efficiency against the oracle, hits, NDCG and errors of times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.model import VENDOR_TIE
from tilewise.learn.dataset import Dataset
from tilewise.ops.contract import get_op

TOP = (1, 3, 5, 10)
_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a ranking did for every problem that could be judged."""

    problems: NDArray[np.int64]
    efficiency: Array
    """Speed of the first kernel over the fastest, 0 where the chosen one had failed."""
    chosen: NDArray[np.int64]
    """Row of the data set."""
    best: NDArray[np.int64]
    place: NDArray[np.int64]
    """Where the fastest kernel stands in the ranking, from 0."""
    ndcg: Array


def as_chosen(data: Dataset, score: Array) -> Array:
    """Scores as a dispatcher goes by them: of what ties the vendor's routine comes first."""
    result: Array = score + np.log2(1 + VENDOR_TIE) * data.is_vendor
    return result


def judge(data: Dataset, score: Array, rows: NDArray[np.bool_] | None = None) -> Judgement:
    """Ranks the measured kernels of problems by `score` and looks what became of it.

    Without `rows` every problem is judged that was measured as a whole.
    """
    use = data.is_whole[data.problem_index] if rows is None else rows
    chosen_rows = np.flatnonzero(use)
    order = chosen_rows[
        np.lexsort((chosen_rows, -score[chosen_rows], data.problem_index[chosen_rows]))
    ]
    is_first = np.r_[True, np.diff(data.problem_index[order]) != 0][: len(order)]
    starts: list[int] = np.flatnonzero(is_first).tolist()
    found: list[tuple[int, float, int, int, int, float]] = []
    for start, stop in pairwise([*starts, len(order)]):
        ranked = order[start:stop]
        time = data.time_us[ranked]
        if not np.isfinite(time).any():
            continue
        speed = np.where(np.isfinite(time), np.nanmin(time) / time, 0.0)
        place = int(np.argmax(speed))
        gain = np.exp2(speed * 5) - 1
        discount = 1 / np.log2(np.arange(len(speed)) + 2)
        ideal = float(np.sum(np.sort(gain)[::-1] * discount))
        found.append(
            (
                int(data.problem_index[ranked[0]]),
                float(speed[0]),
                int(ranked[0]),
                int(ranked[place]),
                place,
                float(np.sum(gain * discount)) / max(ideal, 1e-12),
            )
        )
    columns = list(zip(*found, strict=True)) if found else [()] * 6
    return Judgement(
        np.array(columns[0], np.int64),
        np.array(columns[1], np.float64),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        np.array(columns[4], np.int64),
        np.array(columns[5], np.float64),
    )


def summary(outcome: Judgement) -> dict[str, Any]:
    """Efficiency in percent with bootstrap intervals over problems, hits and NDCG."""
    e = 100 * outcome.efficiency
    if not len(e):
        return {"problems": 0}
    statistics: dict[str, Callable[[Array], Any]] = {
        "mean": lambda v: v.mean(axis=-1),
        "median": lambda v: np.percentile(v, 50, axis=-1),
        "p10": lambda v: np.percentile(v, 10, axis=-1),
        "p1": lambda v: np.percentile(v, 1, axis=-1),
    }
    draws = e[np.random.default_rng(0).integers(0, len(e), (_DRAWS, len(e)))]
    result: dict[str, Any] = {"problems": len(e)}
    for name, statistic in statistics.items():
        result[name] = round(float(statistic(e)), 3)
        low, high = np.percentile(statistic(draws), [2.5, 97.5])
        result[f"{name}_interval"] = [round(float(low), 3), round(float(high), 3)]
    result["min"] = round(float(e.min()), 3)
    for k in TOP:
        result[f"top{k}"] = round(100 * float(np.mean(outcome.place < k)), 2)
    result["ndcg"] = round(float(outcome.ndcg.mean()), 5)
    return result


def errors(predicted_log2: Array, actual_log2: Array) -> dict[str, float]:
    """R2, RMSE and MAE of predicted octaves."""
    gap = predicted_log2 - actual_log2
    total = float(np.sum((actual_log2 - actual_log2.mean()) ** 2))
    return {
        "r2": round(1 - float(np.sum(gap**2)) / max(total, 1e-12), 5),
        "rmse_octaves": round(float(np.sqrt(np.mean(gap**2))), 5),
        "mae_octaves": round(float(np.mean(np.abs(gap))), 5),
    }


def analytic_us(data: Dataset) -> Array:
    """What the analytic model says about every row, without any training."""
    features = get_op(data.op).features
    return features.evaluate(data.rows(features), ["analytic_us"])["analytic_us"]
