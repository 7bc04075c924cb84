"""AMD's published gfx950 measurements: import, train, score as AMD was scored, write the model.

    python benchmarks/amd_gfx950.py --data ck_gfx950_conv_fwd_bf16.csv [--model FOLDER] [--json]

Two protocols over the validation problems: a model trained on `training_20` alone, and five folds
of problems over all rows. Both never see a scored problem. Efficiency is the chosen kernel's TFLOPS
over the best kernel's, problem by problem as listed, in percent.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.arch import load_arch
from tilewise.data.importing import read_measurements
from tilewise.learn.cross import cross_validate
from tilewise.learn.dataset import Dataset, from_measurements
from tilewise.learn.fit import Trainer
from tilewise.learn.params import Params
from tilewise.learn.score import analytic_us
from tilewise.learn.train import save, train

VALIDATION = "validation_300"
PUBLISHED = {
    "AMD's shipped model, as published": (93.05, 96.80, 79.21),
    "reference recipe, training_20 only": (91.53, 95.71, 75.47),
    "reference recipe, 5-fold": (94.02, 98.20, 81.05),
}
PARAMS = Params()
Scores = dict[tuple[str, str], float]
"""(problem key, kernel name) -> score."""


def read(path: Path) -> tuple[Dataset, list[Any]]:
    """The rows as a data set and as they are listed."""
    found = read_measurements(path, load_arch("gfx950"), op="conv_fwd")
    if found.bad_lines:
        sys.exit(f"{len(found.bad_lines)} lines of {path} cannot be read: {found.bad_lines[0]}")
    return from_measurements(found.rows), found.rows


def efficiency(rows: list[Any], scores: Scores) -> dict[str, Any]:
    """Mean, median, P10, minimum and hits, for all problems and for those with whole results."""
    pools: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for row in rows:
        labels = json.loads(row.labels)
        if labels["source"] == VALIDATION:
            complete = json.loads(row.problem)["K"] % 16 == 0
            pools.setdefault((labels["problem_idx"], complete), []).append(
                (scores[row.problem_key, row.kernel], row.tflops)
            )
    report = {}
    for title, keep in (("all", (True, False)), ("complete", (True,))):
        e, top1, top5 = [], 0, 0
        for (_, complete), pool in pools.items():
            if complete in keep:
                best = max(t for _, t in pool)
                ranked = [t for _, t in sorted(pool, key=lambda item: -item[0])]
                e.append(100 * ranked[0] / best)
                top1 += ranked[0] == best
                top5 += max(ranked[:5]) == best
        report[title] = {
            "problems": len(e),
            "mean": round(float(np.mean(e)), 2),
            "median": round(float(np.median(e)), 2),
            "p10": round(float(np.percentile(e, 10)), 2),
            "min": round(min(e), 2),
            "top1": round(100 * top1 / len(e), 1),
            "top5": round(100 * top5 / len(e), 1),
        }
    return report


def by_pair(data: Dataset, score: np.ndarray) -> Scores:
    """Scores of rows under the names of what they are about."""
    return {
        (data.problems[p].key, data.kernels[k].name): float(s)
        for p, k, s in zip(data.problem_index, data.kernel_index, score, strict=True)
    }


def write_predictions(path: Path, rows: list[Any], scores: Scores) -> None:
    """A file of scores for an independent count."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["source", "problem_idx", "kernel", "score"])
        for row in rows:
            labels = json.loads(row.labels)
            score = scores[row.problem_key, row.kernel]
            out.writerow([labels["source"], labels["problem_idx"], row.kernel, repr(score)])


def protocols(
    data: Dataset, rows: list[Any], params: Params, tell: Callable[[str], None]
) -> dict[str, Scores]:
    """Scores of every row by a model of `training_20` alone, by five folds, and untrained."""
    trainer = Trainer(data)
    of_validation = {r.problem_key for r in rows if json.loads(r.labels)["source"] == VALIDATION}
    is_validation = np.array([p.key in of_validation for p in data.problems])[data.problem_index]
    tell("trained on training_20 alone")
    fitted = trainer.fit(~is_validation, params)
    alone = trainer.score(fitted, np.ones(len(data), bool))
    tell("five folds over all rows")
    folded = cross_validate(trainer, params, tell=tell).score
    found = {"training_20": alone, "folds": folded, "analytic": -analytic_us(data)}
    return {title: by_pair(data, score) for title, score in found.items()}


def make(path: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """Trains on all rows and writes the model with what both protocols say of its recipe."""
    data, rows = read(path)
    scores = protocols(data, rows, PARAMS, tell)
    report = {title: efficiency(rows, found) for title, found in scores.items()}
    write_model(data, PARAMS, folder, report, tell)


def write_model(
    data: Dataset, params: Params, folder: Path, report: Any, tell: Callable[[str], None]
) -> None:
    """Trains on all rows and writes the folder."""
    tell("the model of all rows")
    save(train(data, params, name=folder.name, tell=tell), data, folder, protocols=report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the published CSV")
    parser.add_argument("--model", type=Path, help="where to write the model folder")
    parser.add_argument("--predictions", type=Path, help="a folder for files of scores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tell = (lambda _: None) if options.json else (lambda text: print(f"  {text}", file=sys.stderr))
    params = replace(PARAMS, seed=options.seed)
    data, rows = read(options.data)
    scores = protocols(data, rows, params, tell)
    report = {title: efficiency(rows, found) for title, found in scores.items()}
    if options.predictions:
        options.predictions.mkdir(parents=True, exist_ok=True)
        for title in ("training_20", "folds"):
            write_predictions(options.predictions / f"{title}.csv", rows, scores[title])
    if options.model:
        write_model(data, params, options.model, report, tell)
    if options.json:
        print(json.dumps({"protocols": report, "published": PUBLISHED}, indent=1))
        return
    for title, parts in report.items():
        for which, r in parts.items():
            print(
                f"{title:12} {which:9} {r['problems']:4} problems: mean {r['mean']:.2f} median "
                f"{r['median']:.2f} P10 {r['p10']:.2f} min {r['min']:.2f} "
                f"top-1 {r['top1']:.1f} top-5 {r['top5']:.1f}"
            )
    for title, (mean, median, p10) in PUBLISHED.items():
        print(f"{title}: mean {mean:.2f} median {median:.2f} P10 {p10:.2f}")


if __name__ == "__main__":
    main()
