"""Grows forests: what each objective makes of times, and when to stop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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
        return replace(self, matrix=picked(self.matrix, self.names, names), names=names)


def picked(matrix: Array, names: Sequence[str], wanted: Sequence[str]) -> Array:
    """The wanted ones of the columns that are called `names`."""
    place = {name: i for i, name in enumerate(names)}
    return matrix[:, [place[name] for name in wanted]]


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
    draw: int = 0,
) -> Any:
    """A LightGBM booster of `rows`; with `stop`, its `best_iteration` is judged on those.

    Every `draw` gives each tree other rows and columns, cut at the same thresholds.
    """
    import lightgbm

    made = lightgbm.Dataset(
        **_part(lesson, rows, params), feature_name=list(lesson.names), free_raw_data=False
    )
    settings = params.lightgbm(**_SETTINGS.get(params.objective, {}))
    if draw:
        own = 1000 * params.seed + draw
        settings |= {"bagging_seed": own, "feature_fraction_seed": own}
    init = lightgbm.Booster(model_str=init_text) if init_text else None
    if stop is None:
        return lightgbm.train(settings, made, trees, init_model=init)
    held = made.create_valid(**_part(lesson, stop, params))
    callback = lightgbm.early_stopping(params.patience, verbose=False)
    return lightgbm.train(
        settings, made, trees, valid_sets=[held], callbacks=[callback], init_model=init
    )


def grow_all(
    lesson: Lesson, rows: Mask, params: Params, trees: int, init_text: str | None = None
) -> tuple[str, Array]:
    """The mean of `params.draws` boosters as one LightGBM text, and what each column gained."""
    boosters = [
        grow(lesson, rows, params, trees, init_text=init_text, draw=draw)
        for draw in range(params.draws)
    ]
    texts = [b.model_to_string(importance_type="gain") for b in boosters]
    gains: Array = np.mean([b.feature_importance("gain") for b in boosters], axis=0)
    return mean_text(texts, tree_count(init_text)), gains


def tree_count(text: str | None) -> int:
    """The trees in a LightGBM text."""
    return text.count("\nTree=") if text else 0


def mean_text(texts: Sequence[str], shared: int = 0) -> str:
    """One LightGBM text that predicts the mean of several, which were grown on the same columns.

    Their first `shared` trees, those of a warm start, are the same in all and stay.
    """
    if len(texts) == 1:
        return texts[0]
    head, *trees = _blocks(texts[0])
    divided = partial(_divided, len(texts))
    own = [tree for text in texts for tree in _blocks(text)[1 + shared :]]
    trees = [*trees[:shared], *(_SUMS.sub(divided, tree) for tree in own)]
    head = re.sub(r"^tree_sizes=.*\n", "", head, flags=re.MULTILINE)
    numbered = [f"Tree={i}\n{tree}" for i, tree in enumerate(trees)]
    return f"{head}\n{''.join(numbered)}end of trees\n"


_SUMS = re.compile(r"^(leaf_value|split_gain|internal_value)=(.*)$", re.MULTILINE)
"""What adds up over trees."""


def _blocks(text: str) -> list[str]:
    """What stands before the trees, then each tree without its number."""
    head, *trees = text.partition("\nend of trees")[0].split("\nTree=")
    return [head, *(tree.partition("\n")[2] + "\n" for tree in trees)]


def _divided(by: int, line: re.Match[str]) -> str:
    return f"{line[1]}={' '.join(repr(float(value) / by) for value in line[2].split())}"


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
