"""Ranks by the analytic model alone: always available, never trained."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.roofline import estimates_us
from tilewise.selection.choice import Ranked


class AnalyticRanker:
    """The roofline estimate of every kernel; ties keep the order of the pool."""

    path = "analytic"

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        return None

    def rank(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> list[Ranked]:
        times = estimates_us(kernels, problem, arch).tolist()
        flops = problem.flops
        ranked = [
            Ranked(kernel, us, flops / us / 1e6) for kernel, us in zip(kernels, times, strict=True)
        ]
        return sorted(ranked, key=lambda r: r.predicted_us)
