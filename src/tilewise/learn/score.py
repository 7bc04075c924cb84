"""How good a ranking is: efficiency against the oracle, hits, NDCG, and the ceiling of noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.learn.dataset import Dataset

TOP = (1, 3, 5, 10)
_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
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


def judge(data: Dataset, score: Array, rows: NDArray[np.bool_] | None = None) -> Outcome:
    """Ranks every problem's measured kernels by `score` and looks what became of it."""
    use = np.ones(len(data), bool) if rows is None else rows
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
    return Outcome(
        np.array(columns[0], np.int64),
        np.array(columns[1], np.float64),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        np.array(columns[4], np.int64),
        np.array(columns[5], np.float64),
    )


def summary(outcome: Outcome, *, seed: int = 0) -> dict[str, Any]:
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
    draws = e[np.random.default_rng(seed).integers(0, len(e), (_DRAWS, len(e)))]
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


def noise_ceiling(data: Dataset, *, seed: int = 0, draws: int = 200) -> dict[str, float] | None:
    """What a second measurement of the oracle itself would score; None without spreads.

    Times are drawn anew from the error of their medians; the kernel that then looks fastest is
    judged by the recorded times, as a selection would be.
    """
    ok = data.is_ok & np.isfinite(data.spread_us) & (data.repeats > 1)
    if ok.sum() < 0.5 * data.is_ok.sum():
        return None
    # The standard error of a median of n values with an interquartile range r: 1.253 r / 1.349 n^.5
    error = np.where(ok, 0.929 * data.spread_us / np.sqrt(np.maximum(data.repeats, 1)), 0.0)
    random = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        again = data.time_us + error * random.standard_normal(len(data))
        found.append(judge(data, np.where(data.is_ok, -again, -np.inf)).efficiency)
    e = 100 * np.array(found)
    return {
        "mean": round(float(e.mean()), 3),
        "median": round(float(np.percentile(e, 50)), 3),
        "p10": round(float(np.percentile(e, 10)), 3),
    }


def errors(predicted_log2: Array, actual_log2: Array) -> dict[str, float]:
    """R2, RMSE and MAE of predicted octaves."""
    gap = predicted_log2 - actual_log2
    total = float(np.sum((actual_log2 - actual_log2.mean()) ** 2))
    return {
        "r2": round(1 - float(np.sum(gap**2)) / max(total, 1e-12), 5),
        "rmse_octaves": round(float(np.sqrt(np.mean(gap**2))), 5),
        "mae_octaves": round(float(np.mean(np.abs(gap))), 5),
    }


def slices(data: Dataset, outcome: Outcome) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean, P10 and count by what problems and choices are alike in."""
    keys: dict[str, list[str]] = {name: [] for name in _SLICES}
    for problem, row in zip(outcome.problems, outcome.chosen, strict=True):
        kernel = data.kernels[data.kernel_index[row]]
        for name, key in _SLICES.items():
            keys[name].append(key(data.problems[problem], kernel, data.labels[problem]))
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, values in keys.items():
        groups = sorted(set(values))
        if len(groups) < 2:
            continue
        labels = np.array(values)
        result[name] = {g: _brief(100 * outcome.efficiency[labels == g]) for g in groups}
    return result


def _brief(e: Array) -> dict[str, Any]:
    return {
        "problems": len(e),
        "mean": round(float(e.mean()), 2),
        "p10": round(float(np.percentile(e, 10)), 2),
        "min": round(float(e.min()), 2),
    }


def _band(value: float, bounds: Sequence[int]) -> str:
    below = 0
    for bound in bounds:
        if value < bound:
            return f"{below:>6}-{bound - 1}"
        below = bound
    return f"{below:>6}+"


_SLICES: dict[str, Callable[[Any, Any, Mapping[str, Any]], str]] = {
    "m": lambda p, k, _: _band(p.gemm.m, (32, 256, 4096)),
    "n": lambda p, k, _: _band(p.gemm.n, (32, 256, 4096)),
    "k": lambda p, k, _: _band(p.gemm.k, (64, 512, 4096)),
    "groups": lambda p, k, _: _band(p.gemm.groups, (2, 16, 128)),
    "layout": lambda p, k, _: p.layout,
    "dtype": lambda p, k, _: p.dtype,
    "filter": lambda p, k, _: f"{p.z}x{p.y}x{p.x}" if hasattr(p, "taps") else "-",
    "stride": lambda p, k, _: (
        str(max(p.stride_d, p.stride_h, p.stride_w)) if hasattr(p, "taps") else "-"
    ),
    "engine": lambda p, k, _: k.engine,
    "pipeline": lambda p, k, _: str(getattr(k, "pipeline", getattr(k, "family", "-"))),
    "network": lambda p, k, labels: str(labels.get("network", "-")),
    "source": lambda p, k, labels: str(labels.get("source", "-")),
    "family": lambda p, k, labels: str(labels.get("family", "-")),
}


def worst(data: Dataset, outcome: Outcome, count: int = 10) -> list[dict[str, Any]]:
    """The problems that were chosen worst for, with what was chosen and what was best."""
    shown = []
    for i in np.argsort(outcome.efficiency, kind="stable")[:count]:
        chosen, best = outcome.chosen[i], outcome.best[i]
        shown.append(
            {
                "problem": data.problems[outcome.problems[i]].to_dict(),
                "efficiency": round(100 * float(outcome.efficiency[i]), 2),
                "chosen": data.kernels[data.kernel_index[chosen]].name,
                "chosen_us": _number(data.time_us[chosen]),
                "best": data.kernels[data.kernel_index[best]].name,
                "best_us": _number(data.time_us[best]),
                "place_of_best": int(outcome.place[i]) + 1,
            }
        )
    return shown


def _number(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None
