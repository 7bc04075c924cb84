"""Why a kernel was chosen: what set it apart, who came second, and what is known nearby."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.contract import get_op
from tilewise.ops.rows import pool_rows
from tilewise.selection.selector import Selector


def explain(selector: Selector, problem: Problem, *, top: int = 8) -> dict[str, Any]:
    """The choice for a problem and the grounds for it, JSON-ready."""
    why_unusable = get_op(selector.model.op).why_unusable
    ranking = selector.rank(problem)
    legal = [r for r in ranking if why_unusable(r.kernel, problem, selector.arch) is None]
    first = legal[0]
    second = legal[1] if len(legal) > 1 else None
    expected = selector.expect(problem)
    report: dict[str, Any] = {
        "problem": problem.to_dict(),
        "kernel": first.kernel.name,
        "predicted_us": first.predicted_us,
        "predicted_tflops": first.predicted_tflops,
        "candidates": len(legal),
        "rejected": len(ranking) - len(legal),
        "is_familiar": expected.is_familiar,
        "distance_octaves": expected.distance,
        "reach_octaves": expected.reach,
        "expected_efficiency": expected.efficiency,
        "uncertainty": expected.uncertainty,
        "nearest": nearest_measured(selector, problem),
    }
    if second is not None:
        report["runner_up"] = second.kernel.name
        report["expected_gap"] = second.predicted_us / first.predicted_us - 1
        report["reasons"] = reasons(selector, problem, first.kernel, second.kernel)[:top]
    return report


def reasons(
    selector: Selector, problem: Problem, chosen: Kernel, other: Kernel
) -> list[dict[str, Any]]:
    """How much each feature speaks for `chosen` against `other`, in percent of speed.

    A feature's part is what the prediction loses when the other kernel's value takes its place.
    """
    model = selector.model
    rows = pool_rows(model, [chosen, other], selector.arch, problem)
    forest = model.forests["rank"]
    matrix = model.forest_matrix("rank", rows)
    swapped = np.repeat(matrix[:1], matrix.shape[1], axis=0)
    np.fill_diagonal(swapped, matrix[1])
    score = forest.predict(np.vstack([matrix[:1], swapped]))
    parts: Array = score[0] - score[1:]
    found = [
        _reason(name, float(matrix[0, i]), float(matrix[1, i]), float(parts[i]))
        for i, name in enumerate(forest.features)
        if matrix[0, i] != matrix[1, i]
    ]
    if model.has_base:
        times = model.features.evaluate(rows, ["calibrated_us"])["calibrated_us"]
        gap = float(np.log2(times[1] / times[0]))
        found.append(_reason("calibrated_us", float(times[0]), float(times[1]), gap))
    return sorted(found, key=lambda r: -abs(r["percent"]))


def _reason(name: str, chosen: float, other: float, octaves: float) -> dict[str, Any]:
    return {
        "feature": name,
        "chosen": chosen,
        "runner_up": other,
        "percent": 100 * (2**octaves - 1),
    }


def nearest_measured(selector: Selector, problem: Problem, count: int = 3) -> list[dict[str, Any]]:
    """The measured problems closest to this one, and how well unseen choices did there."""
    measured = selector.model.measured
    far = np.sqrt(((measured.points - selector.coordinates(problem)) ** 2).sum(axis=1))
    return [
        {
            "problem": json.loads(measured.problems[i]),
            "distance_octaves": float(far[i]),
            "efficiency": None
            if np.isnan(measured.efficiency[i])
            else float(measured.efficiency[i]),
        }
        for i in np.argsort(far, kind="stable")[:count]
    ]
