"""Regression, ranking and classification compared on the same folds; tuning, where wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.core.telling import Tell, silent
from tilewise.errors import InputError
from tilewise.learn.cross import cross_validate
from tilewise.learn.fit import Trainer
from tilewise.learn.params import Params
from tilewise.learn.score import judge, summary
from tilewise.learn.split import folds

VARIANTS: dict[str, dict[str, Any]] = {
    "regression of what calibration leaves": {"objective": "regression", "base": 1.0},
    "regression of relative speed": {"objective": "regression", "base": 0.0},
    "LambdaRank": {"objective": "lambdarank", "base": 0.0, "vendor_trees": 0},
    "classification of the top decile": {
        "objective": "top_decile",
        "base": 0.0,
        "vendor_trees": 0,
    },
}

TUNING_FOLDS = 4
SPACE: dict[str, Callable[[Any, str], Any]] = {
    "leaves": lambda trial, name: trial.suggest_int(name, 8, 63),
    "learning_rate": lambda trial, name: trial.suggest_float(name, 0.02, 0.2, log=True),
    "min_rows": lambda trial, name: trial.suggest_int(name, 5, 60),
    "row_share": lambda trial, name: trial.suggest_float(name, 0.5, 1.0),
    "column_share": lambda trial, name: trial.suggest_float(name, 0.2, 1.0),
    "l2": lambda trial, name: trial.suggest_float(name, 0.1, 20.0, log=True),
    "focus": lambda trial, name: trial.suggest_float(name, 0.0, 4.0),
}
"""What tuning may change. The number of trees is not among it: the third split decides that."""


def compare_objectives(
    trainer: Trainer, params: Params, *, count: int = 5, tell: Tell = silent
) -> list[dict[str, Any]]:
    """One row per objective, all with the same features, sizes and folds; the best first."""
    fold = folds(trainer.data.problems, count, seed=params.seed)
    rows = []
    for name, changes in VARIANTS.items():
        tell(name)
        cross = cross_validate(trainer, replace(params, **changes), fold=fold)
        rows.append({"objective": name, **summary(judge(trainer.data, cross.score))})
    return sorted(rows, key=lambda row: -row["mean"])


def tune(
    trainer: Trainer, params: Params, *, trials: int = 30, tell: Tell = silent
) -> tuple[Params, float]:
    """Parameters with the best cross-validated mean plus P10 among `trials`, and that sum.

    The first trial is `params` as they are, so that tuning never ends below them. Needs Optuna;
    the same seed gives the same trials.
    """
    try:
        import optuna
    except ImportError:
        raise InputError(
            "tuning needs Optuna; install it with `pip install 'tilewise[tune]'`, or leave out "
            "--tune"
        ) from None
    # Folds of their own: those that judge the final model decide nothing here.
    count = min(TUNING_FOLDS, len(trainer.data.problems))
    fold = folds(trainer.data.problems, count, seed=params.seed + 1000)

    def objective(trial: Any) -> float:
        drawn = {name: draw(trial, name) for name, draw in SPACE.items()}
        tell(f"trial {trial.number + 1} of {trials}")
        cross = cross_validate(trainer, replace(params, **drawn), fold=fold)
        efficiency = 100 * judge(trainer.data, cross.score).efficiency
        return float(efficiency.mean() + np.percentile(efficiency, 10))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=params.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial({name: getattr(params, name) for name in SPACE})
    study.optimize(objective, n_trials=trials)
    return replace(params, **study.best_params), round(float(study.best_value), 4)
