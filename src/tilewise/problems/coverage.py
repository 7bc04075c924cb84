"""How well a problem set covers an op: counts per bucket, and the buckets that stand empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.ops.buckets import Bucket, Buckets
from tilewise.ops.contract import Problems, get_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts per axis and bucket, and every empty bucket or pair that could be filled."""

    problems: int
    distinct: int
    axes: dict[str, dict[str, int]]
    holes: list[str]
    """Empty buckets, as `axis=bucket`."""
    pair_holes: list[str]
    """Empty pairs of buckets, neither of them empty, as `axis=bucket & axis=bucket`."""
    pairs: int
    """How many pairs of buckets can exist."""
    filled: int
    """How many of them hold a problem."""

    @property
    def pair_share(self) -> float:
        """The share of pairs that hold a problem."""
        return self.filled / self.pairs

    def to_dict(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "distinct": self.distinct,
            "pair_share": round(self.pair_share, 4),
            "axes": self.axes,
            "holes": self.holes,
            "pair_holes": self.pair_holes,
        }


def coverage(problems: Iterable[Problem]) -> Coverage:
    """The coverage report of problems of one op (any direction of a convolution)."""
    listed = list(problems)
    space = _space_of(listed)
    axes = space.axes
    singles: Counter[Bucket] = Counter()
    pairs: Counter[tuple[Bucket, Bucket]] = Counter()
    for problem in listed:
        places = [(axis.name, axis.bucket(problem)) for axis in axes]
        singles.update(places)
        pairs.update(combinations(places, 2))
    possible = [pair for pair in _all_pairs(axes) if frozenset(pair) not in space.excluded]
    empty = [pair for pair in possible if pair not in pairs]
    return Coverage(
        problems=len(listed),
        distinct=len(set(listed)),
        axes={axis.name: {b: singles[axis.name, b] for b in axis.buckets} for axis in axes},
        holes=[_named(a.name, b) for a in axes for b in a.buckets if not singles[a.name, b]],
        pair_holes=[f"{_named(*a)} & {_named(*b)}" for a, b in empty if singles[a] and singles[b]],
        pairs=len(possible),
        filled=len(possible) - len(empty),
    )


def _space_of(problems: Sequence[Problem]) -> Problems:
    if not problems:
        raise InputError("there is no problem to report on")
    if len({type(problem) for problem in problems}) > 1:
        ops = ", ".join(sorted({problem.op for problem in problems}))
        raise InputError(f"{ops} have different buckets; report on one op at a time")
    return get_op(problems[0].op).problems


def _all_pairs(axes: Sequence[Buckets]) -> Iterable[tuple[Bucket, Bucket]]:
    for a, b in combinations([axis for axis in axes if axis.is_paired], 2):
        for one, other in product(a.buckets, b.buckets):
            yield (a.name, one), (b.name, other)


def _named(axis: str, bucket: str) -> str:
    return f"{axis}{bucket}" if bucket[0] in "<>" else f"{axis}={bucket}"
