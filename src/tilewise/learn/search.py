"""Search among legal kernels: at random, or by differential evolution guided by a score.

Evolution moves through the space of traits and always lands on the nearest kernel that is legal
and not yet tried, so nothing else is ever scored or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.errors import InputError, NoKernelError
from tilewise.ops.columns import pool_rows
from tilewise.ops.contract import get_op
from tilewise.ops.fields import kernel_values

STRATEGIES = ("random", "de")
_WEIGHT, _CROSSOVER = 0.6, 0.8

ScoreOf = Callable[[list[int]], Array]
"""Places in the space -> scores, higher is better."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel that was tried, with its score."""

    kernel: Kernel
    score: float


def legal_kernels(kernels: Sequence[Kernel], problem: Problem, arch: Arch) -> list[Kernel]:
    """Those that can serve the problem, in order."""
    why_unusable = get_op(problem.op).why_unusable
    return [k for k in kernels if why_unusable(k, problem, arch) is None]


def model_score(model: Model, problem: Problem, space: Sequence[Kernel], arch: Arch) -> ScoreOf:
    """Scores by a model."""
    figures = model.figures_for(arch)

    def score(places: list[int]) -> Array:
        chosen = [space[i] for i in places]
        return model.scores(pool_rows(model, chosen, figures, problem))

    return score


def search(
    space: Sequence[Kernel],
    score: ScoreOf,
    *,
    strategy: str = "de",
    budget: int = 200,
    seed: int = 0,
) -> list[Trial]:
    """Every kernel tried, best first; at most `budget` are scored, each once."""
    if strategy not in STRATEGIES:
        raise InputError(f"strategy is {strategy!r}; use {' or '.join(STRATEGIES)}")
    if budget < 1:
        raise InputError(f"budget is {budget}; at least one kernel has to be tried")
    if not space:
        raise NoKernelError("no legal kernel is left to search among")
    random = np.random.default_rng(seed)
    budget = min(budget, len(space))
    if strategy == "random":
        places = random.permutation(len(space))[:budget].tolist()
        scores = score(places)
        tried = dict(zip(places, scores.tolist(), strict=True))
    else:
        tried = _evolve(space, score, budget, random)
    order = sorted(tried, key=lambda place: (-tried[place], place))
    return [Trial(space[place], tried[place]) for place in order]


def _evolve(
    space: Sequence[Kernel], score: ScoreOf, budget: int, random: np.random.Generator
) -> dict[int, float]:
    points = _points(space)
    size = min(budget, max(8, min(24, budget // 4)))
    start = random.permutation(len(space))[:size].tolist()
    tried = dict(zip(start, score(start).tolist(), strict=True))
    is_free = np.ones(len(space), bool)
    is_free[start] = False
    population: list[int] = start
    while len(tried) < budget:
        best = max(population, key=lambda place: tried[place])
        fresh: list[int] = []
        for place in population:
            if len(tried) + len(fresh) >= budget:
                break
            a, b = random.choice(len(population), 2, replace=True)
            step = points[population[a]] - points[population[b]]
            pull = points[best] - points[place]
            mutant = points[place] + _WEIGHT * (pull + step)
            keep = random.random(points.shape[1]) >= _CROSSOVER
            mutant = np.where(keep, points[place], mutant)
            # Ties between equally near kernels are broken at random, by the seed.
            far = np.abs(points - mutant).sum(axis=1) + 1e-6 * random.random(len(space))
            landed = int(np.argmin(np.where(is_free, far, np.inf)))
            is_free[landed] = False
            fresh.append(landed)
        tried |= dict(zip(fresh, score(fresh).tolist(), strict=True))
        pairs = zip(population, fresh, strict=False)
        winners = [new if tried[new] > tried[old] else old for old, new in pairs]
        population = winners + population[len(fresh) :]
    return tried


def _points(space: Sequence[Kernel]) -> NDArray[np.float64]:
    """Kernels as points: each trait's rank among its values, from 0 to 1; text as flags."""
    values = [kernel_values(k) for k in space]
    names = list(dict.fromkeys(n for v in values for n in v))
    columns: list[Array] = []
    for name in names:
        column = [v.get(name, -1) for v in values]
        words = sorted({c for c in column if isinstance(c, str)})
        if words:
            columns += [np.array([float(c == w) for c in column]) for w in words]
            continue
        distinct = sorted({float(c) for c in column})
        if len(distinct) > 1:
            place = {c: i / (len(distinct) - 1) for i, c in enumerate(distinct)}
            columns.append(np.array([place[float(c)] for c in column]))
    return np.column_stack(columns) if columns else np.zeros((len(space), 1))
