"""Ranks by the analytic model alone: always available, never trained."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.roofline import estimates_us
from tilewise.selection.choice import Ranked

CACHE_SPEEDUP = 4.0
"""How much faster than memory a cache takes the copies that some CPU kernels make of operands."""


class AnalyticRanker:
    """The roofline estimate of every kernel; ties keep the order of the pool."""

    path = "analytic"

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        return None

    def rank(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> list[Ranked]:
        flops, ranked = problem.flops, []
        for kernel, estimate in zip(kernels, estimates_us(kernels, problem, arch), strict=True):
            us = float(estimate) + _copy_us(kernel, problem, arch)
            ranked.append(Ranked(kernel, us, flops / us / 1e6))
        return sorted(ranked, key=lambda r: r.predicted_us)


def _copy_us(kernel: Kernel, problem: Problem, arch: Arch) -> float:
    """What packing operands costs, for kernels that say how much they pack."""
    copied: int = getattr(kernel, "copied_bytes", lambda _: 0)(problem)
    return copied / (CACHE_SPEEDUP * arch.memory_gb_s * 1e3)
