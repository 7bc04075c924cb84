"""New problems near those that a model gets wrong, so that the next sweep measures there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from random import Random
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.errors import InputError, ProblemError
from tilewise.ops.contract import get_op
from tilewise.problems.draw import Bounds
from tilewise.problems.problem_set import ProblemSet

_FACTORS = (1 / 2, 2 / 3, 3 / 4, 7 / 8, 9 / 8, 5 / 4, 4 / 3, 3 / 2, 2)


def augment(
    worst: Sequence[tuple[Problem, float]],
    count: int,
    *,
    arch: Arch | None = None,
    seed: int = 0,
    avoid: Collection[Problem] = (),
) -> ProblemSet:
    """`count` new problems near the given ones, most near those of the lowest efficiency.

    `worst` pairs problems with their out-of-fold efficiency, 1 being the oracle's. One or two
    sizes of a problem are scaled by at most two; multiples of 8 stay multiples, and what makes it
    the layer it is (filter, stride, groups, layout) stays. Labels tell which problem is near.
    """
    weights = [_weight(problem, efficiency) for problem, efficiency in worst]
    if count < 1:
        raise InputError(f"count is {count}; it must be at least 1")
    if not any(weights):
        raise InputError("no problem is below an efficiency of 1; there is nothing to improve")
    rng = Random(seed)
    seen = {problem for problem, _ in worst} | set(avoid)
    found = ProblemSet()
    misses = 0
    while len(found) < count:
        (problem, efficiency), *_ = rng.choices(worst, weights)
        near = _neighbour(problem, rng)
        limits = Bounds.of(arch, problem.dtype) if arch else None
        if near is None or near in seen or (limits and not limits.allow(near)):
            misses += 1
            if misses > 1000 + 100 * count:
                raise InputError(f"only {len(found)} new problems exist nearby, not {count}")
            continue
        seen.add(near)
        found.add(near, {"near": problem.key[:12], "near_efficiency": round(efficiency, 4)})
    return found


def as_efficiency(value: Any) -> float:
    """The number that a file gives; raises where it is no efficiency."""
    try:
        efficiency = float(value)
    except (TypeError, ValueError):
        efficiency = -1.0
    if not 0 <= efficiency <= 1.000001:
        raise InputError(f"efficiency is {value!r}; it must be a number between 0 and 1")
    return efficiency


def _weight(problem: Problem, efficiency: float) -> float:
    return 0.0 if problem.is_empty else max(0.0, 1 - as_efficiency(efficiency))


def _neighbour(problem: Problem, rng: Random) -> Problem | None:
    """The problem with one or two sizes changed; None where no such problem exists."""
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    given = get_op(problem.op).problems
    # A size of one is a kind of its own (a vector, a 2-D image), not a small number.
    growable = [name for name in given.sizes if values[name] > 1]
    for name in rng.sample(growable, k=min(len(growable), rng.choice((1, 1, 2)))):
        values |= given.scaled(values, name, rng.choice(_FACTORS))
    try:
        return type(problem)(**values)
    except ProblemError:
        return None
