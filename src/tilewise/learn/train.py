"""`train`: cross-validate, fit on everything, and say what the model is and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import __version__
from tilewise.core.arch import devices
from tilewise.core.features import FeatureSet
from tilewise.core.forest import Forest
from tilewise.core.model import VENDOR, Calibration, Model, replacing, save_model
from tilewise.core.telling import Tell, silent
from tilewise.learn import beside
from tilewise.learn.cross import SEEN, CrossValidated, cross_validate, mined
from tilewise.learn.dataset import Dataset
from tilewise.learn.fit import Fitted, Start, Trainer
from tilewise.learn.judging import report
from tilewise.learn.params import Params
from tilewise.learn.reach import axes_of, measured
from tilewise.learn.score import judge, summary
from tilewise.learn.warm import warm_names, warm_start
from tilewise.ops.fields import figures


@dataclass(frozen=True, slots=True)
class Training:
    """A model with everything that its folder holds beside it."""

    model: Model
    texts: dict[str, str]
    importances: dict[str, float]
    cross: CrossValidated
    seen: frozenset[str] = frozenset()
    """Problems that a warm start's model had learned from."""


def train(
    data: Dataset,
    params: Params | None = None,
    *,
    name: str = "",
    fold_count: int = 5,
    fold: NDArray[np.int64] | None = None,
    continue_from: Path | None = None,
    tell: Tell = silent,
) -> Training:
    """A model of all rows, and the cross-validation that says what to expect of it."""
    params = params or Params()
    tell(f"features of {len(data)} rows")
    trainer = Trainer(data, keep=warm_names(continue_from) if continue_from else ())
    start = warm_start(continue_from, trainer, params) if continue_from else None
    cross = cross_validate(trainer, params, count=fold_count, fold=fold, start=start, tell=tell)
    tell("final model")
    everything = np.ones(len(data), bool)
    fitted = mined(trainer, everything, params, start)
    forests, texts = _forests(trainer, fitted, params, start, tell)
    where, bands = measured(trainer, params, cross, tell)
    model = Model(
        op=data.op,
        arch=data.arch.name,
        device=data.arch.device if data.arch.device in devices(data.arch.name) else "",
        dtypes=data.dtypes,
        base=params.start,
        share=params.share,
        features=_needed(trainer, forests, params),
        forests=forests,
        calibration=_of_own(fitted.calibration, data),
        measured=where,
        manifest=manifest(data, params, fitted, name, start),
        metrics={**metrics(data, cross), "by_distance": bands},
    )
    seen = start.problems if start else frozenset()
    return Training(model, texts, dict(fitted.importances), cross, seen)


def _forests(
    trainer: Trainer, fitted: Fitted, params: Params, start: Start | None, tell: Tell
) -> tuple[dict[str, Forest], dict[str, str]]:
    """The ranking and the forests beside it, each with its LightGBM text."""
    everything = np.ones(len(trainer.data), bool)
    found = {"rank": (fitted.forest, fitted.text)}
    if fitted.vendor is not None:
        found[VENDOR] = fitted.vendor, fitted.vendor_text
    found["level"] = beside.level(trainer, everything, params, start)
    for target in params.targets:
        tell(f"target {target}")
        found[target] = beside.absolute(trainer, target, everything, params)
    valid = beside.validity(trainer, everything, params)
    if valid is not None:
        found["valid"] = valid
    return {n: f for n, (f, _) in found.items()}, {n: t for n, (_, t) in found.items()}


def _of_own(calibration: Calibration, data: Dataset) -> Calibration:
    """The factors that serving asks for: of kernels beside the op's own, those of tiles remain."""
    own = {k.name for k in data.kernels if k.op == data.op}
    kept = {name: found for name, found in calibration.kernels.items() if name in own}
    return replace(calibration, kernels=kept)


def _needed(trainer: Trainer, forests: dict[str, Forest], params: Params) -> FeatureSet:
    """The definitions that serving needs, and no others."""
    wanted = dict.fromkeys(n for f in forests.values() for n in f.features)
    keep = [*axes_of(trainer), *([params.start] if params.start else [])]
    keep += ["is_vendor"] if VENDOR in forests else []
    return trainer.features.restricted(wanted, keep)


def metrics(data: Dataset, cross: CrossValidated) -> dict[str, Any]:
    """The cross-validation in numbers."""
    found = report(data, cross.score, cross.predicted_us, cross.rows)
    per_fold = []
    for number in sorted(set(cross.fold.tolist()) - {SEEN}):
        rows = (cross.fold == number)[data.problem_index]
        per_fold.append({"fold": int(number), **summary(judge(data, cross.score, rows))})
    if data.tactics:
        found["untold"] = summary(judge(data, cross.untold, cross.rows))
    return {**found, "folds": per_fold, "rounds": list(cross.rounds)}


def manifest(
    data: Dataset, params: Params, fitted: Fitted, name: str, start: Start | None
) -> dict[str, Any]:
    """Where a model comes from; nothing in it depends on when or where it was trained."""
    import lightgbm

    return {
        "name": name or f"{data.op}_{data.arch.name}_{'_'.join(data.dtypes)}",
        "tilewise": __version__,
        "lightgbm": lightgbm.__version__,
        "data_sha256": data.digest,
        "data_device": data.device,
        "figures": figures(data.arch),
        **({"stands": [figures(stand) for stand in data.devices]} if data.stands else {}),
        "rows": len(data),
        "failed_rows": int((~data.is_ok).sum()),
        "problems": int(data.is_own.sum()),
        **({} if data.is_own.all() else {"problems_beside": int((~data.is_own).sum())}),
        "kernels": sorted(k.name for k in data.kernels if k.op == data.op),
        "engines": sorted({k.engine for k in data.kernels}),
        "params": params.to_dict(),
        "rounds": fitted.rounds,
        "problems_apart": len(fitted.apart),
        "trees": fitted.forest.num_trees,
        "warm_start_from": start.name if start else None,
    }


def save(trained: Training, data: Dataset, folder: Path, **extra: Any) -> None:
    """Writes the model folder with importances, folds and out-of-fold predictions."""
    fold = dict.fromkeys(trained.seen, SEEN)
    fold |= {p.key: int(f) for p, f in zip(data.problems, trained.cross.fold, strict=True)}
    total = sum(trained.importances.values()) or 1.0
    gains = {n: round(g / total, 6) for n, g in trained.importances.items()}
    with replacing(folder) as fresh:
        _write_oof(data, trained.cross, fresh / "oof.parquet")
        save_model(
            trained.model,
            fresh,
            trained.texts,
            importances=dict(sorted(gains.items(), key=lambda item: -item[1])),
            folds=fold,
            **extra,
        )


def _write_oof(data: Dataset, cross: CrossValidated, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = cross.rows
    columns = {
        "problem": [data.problems[i].key for i in data.problem_index[rows]],
        "kernel": [data.kernels[i].name for i in data.kernel_index[rows]],
        "fold": cross.fold[data.problem_index[rows]],
        "score": cross.score[rows],
        "predicted_us": cross.predicted_us[rows],
    }
    if data.stands:
        columns["stand"] = [data.stand_of(i) for i in data.problem_index[rows]]
    parquet.write_table(pa.table(columns), path, compression="zstd")
