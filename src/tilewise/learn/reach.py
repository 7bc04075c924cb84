"""How far from measured problems a model may be asked: as far as unseen ones were chosen well for.

Ordinary folds leave near neighbours in the training set and say nothing about distance. So whole
regions of problems are left out as well, and efficiency is looked at by distance to what remained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.identity import canonical_json
from tilewise.core.model import Measured
from tilewise.core.telling import Tell, silent
from tilewise.learn.cross import CrossValidated
from tilewise.learn.dataset import Dataset
from tilewise.learn.fit import Trainer
from tilewise.learn.params import Params
from tilewise.learn.score import Judgement, analytic_us, judge

BAND = 0.5
"""Octaves; evidence is looked at in bands this wide."""
LEAST, MOST = 1.0, 4.0
"""Octaves; the reach is never taken to be less or more."""
MARGIN = 3.0
"""Percent of mean efficiency: within reach it falls no further below that of near problems, or is
above that of the analytic model, which ranks what is out of reach."""
MIN_EVIDENCE = 8
"""Problems that a band needs; with fewer it is joined with the next."""
_REGIONS = 6
_TREES = 80


def axes_of(trainer: Trainer) -> tuple[str, ...]:
    """Helpers that give a problem's coordinates, in octaves."""
    return tuple(n for n in trainer.features.helpers if n.startswith("at_"))


def coordinates(trainer: Trainer) -> Array:
    """Where every problem lies."""
    data, axes = trainer.data, axes_of(trainer)
    first = np.zeros(len(data), bool)
    first[np.unique(data.problem_index, return_index=True)[1]] = True
    one_each = data.keep(first)
    found = trainer.features.evaluate(one_each.rows(trainer.features), axes)
    points = np.zeros((len(data.problems), len(axes)))
    points[one_each.problem_index] = np.column_stack([found[a] for a in axes])
    return points


def measured(
    trainer: Trainer, params: Params, cross: CrossValidated, tell: Tell = silent
) -> tuple[Measured, list[dict[str, Any]]]:
    """The problems behind a model with its reach, and the evidence for that by distance."""
    data, points = trainer.data, coordinates(trainer)
    efficiency = _by_problem(data, judge(data, cross.score, cross.rows))
    near = nearest_outside(points, cross.fold, np.isfinite(efficiency))
    evidence = [(near, efficiency)]
    if len(data.problems) >= 4 * _REGIONS:
        tell("reach")
        region = regions(points, _REGIONS)
        evidence.append(_left_out(trainer, params, region, points))
    analytic = _by_problem(data, judge(data, -analytic_us(data)))
    bands = by_distance(
        np.concatenate([d for d, _ in evidence]),
        np.concatenate([e for _, e in evidence]),
        np.concatenate([analytic] * len(evidence)),
    )
    own = data.is_own
    problems = tuple(canonical_json(data.problems[i].to_dict()) for i in np.flatnonzero(own))
    where = Measured(axes_of(trainer), points[own], efficiency[own], reach(bands), problems)
    return where, bands


def _by_problem(data: Dataset, outcome: Judgement) -> Array:
    """The efficiency of every problem, NaN where it was not judged."""
    efficiency = np.full(len(data.problems), np.nan)
    efficiency[outcome.problems] = outcome.efficiency
    return efficiency


def regions(points: Array, count: int) -> NDArray[np.int64]:
    """Problems by the nearest of some that lie far from each other."""
    chosen = [int(np.argmin(points.sum(axis=1)))]
    far = np.linalg.norm(points - points[chosen[0]], axis=1)
    while len(chosen) < count:
        chosen.append(int(np.argmax(far)))
        far = np.minimum(far, np.linalg.norm(points - points[chosen[-1]], axis=1))
    distance = np.linalg.norm(points[:, None, :] - points[chosen][None], axis=2)
    nearest: NDArray[np.int64] = np.argmin(distance, axis=1)
    return nearest


def nearest_outside(points: Array, group: NDArray[np.int64], asked: NDArray[np.bool_]) -> Array:
    """Octaves from each problem that is asked for to the nearest one of another group."""
    result = np.full(len(points), np.inf)
    for i in np.flatnonzero(asked):
        others = points[group != group[i]]
        if len(others):
            result[i] = np.linalg.norm(others - points[i], axis=1).min()
    return result


def _left_out(
    trainer: Trainer, params: Params, region: NDArray[np.int64], points: Array
) -> tuple[Array, Array]:
    """Distance and efficiency of whole problems by a ranking that saw nothing of their region."""
    data: Dataset = trainer.data
    light = params.light(_TREES)
    score = np.zeros(len(data))
    for number in np.unique(region):
        test = (region == number)[data.problem_index]
        judged = test & data.is_whole[data.problem_index]
        if judged.any():
            score[judged] = trainer.score(trainer.fit(~test, light), judged)
    efficiency = _by_problem(data, judge(data, score))
    return nearest_outside(points, region, np.isfinite(efficiency)), efficiency


def by_distance(distance: Array, efficiency: Array, analytic: Array) -> list[dict[str, Any]]:
    """Mean efficiency of the model and of the analytic model in bands of distance."""
    known = np.isfinite(distance) & np.isfinite(efficiency)
    far, own, plain = distance[known], efficiency[known], analytic[known]
    bands: list[dict[str, Any]] = []
    low = high = 0.0
    while len(far) and low <= far.max():
        high += BAND
        inside = (far >= low) & (far < high)
        if inside.sum() < MIN_EVIDENCE and high <= far.max():
            continue
        if inside.sum() >= MIN_EVIDENCE:
            bands.append(
                {
                    "octaves": [low, high],
                    "problems": int(inside.sum()),
                    "mean": round(100 * float(own[inside].mean()), 2),
                    "p10": round(100 * float(np.percentile(own[inside], 10)), 2),
                    "analytic": round(100 * float(plain[inside].mean()), 2),
                }
            )
        low = high
    return bands


def reach(bands: list[dict[str, Any]]) -> float:
    """The end of the last band that is near the best or above the analytic model."""
    if not bands:
        return LEAST
    near = bands[0]["mean"]
    held = 0.0
    for band in bands:
        if band["mean"] < near - MARGIN and band["mean"] <= band["analytic"]:
            break
        held = band["octaves"][1]
    return float(min(MOST, max(LEAST, held)))
