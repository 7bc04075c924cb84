"""Drawing problems that are new and within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.errors import InputError, ProblemError
from tilewise.ops.draws import Draw

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
