"""Problem sets drawn at random: seeded, without duplicates, within an architecture's limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import cycle
from random import Random
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.dtypes import OPERAND_DTYPES
from tilewise.core.problem import Problem, check_dtypes
from tilewise.errors import InputError
from tilewise.ops.contract import get_op
from tilewise.ops.draws import Draw
from tilewise.problems.draw import Bounds, distinct
from tilewise.problems.problem_set import ProblemSet


def families(op: str) -> dict[str, Draw]:
    """The named families of an op."""
    return dict(get_op(op).problems.families)


def sample(
    op: str,
    arch: Arch,
    count: int,
    *,
    dtype: str = "",
    seed: int = 0,
    align: int = 8,
    memory_share: float = 0.25,
    max_ms: float = 20.0,
    avoid: Collection[Problem] = (),
    **fixed: Any,
) -> ProblemSet:
    """`count` different problems with log-uniform sizes; the same seed gives the same ones.

    A longer sample starts with the shorter one. None takes more than `memory_share` of the
    memory of `arch` or more than `max_ms` at its peak, and none is in `avoid`.
    """
    problems = get_op(op).problems
    most = problems.largest
    if not 1 <= align <= most:
        raise InputError(f"align is {align}; it must be from 1 to {most}, the largest size drawn")
    limits = Bounds.of(arch, dtype or "fp32", memory_share=memory_share, max_ms=max_ms)
    return _round_robin(
        {"uniform": problems.uniform(align)},
        maker(op, dtype, **fixed),
        count,
        seed,
        limits,
        set(avoid),
    )


def wide_coverage(
    op: str,
    arch: Arch,
    count: int,
    *,
    dtype: str = "",
    seed: int = 0,
    only: Iterable[str] = (),
    memory_share: float = 0.25,
    max_ms: float = 20.0,
    avoid: Collection[Problem] = (),
    **fixed: Any,
) -> ProblemSet:
    """`count` different problems taken in turn from the families of an op, or from `only` some."""
    known = families(op)
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise InputError(f"{op} has no family {', '.join(unknown)}; it has {', '.join(known)}")
    chosen = {name: draw for name, draw in known.items() if not only or name in set(only)}
    limits = Bounds.of(arch, dtype or "fp32", memory_share=memory_share, max_ms=max_ms)
    return _round_robin(chosen, maker(op, dtype, **fixed), count, seed, limits, set(avoid))


def maker(op: str, dtype: str = "", **fixed: Any) -> Callable[..., Problem]:
    """Makes problems of `op` from fields, with `dtype` and `fixed` fields already set."""
    given = get_op(op)
    if dtype:
        # Raises where there is no such type; draws that fail are only drawn again.
        check_dtypes(dtype, "", OPERAND_DTYPES)
        fixed["dtype"] = dtype
    return partial(given.problem, **given.implied_fields, **fixed)


def _round_robin(
    draws: dict[str, Draw],
    make: Callable[..., Problem],
    count: int,
    seed: int,
    limits: Bounds,
    seen: set[Problem],
) -> ProblemSet:
    if count < 1:
        raise InputError(f"count is {count}; it must be at least 1")
    # A stream of its own for each family: a new family does not change what the others draw.
    streams = {
        name: distinct(draw, make, Random(f"{seed}/{name}"), limits, seen)
        for name, draw in draws.items()
    }
    found = ProblemSet()
    for name in cycle(list(streams)):
        if name in streams:
            problem = next(streams[name], None)
            if problem is None:
                del streams[name]
            else:
                found.add(problem, {"family": name})
        if len(found) == count:
            return found
        if not streams:
            break
    raise InputError(
        f"only {len(found)} different problems fit the limits ({limits.max_bytes:.3g} bytes, "
        f"{limits.max_flops:.3g} FLOPs each); {count} were asked for: ask for fewer, or allow more"
    )
