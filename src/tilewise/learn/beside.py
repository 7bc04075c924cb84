"""Forests beside the ranking: the level of times, absolute quantities, and what will run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewise.core.compile_expr import Array, log2
from tilewise.core.forest import Forest, from_lightgbm
from tilewise.learn.fit import Start, Trainer
from tilewise.learn.forests import Lesson, Mask, grow, picked
from tilewise.learn.params import Params

_LEVEL_TREES = 100
_VALIDITY_TREES = 60
_MIN_FAILURES = 20


def level(
    trainer: Trainer, train: Mask, params: Params, start: Start | None = None
) -> tuple[Forest, str]:
    """What turns scores into times: per problem, the centre of log2 time plus score."""
    import lightgbm

    data, names = trainer.data, trainer.problem_names
    ok = train & data.is_ok
    times = trainer.calibrated(ok, start)[1] if params.calibrated else np.ones(len(ok))
    count = np.bincount(data.problem_index, ok, len(data.problems))
    mean = trainer.centres(
        trainer.log_time - trainer.base_octaves(params, times), ok, params.centre
    )
    first = np.unique(data.problem_index, return_index=True)[1]
    matrix = picked(trainer.static[first], trainer.static_names, names)
    known = count[data.problem_index[first]] > 0
    small = replace(params, leaves=min(15, params.leaves), min_rows=5, column_share=0.7)
    made = lightgbm.Dataset(
        matrix[known],
        mean[data.problem_index[first]][known],
        feature_name=list(names),
        free_raw_data=False,
    )
    text = lightgbm.train(small.lightgbm(), made, _LEVEL_TREES).model_to_string()
    return from_lightgbm(text, names), text


def predict_level(trainer: Trainer, forest: Forest, of: Mask) -> Array:
    """The level of some rows' problems."""
    return forest.predict(picked(trainer.static[of], trainer.static_names, forest.features))


def absolute(trainer: Trainer, target: str, train: Mask, params: Params) -> tuple[Forest, str]:
    """A forest for log2 of TFLOPS, of microseconds or of GB/s."""
    data = trainer.data
    ok = train & data.is_ok
    work = {"tflops": data.flops * 1e-6, "bandwidth": data.bytes * 1e-3}
    wanted = trainer.log_time
    if target != "latency":
        wanted = log2(np.maximum(work[target], 1e-6))[data.problem_index] - trainer.log_time
    _, times = trainer.calibrated(ok)
    flat = np.zeros(len(data))
    lesson = Lesson(
        trainer.matrix(times), trainer.names, wanted, flat, flat + 1, data.problem_index
    )
    plain = replace(params, objective="regression")
    text = grow(lesson, ok, plain, params.trees).model_to_string()
    return from_lightgbm(text, trainer.names), text


def validity(trainer: Trainer, train: Mask, params: Params) -> tuple[Forest, str] | None:
    """A forest whose positive scores mean that a kernel will run; None where few failed."""
    import lightgbm

    data = trainer.data
    if min((train & ~data.is_ok).sum(), (train & data.is_ok).sum()) < _MIN_FAILURES:
        return None
    made = lightgbm.Dataset(
        trainer.static[train],
        data.is_ok[train].astype(float),
        feature_name=list(trainer.static_names),
        free_raw_data=False,
    )
    small = replace(params, leaves=15, min_rows=5)
    booster = lightgbm.train(small.lightgbm(objective="binary"), made, _VALIDITY_TREES)
    text = booster.model_to_string()
    return from_lightgbm(text, trainer.static_names), text
