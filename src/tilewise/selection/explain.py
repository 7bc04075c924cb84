"""Why a kernel was chosen: what set it apart, who came second, and what is known nearby."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewise.core.compile_expr import Array
from tilewise.core.features import Rows
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, VENDOR_TIE, Model
from tilewise.core.problem import Problem
from tilewise.errors import NoKernelError
from tilewise.ops.columns import pool_rows
from tilewise.ops.contract import get_op
from tilewise.selection.asking import asker
from tilewise.selection.choice import TIE, Ranked
from tilewise.selection.opening import measured_problem
from tilewise.selection.selector import Selector

OTHERS = 48
"""Kernels that the chosen one is held against, spread over the ranking."""
NEAREST = 3
"""Measured problems that are named."""


def explain(
    selector: Selector,
    problem: Problem,
    *,
    top: int = 8,
    cost_us: Callable[[Kernel], float | None] | None = None,
) -> dict[str, Any]:
    """The choice for a problem and the grounds for it, JSON-ready.

    `cost_us` says what it costs to have a kernel serve beside its own time, None where it cannot;
    without it the op's own word on legality counts, and nothing is charged.
    """
    ranking = selector.rank(problem)
    legal = _able(ranking, cost_us or _as_it_is(selector, problem))
    if not legal:
        raise NoKernelError(
            f"none of {len(ranking)} kernels can serve {problem.to_dict()} on "
            f"{selector.arch.label}; `kernels check` says why"
        )
    first, *others = legal
    expected = selector.expect(problem)
    report: dict[str, Any] = {
        "problem": problem.to_dict(),
        "taken": _taken(legal),
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
    if others:
        handicaps = selector.model.handicaps([r.kernel for r in others])
        known = [r.kernel for r, taken in zip(others, handicaps, strict=True) if not taken]
        rivals = known[:: -(-len(known) // OTHERS)] or [others[0].kernel]
        second = others[0]
        gap = second.predicted_us / first.predicted_us - 1
        report |= {
            "runner_up": second.kernel.name,
            "expected_gap": gap,
            "is_tie": gap <= TIE,
            "moved_by": parts(selector, problem, first.kernel, rivals)[:top],
            "reasons": parts(selector, problem, first.kernel, [second.kernel])[:top],
        }
    return report


def _taken(ranking: Sequence[Ranked]) -> str:
    """What `select` takes: the fastest, or the vendor's routine where it is as good as that."""
    close = ranking[0].predicted_us * (1 + VENDOR_TIE)
    ties = [r.kernel for r in ranking if r.predicted_us <= close]
    return next((k for k in ties if k.engine == VENDOR), ties[0]).name


def _as_it_is(selector: Selector, problem: Problem) -> Callable[[Kernel], float | None]:
    why_unusable = get_op(selector.model.op).why_unusable
    return lambda k: 0.0 if why_unusable(k, problem, selector.arch) is None else None


def _able(ranking: Sequence[Ranked], cost_us: Callable[[Kernel], float | None]) -> list[Ranked]:
    """The kernels that can serve, fastest first when what they cost besides is counted."""
    found = []
    for ranked in ranking:
        extra = cost_us(ranked.kernel)
        if extra is not None:
            us = ranked.predicted_us + extra
            rate = ranked.predicted_tflops * ranked.predicted_us / us
            found.append(Ranked(ranked.kernel, us, rate))
    return sorted(found, key=lambda ranked: ranked.predicted_us)


def parts(
    selector: Selector, problem: Problem, chosen: Kernel, others: Sequence[Kernel]
) -> list[dict[str, Any]]:
    """How much each feature speaks for `chosen` against the others, in percent of speed.

    A feature's part is what the prediction loses, on average, when another kernel's value takes
    its place. Features that change nothing are left out. Kernels that another forest speaks of are
    passed over; where there are no others, what the two forests say is one part.
    """
    model = selector.model
    name = model.forest_of(chosen.engine)
    alike = [k for k in others if model.forest_of(k.engine) == name]
    tactic = asker(model.features, selector.kernels, selector.arch)(problem)
    rows = pool_rows(model, [chosen, *(alike or others)], selector.arch, problem, tactic)
    found = _swapped(model, name, rows) if alike else [_by_forest(model, rows, chosen, others[0])]
    if model.base:
        times = model.features.evaluate(rows, [model.base])[model.base]
        lost = model.share * float(np.log2(times[1:] / times[0]).mean())
        found.append(_part(model, model.base, times[0], times[1:], lost))
    moving = [part for part in found if abs(part["percent"]) >= 0.005]
    return sorted(moving, key=lambda part: -abs(part["percent"]))


def _swapped(model: Model, name: str, rows: Rows) -> list[dict[str, Any]]:
    """What each feature of the first row is worth against the others, by one forest."""
    forest, matrix = model.forests[name], model.forest_matrix(name, rows)
    own, others = matrix[0], matrix[1:]
    here = float(forest.predict(matrix[:1])[0])
    found = []
    for i, feature in enumerate(forest.features):
        if (others[:, i] != own[i]).any():
            swapped = np.repeat(matrix[:1], len(others), axis=0)
            swapped[:, i] = others[:, i]
            lost = here - float(forest.predict(swapped).mean())
            found.append(_part(model, feature, own[i], others[:, i], lost))
    return found


def _by_forest(model: Model, rows: Rows, chosen: Kernel, other: Kernel) -> dict[str, Any]:
    """What the forests of two kinds of kernel say beside what their scores start from."""
    said = model.scores(rows)
    if model.base:
        said = said + model.base_octaves(rows)
    percent = 100 * (2 ** float(said[0] - said[1:].mean()) - 1)
    return {
        "feature": "kernel_engine",
        "chosen": chosen.engine,
        "others": other.engine,
        "percent": percent,
    }


def _part(model: Model, name: str, own: float, others: Array, octaves: float) -> dict[str, Any]:
    source = model.features.features.get(name, "")
    words = model.features.words.get(source)  # the feature may be a field of text
    if words is None:
        values: tuple[Any, Any] = float(own), float(np.median(others))
    else:
        codes, counts = np.unique(others, return_counts=True)
        values = _word(own, words), _word(codes[counts.argmax()], words)
    return {
        "feature": name,
        "chosen": values[0],
        "others": values[1],
        "percent": 100 * (2**octaves - 1),
    }


def _word(code: float, words: Sequence[str]) -> str:
    return words[int(code) - 1] if 0 < code <= len(words) else "-"


def nearest_measured(selector: Selector, problem: Problem) -> list[dict[str, Any]]:
    """The measured problems closest to this one, and how well unseen choices did there."""
    measured = selector.model.measured
    far = np.sqrt(((measured.points - selector.coordinates(problem)) ** 2).sum(axis=1))
    return [
        {
            "problem": measured_problem(selector.model, int(i)).to_dict(),
            "distance_octaves": float(far[i]),
            "efficiency": None
            if np.isnan(measured.efficiency[i])
            else float(measured.efficiency[i]),
        }
        for i in np.argsort(far, kind="stable")[:NEAREST]
    ]
