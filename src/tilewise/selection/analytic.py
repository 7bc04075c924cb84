"""Ranks by the analytic model alone: always available, never trained."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.roofline import Estimates


class AnalyticRanker:
    """The roofline estimate of every kernel; ties keep the order of the pool."""

    path = "analytic"

    def __init__(self) -> None:
        self._held: dict[int, tuple[Sequence[Kernel], Estimates]] = {}

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        return None

    def caveat(self, arch: Arch) -> str | None:
        return None  # it knows devices by their figures alone

    def knows_vendor(self, kernel: Kernel) -> bool:
        return False  # it has no tiles to judge

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> None:
        """None: it knows kernels by their traits alone."""

    def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Array:
        """Microseconds, in the order given."""
        return self._estimates(problem.op, kernels)(problem, arch)

    def leaders_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> None:
        """None: ranking all is one evaluation."""

    def _estimates(self, op: str, kernels: Sequence[Kernel]) -> Estimates:
        """What is known of kernels before a problem is; a tuple is remembered."""
        held = self._held.get(id(kernels))
        if held is not None and held[0] is kernels:
            return held[1]
        made = Estimates(op, kernels)
        if isinstance(kernels, tuple):
            if len(self._held) >= 16:
                self._held.clear()
            self._held[id(kernels)] = (kernels, made)
        return made
