"""Grows forests: what each objective makes of times, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.learn.params import Params

Mask = NDArray[np.bool_]
TOP_SHARE = 0.1
"""The share of a problem's kernels that `top_decile` calls fast."""
_GRADES = 31
_GRADES_PER_OCTAVE = 32
"""LambdaRank tells kernels apart that differ by 2 %, down to half the speed of the best."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Columns, what to learn from them, and how much each row counts."""

    matrix: Array
    names: tuple[str, ...]
    target: Array
    """What a regression learns."""
    behind: Array
    """Octaves behind the fastest row of the same problem, at most 0."""
    weight: Array
    problem_index: NDArray[np.int64]

    def columns(self, names: tuple[str, ...]) -> Lesson:
        """The same with some of the columns."""
        place = {name: i for i, name in enumerate(self.names)}
        return replace(self, matrix=self.matrix[:, [place[n] for n in names]], names=names)


def labels(lesson: Lesson, rows: Mask, objective: str) -> Array:
    """What the objective wants of each row; rows outside are not meaningful."""
    if objective == "lambdarank":
        return np.clip(_GRADES + np.round(lesson.behind * _GRADES_PER_OCTAVE), 0, _GRADES)
    if objective == "top_decile":
        return _is_top(lesson, rows).astype(np.float64)
    return lesson.target


def _is_top(lesson: Lesson, rows: Mask) -> Mask:
    """The fastest tenth of each problem's rows, at least one; ties with the last count too."""
    order, sizes = by_problem(lesson.problem_index, rows)
    top = np.zeros(len(rows), bool)
    start = 0
    for size in sizes:
        own = order[start : start + size]
        start += size
        wanted = max(1, int(np.ceil(TOP_SHARE * size)))
        bound = np.sort(lesson.behind[own])[::-1][wanted - 1]
        top[own] = lesson.behind[own] >= bound
    return top


def by_problem(
    problem_index: NDArray[np.int64], rows: Mask
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows in the order of their problems, and how many each has."""
    chosen = np.flatnonzero(rows)
    order = chosen[np.argsort(problem_index[chosen], kind="stable")]
    _, sizes = np.unique(problem_index[order], return_counts=True)
    return order, sizes


def grow(
    lesson: Lesson,
    rows: Mask,
    params: Params,
    trees: int,
    *,
    init_text: str | None = None,
    stop: Mask | None = None,
) -> Any:
    """A LightGBM booster of `rows`; with `stop`, its `best_iteration` is judged on those."""
    import lightgbm

    made = lightgbm.Dataset(
        **_part(lesson, rows, params), feature_name=list(lesson.names), free_raw_data=False
    )
    settings = params.lightgbm(**_SETTINGS.get(params.objective, {}))
    init = lightgbm.Booster(model_str=init_text) if init_text else None
    if stop is None:
        return lightgbm.train(settings, made, trees, init_model=init)
    held = made.create_valid(**_part(lesson, stop, params))
    callback = lightgbm.early_stopping(params.patience, verbose=False)
    return lightgbm.train(
        settings, made, trees, valid_sets=[held], callbacks=[callback], init_model=init
    )


_SETTINGS: dict[str, dict[str, Any]] = {
    "lambdarank": {
        "objective": "lambdarank",
        "label_gain": [2.0 ** (grade / 4) - 1 for grade in range(_GRADES + 1)],
        "lambdarank_truncation_level": 10,
        "eval_at": [1],
    },
    "top_decile": {"objective": "binary"},
}


def _part(lesson: Lesson, rows: Mask, params: Params) -> dict[str, Any]:
    order, sizes = by_problem(lesson.problem_index, rows)
    return {
        "data": lesson.matrix[order],
        "label": labels(lesson, rows, params.objective)[order],
        "weight": lesson.weight[order],
        "group": sizes if params.objective == "lambdarank" else None,
    }


def text_names(text: str) -> tuple[str, ...]:
    """The columns that a LightGBM model file was trained on."""
    line = next(t for t in text.splitlines() if t.startswith("feature_names="))
    return tuple(line.removeprefix("feature_names=").split())
