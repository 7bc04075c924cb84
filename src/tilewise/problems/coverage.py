"""How well a problem set covers an op: counts per bucket, and the buckets that stand empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One way to sort problems into named buckets."""

    name: str
    buckets: tuple[str, ...]
    bucket: Callable[[Any], str]
    is_paired: bool = True
    """Whether its buckets are crossed with those of other axes; not where sizes decide it."""


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


def _edges(name: str, of: Callable[[Any], int], *limits: int) -> Axis:
    """Buckets of a number, cut before each of `limits`."""
    labels = [f"<{limits[0]}"] if limits[0] != 2 else ["1"]
    labels += [f"{low}-{high - 1}" for low, high in pairwise(limits)]
    labels.append(f">={limits[-1]}")

    def bucket(problem: Any) -> str:
        value = of(problem)
        return labels[sum(value >= limit for limit in limits)]

    return Axis(name=name, buckets=tuple(labels), bucket=bucket)


def _alignment(value: int) -> str:
    return next((f"x{step}" for step in (64, 8, 2) if value % step == 0), "odd")


_ALIGNMENTS = ("x64", "x8", "x2", "odd")

_INTENSITY = replace(_edges("FLOP/byte", lambda p: int(p.intensity), 8, 64, 256), is_paired=False)

_GEMM_AXES = (
    _edges("M", lambda p: p.m, 2, 32, 256, 4096),
    _edges("N", lambda p: p.n, 2, 32, 256, 4096),
    _edges("K", lambda p: p.k, 2, 64, 512, 4096),
    _edges("batch", lambda p: p.batch, 2),
    Axis(name="N alignment", buckets=_ALIGNMENTS, bucket=lambda p: _alignment(p.n)),
    Axis(name="K alignment", buckets=_ALIGNMENTS, bucket=lambda p: _alignment(p.k)),
    _INTENSITY,
)


def _kind(p: ConvProblem) -> str:
    return "depthwise" if p.is_depthwise else "dense" if p.g == 1 else "grouped"


def _filter(p: ConvProblem) -> str:
    largest = max(p.z, p.y, p.x)
    return "1" if p.taps == 1 else "3" if largest == 3 else "2" if largest == 2 else "5 and more"


_CONV_AXES = (
    Axis(name="dimensions", buckets=("1", "2", "3"), bucket=lambda p: str(p.ndim)),
    Axis(name="kind", buckets=("dense", "grouped", "depthwise"), bucket=_kind),
    Axis(name="filter", buckets=("1", "2", "3", "5 and more"), bucket=_filter),
    _edges("stride", lambda p: max(p.stride_d, p.stride_h, p.stride_w), 2),
    _edges("dilation", lambda p: max(p.dilation_d, p.dilation_h, p.dilation_w), 2),
    _edges("N", lambda p: p.n, 2, 8, 32),
    _edges("C", lambda p: p.c, 8, 64, 256, 1024),
    _edges("K", lambda p: p.k, 8, 64, 256, 1024),
    _edges("image", lambda p: max(p.h, p.w), 8, 32, 128),
    Axis(name="C/G alignment", buckets=_ALIGNMENTS, bucket=lambda p: _alignment(p.c // p.g)),
    Axis(name="K/G alignment", buckets=_ALIGNMENTS, bucket=lambda p: _alignment(p.k // p.g)),
    _INTENSITY,
)

Bucket = tuple[str, str]


def _excluded(axis: str, bucket: str, other: str, *buckets: str) -> list[frozenset[Bucket]]:
    return [frozenset({(axis, bucket), (other, each)}) for each in buckets]


_IMPOSSIBLE = frozenset(
    _excluded("N", "1", "N alignment", "x64", "x8", "x2")
    + _excluded("N", "2-31", "N alignment", "x64")
    + _excluded("K", "1", "K alignment", "x64", "x8", "x2")
    + _excluded("K", "2-63", "K alignment", "x64")
    + _excluded("C", "<8", "C/G alignment", "x64", "x8")
    + _excluded("C", "8-63", "C/G alignment", "x64")
    + _excluded("K", "<8", "K/G alignment", "x64", "x8")
    + _excluded("K", "8-63", "K/G alignment", "x64")
    + _excluded("kind", "depthwise", "C/G alignment", "x64", "x8", "x2")
    # A single tap has nothing to spread.
    + _excluded("dilation", ">=2", "filter", "1")
)
"""Pairs of buckets that exclude each other whatever the sizes."""


def coverage(problems: Iterable[Problem]) -> Coverage:
    """The coverage report of problems of one op (any direction of a convolution)."""
    listed = list(problems)
    axes = _axes_of(listed)
    singles: Counter[Bucket] = Counter()
    pairs: Counter[tuple[Bucket, Bucket]] = Counter()
    for problem in listed:
        places = [(axis.name, axis.bucket(problem)) for axis in axes]
        singles.update(places)
        pairs.update(combinations(places, 2))
    possible = [pair for pair in _all_pairs(axes) if frozenset(pair) not in _IMPOSSIBLE]
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


def _axes_of(problems: Sequence[Problem]) -> tuple[Axis, ...]:
    if not problems:
        raise InputError("there is no problem to report on")
    for kind, axes in ((GemmProblem, _GEMM_AXES), (ConvProblem, _CONV_AXES)):
        if all(isinstance(p, kind) for p in problems):
            return axes
    raise InputError("GEMMs and convolutions have different buckets; report on one op at a time")


def _all_pairs(axes: Sequence[Axis]) -> Iterable[tuple[Bucket, Bucket]]:
    for a, b in combinations([axis for axis in axes if axis.is_paired], 2):
        for one, other in product(a.buckets, b.buckets):
            yield (a.name, one), (b.name, other)


def _named(axis: str, bucket: str) -> str:
    return f"{axis}{bucket}" if bucket[0] in "<>" else f"{axis}={bucket}"
