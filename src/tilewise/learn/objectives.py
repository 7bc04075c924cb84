"""Regression, ranking and classification compared on the same folds; tuning, where wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.errors import InputError
from tilewise.learn.fit import Params, Trainer
from tilewise.learn.score import judge, summary
from tilewise.learn.split import folds
from tilewise.learn.train import Progress, _silent, cross_validate

VARIANTS: dict[str, dict[str, Any]] = {
    "regression of what calibration leaves": {"objective": "regression", "base": True},
    "regression of relative speed": {"objective": "regression", "base": False},
    "LambdaRank": {"objective": "lambdarank", "base": False},
    "classification of the top": {"objective": "top_decile", "base": False},
}


def compare_objectives(
    trainer: Trainer, params: Params, *, count: int = 5, progress: Progress = _silent
) -> list[dict[str, Any]]:
    """One row per objective, all with the same features, sizes and folds; the best first."""
    fold = folds(trainer.data.problems, count, seed=params.seed)
    rows = []
    for name, changes in VARIANTS.items():
        progress(name)
        cross = cross_validate(trainer, replace(params, **changes), fold=fold)
        rows.append({"objective": name, **summary(judge(trainer.data, cross.score))})
    return sorted(rows, key=lambda row: -row["mean"])


def tune(
    trainer: Trainer, params: Params, *, trials: int = 30, progress: Progress = _silent
) -> Params:
    """Parameters with the best cross-validated mean plus P10 among `trials`; needs Optuna."""
    try:
        import optuna
    except ImportError:
        raise InputError("tuning needs Optuna; install it, or train without --tune") from None
    # Folds of their own: the ones that judge the final model are not tuned on.
    fold = folds(trainer.data.problems, 4, seed=params.seed + 1000)

    def drawn(trial: Any) -> Params:
        return replace(
            params,
            leaves=trial.suggest_int("leaves", 8, 32),
            learning_rate=trial.suggest_float("learning_rate", 0.03, 0.2, log=True),
            min_rows=trial.suggest_int("min_rows", 5, 60),
            column_share=trial.suggest_float("column_share", 0.2, 1.0),
            l2=trial.suggest_float("l2", 0.1, 20.0, log=True),
            focus=trial.suggest_float("focus", 0.0, 4.0),
        )

    def objective(trial: Any) -> float:
        score = cross_validate(trainer, drawn(trial), fold=fold).score
        efficiency = judge(trainer.data, score).efficiency
        progress(f"trial {trial.number + 1} of {trials}")
        return float(efficiency.mean() + np.percentile(efficiency, 10))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=params.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=trials)
    return replace(params, **study.best_params)
