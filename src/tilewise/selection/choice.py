"""What a selection gives: the kernel, why it was chosen, and everything ranked behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem


@dataclass(frozen=True, slots=True)
class Ranked:
    """A kernel with its predicted speed."""

    kernel: Kernel
    predicted_us: float
    predicted_tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The outcome of one selection."""

    problem: Problem
    kernel: Kernel
    path: str
    """Who chose: `model`, `analytic`, `vendor` (the last resort) or `empty` (no work)."""
    reason: str
    ranking: tuple[Ranked, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Kernel name -> why it cannot serve."""

    @property
    def predicted_tflops(self) -> float:
        """What the chosen kernel is expected to reach; 0 where nothing was predicted."""
        return next((r.predicted_tflops for r in self.ranking if r.kernel == self.kernel), 0.0)

    @property
    def predicted_us(self) -> float:
        """How long the chosen kernel is expected to take; 0 where nothing was predicted."""
        return next((r.predicted_us for r in self.ranking if r.kernel == self.kernel), 0.0)


class Ranker(Protocol):
    """Anything that can order kernels for a problem."""

    path: str

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        """Why this ranker should not be asked about a problem, or None."""

    def rank(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> list[Ranked]:
        """All kernels, fastest first."""
