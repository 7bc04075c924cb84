"""`train`: cross-validate, fit on everything, and write the model folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import __version__
from tilewise.core.compile_expr import Array
from tilewise.core.features import FeatureSet
from tilewise.core.identity import canonical_json
from tilewise.core.model import Measured, Model, load_model, save_model
from tilewise.errors import InputError, ModelError
from tilewise.learn.dataset import Dataset
from tilewise.learn.fit import Fitted, Params, Trainer, lightgbm_names
from tilewise.learn.score import errors, judge, noise_ceiling, slices, summary, worst
from tilewise.learn.split import folds

Progress = Callable[[str], None]
MIN_REACH = 2.0
"""Octaves; a problem this close to a measured one is never called unfamiliar."""


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CrossValidated:
    """Predictions for every row by a ranking that never saw its problem."""

    fold: NDArray[np.int64]
    """Per problem."""
    score: Array
    predicted_us: Array
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """A model with everything that its folder holds beside it."""

    model: Model
    texts: dict[str, str]
    importances: dict[str, float]
    cross: CrossValidated
    outcome_efficiency: Array = field(default_factory=lambda: np.zeros(0))


def cross_validate(
    trainer: Trainer,
    params: Params,
    *,
    count: int = 5,
    fold: NDArray[np.int64] | None = None,
    progress: Progress = _silent,
) -> CrossValidated:
    """Scores of every row from the folds that do not hold its problem."""
    data = trainer.data
    of_problem = folds(data.problems, count, seed=params.seed) if fold is None else fold
    score, level = np.zeros(len(data)), np.zeros(len(data))
    rounds = []
    numbers = sorted(set(of_problem.tolist()))
    for number in numbers:
        progress(f"fold {number + 1} of {len(numbers)}")
        test = (of_problem == number)[data.problem_index]
        fitted = mined(trainer, ~test, params)
        score[test] = trainer.score(fitted)[test]
        level[test] = _level(trainer, fitted, ~test, params)[test]
        rounds.append(fitted.rounds)
    return CrossValidated(of_problem, score, np.exp2(level - score), tuple(rounds))


def _level(trainer: Trainer, fitted: Fitted, train: NDArray[np.bool_], params: Params) -> Array:
    forest, _ = trainer.level(fitted, train, params)
    place = {n: i for i, n in enumerate(trainer.static_names)}
    return forest.predict(trainer.static[:, [place[n] for n in forest.features]])


def mined(
    trainer: Trainer, train: NDArray[np.bool_], params: Params, init_text: str | None = None
) -> Fitted:
    """A ranking; with `hard_rounds`, learned again with badly chosen problems weighted up.

    How badly is judged by folds within the training rows, never by the rows to be scored.
    """
    data = trainer.data
    weight = np.ones(len(data))
    plain = replace(params, early_stop=False, trees=min(params.trees, 150))
    for _ in range(params.hard_rounds):
        index = np.unique(data.problem_index[train])
        inner = folds([data.problems[i] for i in index], 4, seed=params.seed + 7)
        score = np.zeros(len(data))
        for number in range(4):
            out = data.of_problems(index[inner == number]) & train
            score[out] = trainer.score(trainer.fit(train & ~out, plain, weight=weight))[out]
        outcome = judge(data, score, train)
        loss = np.zeros(len(data.problems))
        loss[outcome.problems] = 1 - outcome.efficiency
        mean = max(float(loss[index].mean()), 1e-6)
        weight = weight * (1 + np.minimum(loss / mean, 4.0) * 0.5)[data.problem_index]
    chosen = weight if params.hard_rounds else None
    return trainer.fit(train, params, weight=chosen, init_text=init_text)


def train(
    data: Dataset,
    params: Params | None = None,
    *,
    name: str = "",
    fold_count: int = 5,
    fold: NDArray[np.int64] | None = None,
    warm_start: Path | None = None,
    progress: Progress = _silent,
) -> Trained:
    """A model of all rows, and the cross-validation that says what to expect of it."""
    params = params or Params()
    progress(f"features of {len(data)} rows")
    trainer = Trainer(data)
    everything = np.ones(len(data), bool)
    init_text = _warm_text(warm_start, trainer) if warm_start else None
    cross = cross_validate(
        trainer, params, count=min(fold_count, len(data.problems)), fold=fold, progress=progress
    )
    progress("final model")
    fitted = mined(trainer, everything, params, init_text)
    level, level_text = trainer.level(fitted, everything, params)
    forests, texts = (
        {"rank": fitted.forest, "level": level},
        {"rank": fitted.text, "level": level_text},
    )
    for target in params.targets:
        progress(f"target {target}")
        forests[target], texts[target] = trainer.absolute(target, everything, params)
    valid = trainer.validity(everything, params)
    if valid is not None:
        forests["valid"], texts["valid"] = valid
    outcome = judge(data, cross.score)
    efficiency = np.full(len(data.problems), np.nan)
    efficiency[outcome.problems] = outcome.efficiency
    wanted = [n for f in forests.values() for n in f.features]
    axes = tuple(n for n in trainer.features.helpers if n.startswith("at_"))
    keep = [*axes, "calibrated_us"] if params.base else axes
    features = trainer.features.restricted(dict.fromkeys(wanted), keep)
    model = Model(
        op=data.op,
        arch=data.arch.name,
        device=data.arch.device,
        dtypes=data.dtypes,
        has_base=params.base and params.objective == "regression",
        features=features,
        forests=forests,
        calibration=fitted.calibration,
        measured=measured(trainer, efficiency, axes),
        manifest=manifest(data, params, fitted, name, warm_start),
        metrics=metrics(data, cross),
    )
    return Trained(model, texts, dict(fitted.importances), cross, efficiency)


def measured(trainer: Trainer, efficiency: Array, axes: tuple[str, ...]) -> Measured:
    """Where the problems lie, and how far from them the model may be asked."""
    data = trainer.data
    first = np.unique(data.problem_index, return_index=True)[1]
    found = trainer.features.evaluate(data.keep(_at(len(data), first)).rows(trainer.features), axes)
    order = data.problem_index[np.sort(first)]
    points = np.zeros((len(data.problems), len(axes)))
    for j, axis in enumerate(axes):
        points[order, j] = found[axis]
    return Measured(
        axes,
        points,
        efficiency,
        _reach(points),
        tuple(canonical_json(p.to_dict()) for p in data.problems),
    )


def _at(size: int, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(size, bool)
    mask[places] = True
    return mask


def _reach(points: Array) -> float:
    """Half as far again as all but one in a hundred problems are from their nearest neighbour."""
    if len(points) < 3:
        return MIN_REACH
    nearest = []
    for i, point in enumerate(points):
        far = np.sqrt(((points - point) ** 2).sum(axis=1))
        far[i] = np.inf
        nearest.append(far.min())
    return max(MIN_REACH, 1.5 * float(np.percentile(nearest, 99)))


def metrics(data: Dataset, cross: CrossValidated) -> dict[str, Any]:
    """The cross-validation in numbers; times of failed rows are left out of the errors."""
    outcome = judge(data, cross.score)
    ok = data.is_ok
    per_fold = []
    for number in sorted(set(cross.fold.tolist())):
        rows = (cross.fold == number)[data.problem_index]
        per_fold.append({"fold": int(number), **summary(judge(data, cross.score, rows))})
    analytic = judge(data, -analytic_us(data))
    return {
        "efficiency": summary(outcome),
        "noise_ceiling": noise_ceiling(data),
        "analytic": summary(analytic),
        "time": errors(np.log2(cross.predicted_us[ok]), np.log2(data.time_us[ok])),
        "folds": per_fold,
        "slices": slices(data, outcome),
        "worst": worst(data, outcome),
        "rounds": list(cross.rounds),
    }


def analytic_us(data: Dataset) -> Array:
    """What the analytic model says about every row, without any training."""
    from tilewise.learn.dataset import features_of

    features = features_of(data.op)
    return features.evaluate(data.rows(features), ["analytic_us"])["analytic_us"]


def manifest(
    data: Dataset, params: Params, fitted: Fitted, name: str, warm_start: Path | None
) -> dict[str, Any]:
    """Where a model comes from; nothing in it depends on when or where it was trained."""
    import lightgbm

    return {
        "name": name or f"{data.op}_{data.arch.name}_{'_'.join(data.dtypes)}",
        "tilewise": __version__,
        "lightgbm": lightgbm.__version__,
        "data_sha256": data.digest,
        "data_device": data.device,
        "rows": len(data),
        "failed_rows": int((~data.is_ok).sum()),
        "problems": len(data.problems),
        "kernels": sorted(k.name for k in data.kernels),
        "engines": sorted({k.engine for k in data.kernels}),
        "params": params.to_dict(),
        "rounds": fitted.rounds,
        "trees": fitted.forest.num_trees,
        "warm_start_from": warm_start.name if warm_start else None,
    }


def save(trained: Trained, data: Dataset, folder: Path, **extra: Any) -> None:
    """Writes the model folder with importances, folds and out-of-fold predictions."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_oof(data, trained.cross, folder / "oof.parquet")
    fold = {p.key: int(f) for p, f in zip(data.problems, trained.cross.fold, strict=True)}
    total = sum(trained.importances.values()) or 1.0
    gains = {n: round(g / total, 6) for n, g in trained.importances.items()}
    save_model(
        trained.model,
        folder,
        trained.texts,
        importances=dict(sorted(gains.items(), key=lambda item: -item[1])),
        folds=fold,
        **extra,
    )


def _write_oof(data: Dataset, cross: CrossValidated, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "problem": [data.problems[i].key for i in data.problem_index],
        "kernel": [data.kernels[i].name for i in data.kernel_index],
        "fold": cross.fold[data.problem_index],
        "score": cross.score,
        "predicted_us": cross.predicted_us,
    }
    parquet.write_table(pa.table(columns), path, compression="zstd")


def _warm_text(folder: Path, trainer: Trainer) -> str:
    """The forest to continue from, after checking that it speaks of the same features."""
    old = load_model(folder)
    text = (folder / "rank.txt").read_text()
    check_schema(lightgbm_names(text), trainer.names, old.features, trainer.features)
    if (old.op, old.arch) != (trainer.data.op, trainer.data.arch.name):
        raise InputError(
            f"{folder} is for {old.op} on {old.arch}; the data is {trainer.data.op} on "
            f"{trainer.data.arch.name}"
        )
    return text


def check_schema(
    before: tuple[str, ...], now: tuple[str, ...], old: FeatureSet, new: FeatureSet
) -> None:
    """Raises, naming every difference, unless the old features exist with the same meaning."""
    removed = [n for n in before if n not in now]
    changed = [
        n
        for n in (*old.features, *old.helpers)
        if n in new.expressions and old.expressions[n].source != new.expressions[n].source
    ]
    words = [f.name for f in old.fields if f.words and new.words.get(f.name, f.words) != f.words]
    problems = []
    for what, names in (
        ("no longer there", removed),
        ("redefined", changed),
        ("with other words", words),
    ):
        if names:
            problems.append(f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    if problems:
        raise ModelError(
            "a warm start needs the same features; they differ, " + "; ".join(problems)
        )
