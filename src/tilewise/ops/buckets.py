"""Buckets that problems are sorted into, to see what a set of them covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Bucket = tuple[str, str]
"""An axis and one of its buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """One way to sort problems into named buckets."""

    name: str
    buckets: tuple[str, ...]
    bucket: Callable[[Any], str]
    is_paired: bool = True
    """Whether its buckets are crossed with those of other axes; not where sizes decide it."""


def by_size(name: str, of: Callable[[Any], int], *limits: int) -> Buckets:
    """Buckets of a number, cut before each of `limits`."""
    labels = [f"<{limits[0]}"] if limits[0] != 2 else ["1"]
    labels += [f"{low}-{high - 1}" for low, high in pairwise(limits)]
    labels.append(f">={limits[-1]}")

    def bucket(problem: Any) -> str:
        value = of(problem)
        return labels[sum(value >= limit for limit in limits)]

    return Buckets(name=name, buckets=tuple(labels), bucket=bucket)


def by_alignment(name: str, of: Callable[[Any], int]) -> Buckets:
    """Buckets of a number by the largest of some powers of two that divides it."""

    def bucket(problem: Any) -> str:
        value = of(problem)
        return next((f"x{step}" for step in (64, 8, 2) if value % step == 0), "odd")

    return Buckets(name=name, buckets=("x64", "x8", "x2", "odd"), bucket=bucket)


INTENSITY = replace(by_size("FLOP/byte", lambda p: int(p.intensity), 8, 64, 256), is_paired=False)


def excluded(axis: str, bucket: str, other: str, *buckets: str) -> list[frozenset[Bucket]]:
    """Pairs of buckets that exclude each other whatever the sizes."""
    return [frozenset({(axis, bucket), (other, each)}) for each in buckets]
