"""Random draws and notable sizes that the problem families of all ops are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, log
from random import Random
from typing import Any

Draw = Callable[[Random], Mapping[str, Any]]
"""One random choice of problem fields; choices that cannot exist are drawn again."""
Fields = Mapping[str, Any]

TINY = (1, 2, 3, 5, 8)
PRIMES = (7, 13, 31, 61, 127, 251, 509, 1021, 2039)
BESIDE_TILES = tuple(t + d for t in (16, 32, 64, 128, 256) for d in (-1, 1))


def log_uniform(rng: Random, low: int, high: int, align: int = 1) -> int:
    """A multiple of `align` between `low` and `high`, every octave equally likely."""
    value = exp(rng.uniform(log(low), log(high + 1)))
    least, most = -(-low // align), high // align
    return align * min(most, max(least, round(value / align)))


def scaled(values: Fields, name: str, factor: float) -> dict[str, int]:
    """The field `name` scaled, keeping its divisibility by 8."""
    step = 8 if values[name] % 8 == 0 else 1
    return {name: max(step, step * round(values[name] * factor / step))}


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def prime_near(n: int) -> int:
    """The largest prime up to `n`, or 2."""
    while n > 2 and not is_prime(n):
        n -= 1
    return max(2, n)
