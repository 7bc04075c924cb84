"""How a model chose on problems it was never trained on, problem by problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.compile_expr import Array
from tilewise.core.identity import canonical_json
from tilewise.core.model import Model, load_model
from tilewise.core.problem import Problem, spell_problem
from tilewise.core.sealed import SealedFolder
from tilewise.errors import InputError
from tilewise.learn.dataset import Dataset
from tilewise.learn.evaluate import evaluate, model_scores
from tilewise.learn.judging import worst
from tilewise.learn.score import Judgement, as_chosen, judge
from tilewise.ops.contract import get_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was chosen, and how well predictions fit; empty parts could not be had."""

    efficiency: Array
    """Of every problem that could be judged, 1 being the oracle's."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Judged problems with what was chosen, what was best and why, the worst first."""
    ratio: Array = field(default_factory=lambda: np.zeros(0))
    """Predicted over measured time of every judged reading."""
    measured_us: Array = field(default_factory=lambda: np.zeros(0))
    how: str
    """By which problems the model is judged, in words."""


def choices(folder: Path, data: Dataset) -> Judged:
    """By out-of-fold predictions where the folder has them, else by what the model kept of them."""
    if not SealedFolder(folder).holds("oof.parquet"):
        return _without_predictions(load_model(folder), data)
    found = evaluate(folder, data)
    chosen = as_chosen(data, found.score)
    outcome = judge(data, chosen, found.rows)
    use = found.rows & data.is_ok
    return Judged(
        efficiency=outcome.efficiency,
        rows=_rows(data, outcome, found.predicted_us),
        ratio=found.predicted_us[use] / data.time_us[use],
        measured_us=data.time_us[use],
        how=_how(found.out_of_fold, found.unseen),
    )


def _without_predictions(model: Model, data: Dataset) -> Judged:
    """Problems that the model never saw, by its choices today; the others as it noted them."""
    noted = dict(zip(model.measured.problems, model.measured.efficiency.tolist(), strict=True))
    texts = [canonical_json(p.to_dict()) for p in data.problems]
    kept = [at for at, text in enumerate(texts) if np.isfinite(noted.get(text, np.nan))]
    is_new = np.array([text not in noted for text in texts])
    rows = is_new[data.problem_index] & data.is_whole[data.problem_index]
    if not rows.any() and not kept:
        raise InputError(
            f"{model.name} was trained on all {len(data.problems)} problems and kept no judgement "
            "of them; `train` it again, or report on a store that it has not seen"
        )
    how = _how(len(kept), 0, " (as noted in training)")
    efficiency = np.array([noted[texts[at]] for at in kept], np.float64)
    listed = _noted_rows(data, kept, efficiency)
    if not rows.any():
        return Judged(efficiency=efficiency, rows=listed, how=how)
    score, predicted_us = model_scores(model, data)
    outcome = judge(data, as_chosen(data, score), rows)
    use = rows & data.is_ok
    listed += _rows(data, outcome, predicted_us)
    return Judged(
        efficiency=np.concatenate([efficiency, outcome.efficiency]),
        rows=sorted(listed, key=lambda row: float(row["efficiency"])),
        ratio=predicted_us[use] / data.time_us[use],
        measured_us=data.time_us[use],
        how=_how(len(kept), len(outcome.problems), " (as noted in training)"),
    )


def _how(out_of_fold: int, unseen: int, since: str = "") -> str:
    """By which problems a model is judged."""
    parts = []
    if out_of_fold:
        parts.append(f"{out_of_fold:,} problems out of fold{since}")
    if unseen:
        parts.append(f"{unseen:,} problems that it was never trained on")
    return f"judged on {' and '.join(parts) or 'no problem'}"


def _noted_rows(data: Dataset, kept: list[int], efficiency: Array) -> list[dict[str, Any]]:
    """Problems whose efficiency alone is known, with what was fastest."""
    best = {
        int(data.problem_index[row]): row
        for row in np.flatnonzero(data.is_ok & (data.time_us <= data.best_us[data.problem_index]))
    }
    rows = [
        {
            "words": _words(data.problems[at]),
            "efficiency": round(100 * float(share), 2),
            "chosen": "",
            "chosen_us": None,
            "best": data.kernels[data.kernel_index[best[at]]].name if at in best else "",
            "best_us": round(float(data.best_us[at]), 4) if at in best else None,
            "why": "",
        }
        for at, share in zip(kept, efficiency, strict=True)
    ]
    return sorted(rows, key=lambda row: float(row["efficiency"]))


def _rows(data: Dataset, outcome: Judgement, predicted_us: Array) -> list[dict[str, Any]]:
    """Every judged problem, with its words."""
    make = get_op(data.op).problem.from_dict
    found = worst(data, outcome, predicted_us, len(outcome.problems))
    for row in found:
        row["words"] = _words(make(row["problem"]))
    return found


def _words(problem: Problem) -> str:
    return f"{spell_problem(problem)} {problem.dtype}"
