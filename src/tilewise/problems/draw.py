"""Random draws that samplers share, and the limits that every drawn problem keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.errors import InputError, ProblemError

Draw = Callable[[Random], Mapping[str, Any]]
"""One random choice of problem fields; choices that cannot exist are drawn again."""

_PATIENCE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a drawn problem may cost at most."""

    max_bytes: int
    max_flops: float

    @classmethod
    def of(
        cls, arch: Arch, dtype: str, *, memory_share: float = 0.25, max_ms: float = 20.0
    ) -> Bounds:
        """A share of the memory of `arch`, and `max_ms` at its peak for `dtype`."""
        if not 0 < memory_share <= 1:
            raise InputError(f"memory_share is {memory_share}; it must be above 0, at most 1")
        if not max_ms > 0:
            raise InputError(f"max_ms is {max_ms}; it must be above 0")
        peak = arch.peak_tflops.get(dtype, arch.peak_tflops["fp32"])
        return cls(max_bytes=int(arch.memory_bytes * memory_share), max_flops=peak * 1e9 * max_ms)

    def allow(self, problem: Problem) -> bool:
        return 0 < problem.flops <= self.max_flops and problem.bytes <= self.max_bytes


def log_uniform(rng: Random, low: int, high: int, align: int = 1) -> int:
    """A multiple of `align` between `low` and `high`, every octave equally likely."""
    value = exp(rng.uniform(log(low), log(high + 1)))
    least, most = -(-low // align), high // align
    return align * min(most, max(least, round(value / align)))


def distinct(
    draw: Draw,
    make: Callable[..., Problem],
    rng: Random,
    limits: Bounds,
    seen: set[Problem],
) -> Iterator[Problem]:
    """New problems within limits until `draw` has nothing new to offer; `seen` grows along."""
    failures = 0
    while failures < _PATIENCE:
        try:
            problem = make(**draw(rng))
        except ProblemError:
            failures += 1
            continue
        if problem in seen or not limits.allow(problem):
            failures += 1
            continue
        failures = 0
        seen.add(problem)
        yield problem


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def prime_near(n: int) -> int:
    """The largest prime up to `n`, or 2."""
    while n > 2 and not is_prime(n):
        n -= 1
    return max(2, n)
