"""Cross-validation: every problem is scored by a ranking that never saw it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.telling import Tell, silent
from tilewise.errors import InputError
from tilewise.learn import beside
from tilewise.learn.fit import Fitted, Start, Trainer
from tilewise.learn.forests import Mask
from tilewise.learn.params import Params
from tilewise.learn.score import judge
from tilewise.learn.split import folds, group_keys

SEEN = -1
"""The fold of a problem that is always learned, never scored: one that a warm start's model was
trained on, or one of which only the promising kernels were measured or none ran."""
_LEAST_PROBLEMS = 4
"""With fewer a fold would have one problem to learn from."""
_HARD_FOLDS = 4
_HARD_TREES = 150
_HARDEST = 4.0
"""Times the mean loss; what is chosen worse for counts no more than that."""


@dataclass(frozen=True, slots=True)
class CrossValidated:
    """Predictions for every scored row by a ranking that never saw its problem."""

    fold: NDArray[np.int64]
    """Per problem; `SEEN` where it was not scored."""
    rows: Mask
    """Which rows were scored."""
    score: Array
    untold: Array
    """The score without what the vendor's library says it would do."""
    predicted_us: Array
    rounds: tuple[int, ...]


def cross_validate(
    trainer: Trainer,
    params: Params,
    *,
    count: int = 5,
    fold: NDArray[np.int64] | None = None,
    start: Start | None = None,
    tell: Tell = silent,
) -> CrossValidated:
    """Scores of every row from the folds that do not hold its problem.

    After a warm start the problems of the old model cannot be scored honestly: they stay in every
    training set, and only new ones are folded.
    """
    data = trainer.data
    of_problem = _fold(trainer, params, count, start) if fold is None else fold
    score, untold, level = (np.zeros(len(data)) for _ in range(3))
    rounds = []
    numbers = sorted(set(of_problem.tolist()) - {SEEN})
    groups = np.unique(group_keys(data.problems), return_inverse=True)[1]
    told = ""
    for place, number in enumerate(numbers):
        tell(f"fold {place + 1} of {len(numbers)}{told}")
        scored = of_problem == number
        test = scored[data.problem_index]
        learned = ~np.isin(groups, groups[scored])[data.problem_index]
        fitted = mined(trainer, learned, params, start)
        forest, _ = beside.level(trainer, learned, params, start)
        score[test] = trainer.score(fitted, test)
        untold[test] = score[test]
        asked = test & trainer.is_vendor
        untold[asked] = trainer.score(fitted, asked, is_told=False)
        level[test] = beside.predict_level(trainer, forest, test)
        rounds.append(fitted.rounds)
        mean = 100 * judge(data, score, test).efficiency.mean()
        told = f"; the last chose {mean:.2f} % of the best"
    rows = (of_problem != SEEN)[data.problem_index]
    predicted_us = np.exp2(level - score)
    return CrossValidated(of_problem, rows, score, untold, predicted_us, tuple(rounds))


def _fold(trainer: Trainer, params: Params, count: int, start: Start | None) -> NDArray[np.int64]:
    problems, is_whole = trainer.data.problems, trainer.data.is_whole
    seen = start.problems if start else frozenset()
    has_run = np.isfinite(trainer.data.best_us)
    fresh = [i for i, p in enumerate(problems) if is_whole[i] and has_run[i] and p.key not in seen]
    if start and len(fresh) < 2:
        raise InputError(
            f"a warm start is judged on problems that {start.name} never saw, and the data has "
            f"{len(fresh)} of them; sweep new problems, or train without --warm-start"
        )
    if not start and len(fresh) < _LEAST_PROBLEMS:
        raise InputError(
            f"{len(fresh)} of {len(problems)} problems were measured with all their kernels, some "
            f"of which ran, and only those can judge a model; sweep at least {_LEAST_PROBLEMS} "
            "without --top"
        )
    found = np.full(len(problems), SEEN, np.int64)
    chosen = [problems[i] for i in fresh]
    found[fresh] = folds(chosen, min(count, len(chosen)), seed=params.seed)
    return found


def mined(trainer: Trainer, train: Mask, params: Params, start: Start | None = None) -> Fitted:
    """A ranking; with `hard_rounds`, learned again with badly chosen problems weighted up."""
    weight = None
    for _ in range(params.hard_rounds):
        weight = hard_weight(trainer, train, params, weight)
    rows = None if weight is None else weight[trainer.data.problem_index]
    return trainer.fit(train, params, weight=rows, start=start)


def hard_weight(
    trainer: Trainer, train: Mask, params: Params, before: Array | None = None
) -> Array:
    """How much each problem should count: more, the more a ranking that left it out lost there.

    That is judged by folds within the training rows, never by the rows to be scored.
    """
    data = trainer.data
    weight = np.ones(len(data.problems)) if before is None else before
    index = np.unique(data.problem_index[train])
    count = min(_HARD_FOLDS, len(index))
    inner = folds([data.problems[i] for i in index], count, seed=params.seed + 7)
    plain = params.light(_HARD_TREES)
    score = np.zeros(len(data))
    for number in range(count):
        out = data.of_problems(index[inner == number]) & train
        fitted = trainer.fit(train & ~out, plain, weight=weight[data.problem_index])
        score[out] = trainer.score(fitted, out)
    outcome = judge(data, score, train)
    loss = np.zeros(len(data.problems))
    loss[outcome.problems] = 1 - outcome.efficiency
    mean = max(float(loss[index].mean()), 1e-6)
    harder: Array = weight * (1 + 0.5 * np.minimum(loss / mean, _HARDEST))
    return harder
