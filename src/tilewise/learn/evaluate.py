"""Judges a model on measurements; problems it was trained on are judged out of fold."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.model import Model, load_model
from tilewise.core.sealed import SealedFolder
from tilewise.core.telling import Tell, silent
from tilewise.errors import FileError, InputError, ModelError
from tilewise.learn.calibrate import kernel_factors
from tilewise.learn.cross import SEEN, cross_validate
from tilewise.learn.dataset import Dataset
from tilewise.learn.fit import Trainer
from tilewise.learn.judging import report
from tilewise.learn.params import Params
from tilewise.learn.score import Judgement, analytic_us, judge, summary
from tilewise.learn.slices import shape_family
from tilewise.learn.split import saved_folds
from tilewise.problems.problem_set import ProblemSet
from tilewise.problems.tables import read_parquet


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's outcome on data, and how each problem was judged."""

    data: Dataset
    score: Array
    predicted_us: Array
    rows: NDArray[np.bool_]
    """Rows of problems that could be judged without having been trained on."""
    out_of_fold: int
    unseen: int
    skipped: int

    @property
    def outcome(self) -> Judgement:
        return judge(self.data, self.score, self.rows)

    def scored_problems(self) -> ProblemSet:
        """Every judged problem labelled with its efficiency, 1 being the oracle's."""
        outcome, found = self.outcome, ProblemSet()
        for at, efficiency in zip(outcome.problems, outcome.efficiency, strict=True):
            labels = {**self.data.labels[at], "efficiency": round(float(efficiency), 4)}
            found.add(self.data.problems[at], labels)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The whole report, JSON-ready."""
        return {
            "op": self.data.op,
            "arch": self.data.arch.name,
            "problems_unseen": self.unseen,
            "problems_out_of_fold": self.out_of_fold,
            "problems_skipped": self.skipped,
            **report(self.data, self.score, self.predicted_us, self.rows),
        }


def evaluate(folder: Path | str, data: Dataset) -> Evaluation:
    """Judges the model in `folder`; trained problems by their out-of-fold predictions."""
    path = Path(folder)
    model = load_model(path)
    if (model.op, model.arch) != (data.op, data.arch.name):
        raise InputError(
            f"{path} is for {model.op} on {model.arch}; the data is {data.op} on {data.arch.name}"
        )
    score, time_us = model_scores(model, data)
    trained, held = read_folds(path)
    is_trained = np.array([p.key in trained for p in data.problems])
    rows = data.is_whole[data.problem_index]
    for row, (p, k) in enumerate(zip(data.problem_index, data.kernel_index, strict=True)):
        if is_trained[p]:
            pair = data.problems[p].key, data.kernels[k].name
            found = held.get((data.stand_of(p), *pair)) or held.get(("", *pair))
            if found is None:
                rows[row] = False
            else:
                score[row], time_us[row] = found
    judged = np.unique(data.problem_index[rows & data.is_ok])
    if not len(judged):
        raise InputError(
            f"none of the {len(data.problems)} problems can judge {path}: of "
            f"{(~data.is_whole).sum()} only promising kernels were measured, on "
            f"{(~np.isfinite(data.best_us)).sum()} nothing ran, and it was trained on "
            f"{(is_trained & data.is_whole).sum()} without being judged on them; sweep some "
            "others without --top"
        )
    out_of_fold = int(is_trained[judged].sum())
    return Evaluation(
        data,
        score,
        time_us,
        rows,
        out_of_fold,
        len(judged) - out_of_fold,
        len(data.problems) - len(judged),
    )


def model_scores(model: Model, data: Dataset) -> tuple[Array, Array]:
    """Scores and predicted times of every row by the model as it is."""
    factors = kernel_factors(data, model.calibration)
    kept = {f.name for f in model.features.fields}
    rows = data.rows(model.features, {n: v for n, v in factors.items() if n in kept})
    score = model.scores(rows)
    return score, np.exp2(model.predict("level", rows) - score)


Scored = tuple[str, str, str]
"""Where a problem was measured, empty where all were in one place; its key; the kernel's name."""


def read_folds(path: Path) -> tuple[dict[str, int], dict[Scored, tuple[float, float]]]:
    """The fold of each problem of a model, and score and time of what was scored."""
    names = ["problem", "kernel", "score", "predicted_us"]
    folds = saved_folds(path)
    try:
        found = read_parquet(
            SealedFolder(path).read("oof.parquet"),
            lambda schema: [*names, *({"stand"} & set(schema.names))],
        )
        table = [found.column(name).to_pylist() for name in names]
        several = "stand" in found.column_names
        stands = found.column("stand").to_pylist() if several else [""] * len(found)
        held = {
            (str(at), p, k): (float(s), float(us))
            for at, p, k, s, us in zip(stands, *table, strict=True)
        }
    except (FileError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: oof.parquet, needed to judge, is damaged: {error}") from None
    if not all(isfinite(score) and us > 0 for score, us in held.values()):
        raise ModelError(f"{path}: oof.parquet, needed to judge, holds scores that are no numbers")
    return folds, held


def leave_one_out(
    data: Dataset, label: str, params: Params | None = None, tell: Tell = silent
) -> dict[str, Any]:
    """Judges each group of problems by a model that never saw its like.

    `label` is one of the problems' labels (network, family, source), a field of the problem, or
    `shape`, the kind of shape that slices are cut by.
    """
    groups = [
        shape_family(p) if label == "shape" else str(labels.get(label, getattr(p, label, "")))
        for p, labels in zip(data.problems, data.labels, strict=True)
    ]
    can_judge = data.is_whole & np.isfinite(data.best_us)
    names = sorted({g for g, is_one in zip(groups, can_judge, strict=True) if is_one})
    if len(names) < 2:
        raise InputError(
            f"problems measured with all their kernels have {len(names)} kinds of {label!r} "
            f"({', '.join(names)}), and leaving one out takes two; name another label, or sweep "
            "others without --top"
        )
    fold = np.array([names.index(g) if g in names else SEEN for g in groups], np.int64)
    is_whole = data.is_whole[data.problem_index]
    cross = cross_validate(Trainer(data), params or Params(), fold=fold, tell=tell)
    plain = -analytic_us(data)
    found: dict[str, Any] = {"all": summary(judge(data, cross.score))}
    for number, name in enumerate(names):
        rows = (fold == number)[data.problem_index] & is_whole
        found[name] = summary(judge(data, cross.score, rows))
        found[name]["analytic_mean"] = summary(judge(data, plain, rows)).get("mean")
    return found
