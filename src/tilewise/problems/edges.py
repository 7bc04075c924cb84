"""Edge dimensions: ones, primes, tiny sizes, neighbours of tile sizes, filters at their limits.

Nothing is drawn at random here: the same op always gives the same problems.
"""

from __future__ import annotations

from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.errors import ProblemError
from tilewise.ops.contract import get_op
from tilewise.problems.draw import Bounds
from tilewise.problems.problem_set import ProblemSet
from tilewise.problems.sampling import maker


def edge_problems(
    op: str, arch: Arch | None = None, *, dtype: str = "", **fixed: Any
) -> ProblemSet:
    """Every edge problem of an op that can exist and fits the memory of `arch`."""
    make = maker(op, dtype, **fixed)
    limits = Bounds.of(arch, dtype or "fp32", memory_share=0.5, max_ms=1000.0) if arch else None
    found, seen = ProblemSet(), set[Problem]()
    for family, fields in get_op(op).problems.edges():
        try:
            problem = make(**fields)
        except ProblemError:
            continue  # grids cross values freely; some crossings cannot exist
        if problem not in seen and (limits is None or limits.allow(problem)):
            seen.add(problem)
            found.add(problem, {"family": family})
    return found
