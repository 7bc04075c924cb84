"""A fast selector of one pool by a trained model, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.errors import InputError, NoKernelError
from tilewise.forks import make_lock
from tilewise.ops.columns import pool_rows
from tilewise.ops.contract import get_op
from tilewise.selection.choice import Ranked, Scores
from tilewise.selection.compiled import CompiledScorer
from tilewise.selection.opening import open_model
from tilewise.selection.scorer import Scorer, make_scorer

REMEMBERED = 65536
ALIKE = 1.1
"""Figures of two devices this close are the same."""
_NEARBY = 8
"""Measured problems that tell what to expect of another."""
_FEW = 256
"""Below this many kernels a plain loop puts them in order faster than NumPy."""


def why_foreign(model: Model, problem: Problem, arch: Arch) -> str | None:
    """Why a model was not made for a problem on an architecture, or None."""
    if problem.op != model.op:
        return f"the model is for {model.op}, the problem is {problem.op}"
    if arch.name != model.arch:
        return f"the model is for {model.arch}, the architecture is {arch.name}"
    if problem.dtype not in model.dtypes:
        return f"the model knows {', '.join(model.dtypes)}, the problem is {problem.dtype}"
    return None


def how_different(model: Model, arch: Arch) -> str | None:
    """How a device differs from those that a model was trained on, the most alike of them, or None.

    Predicted times follow the figures of the device; what they do not say is not foreseen.
    """
    return min((_apart(trained, arch) for trained in model.stands), key=len) or None


def _apart(trained: Arch, arch: Arch) -> str:
    """The figures in which two devices differ."""
    changes = []
    for figure, unit in (("compute_units", "units"), ("clock_mhz", "MHz"), ("memory_gb_s", "GB/s")):
        then, now = float(getattr(trained, figure)), float(getattr(arch, figure))
        if max(then, now) > ALIKE * min(then, now):
            changes.append(f"{now:g} {unit} instead of {then:g}")
    return ", ".join(changes)


def caveat(model: Model, arch: Arch) -> str | None:
    """What to say with predictions for a device that a model did not learn from, or None."""
    different = how_different(model, arch)
    if different is None:
        return None
    return f"{model.name} learned on another device (here {different}); times are scaled to match"


@dataclass(frozen=True, slots=True)
class Expectation:
    """How much a selection can be trusted, from the measured problems around it."""

    distance: float
    """Octaves to the nearest measured problem."""
    reach: float
    """The distance up to which the model may be asked."""
    efficiency: float
    """Chosen over best that unseen problems nearby reached, weighted by closeness."""
    uncertainty: float
    """How far that may be off: its spread nearby."""

    @property
    def is_familiar(self) -> bool:
        return self.distance <= self.reach


def expectation(model: Model, here: Array) -> Expectation:
    """What to expect at the coordinates `here`."""
    far = np.sqrt(((model.measured.points - here) ** 2).sum(axis=1))
    known = np.isfinite(model.measured.efficiency)
    order = np.argsort(np.where(known, far, np.inf), kind="stable")[:_NEARBY]
    weight = 1 / (0.5 + far[order])
    values = model.measured.efficiency[order]
    mean = float(np.average(values, weights=weight))
    spread = float(np.sqrt(np.average((values - mean) ** 2, weights=weight)))
    distance = float(far.min())
    # Beyond the measured problems nothing vouches for the estimate.
    beyond = max(0.0, distance - model.measured.reach) * 0.1
    return Expectation(distance, model.measured.reach, mean, spread + beyond)


class Selector:
    """Ranks one fixed pool for problems of one op on one architecture; safe to share.

    `kernels` beyond legality for a problem are passed over when a kernel is selected.
    """

    def __init__(
        self,
        model: Model | Path | str,
        kernels: Sequence[Kernel],
        arch: Arch | None = None,
        *,
        compiled: bool | None = None,
    ) -> None:
        self.model = model if isinstance(model, Model) else open_model(model)
        self.arch = self.model.figures_for(arch)
        self.kernels = tuple(kernels)
        if not self.kernels:
            raise NoKernelError("the pool is empty; there is nothing to select from")
        for kernel in self.kernels:
            if kernel.op != self.model.op:
                raise InputError(f"{kernel.name} computes {kernel.op}, the model {self.model.op}")
        self.scorer: Scorer = make_scorer(self.model, self.kernels, self.arch, compiled=compiled)
        self._pool = np.empty(len(self.kernels), object)
        self._pool[:] = self.kernels
        self.lock = make_lock()
        self._chosen: dict[Problem, Kernel] = {}

    def scores(self, problem: Problem) -> Scores:
        """Everything the scorer says."""
        with self.lock:
            return self.scorer(problem)

    def ranking(self, problem: Problem) -> list[Kernel]:
        """The pool, fastest first, whether or not each kernel can serve the problem."""
        with self.lock:
            scorer = self.scorer
            if isinstance(scorer, CompiledScorer):
                scorer.rank(problem)
                order = scorer.order[: scorer.count]
                if scorer.count < _FEW:
                    kernels = self.kernels
                    return [kernels[i] for i in order.tolist()]
                return list(self._pool[order])
            return list(self._pool[scorer(problem).order])

    def select(self, problem: Problem) -> Kernel:
        """The fastest kernel that can serve; remembered."""
        kernel = self._chosen.get(problem)
        if kernel is None:
            kernel = self._first_legal(problem)
            if len(self._chosen) >= REMEMBERED:
                self._chosen.clear()
            self._chosen[problem] = kernel
        return kernel

    def _first_legal(self, problem: Problem) -> Kernel:
        why_unusable = get_op(self.model.op).why_unusable
        reasons: dict[str, str] = {}
        for kernel in self.ranking(problem):
            why = why_unusable(kernel, problem, self.arch)
            if why is None:
                return kernel
            reasons[kernel.name] = why
        raise NoKernelError(
            f"none of {len(self.kernels)} kernels can serve {problem.to_dict()} on "
            f"{self.arch.label}",
            asked=str(problem),
            reasons=reasons,
        )

    def rank(self, problem: Problem, top_k: int | None = None) -> list[Ranked]:
        """The ranking with predicted times."""
        found = self.scores(problem)
        order = found.order[:top_k]
        times = np.exp2(found.level - found.score[order]).tolist()
        flops = problem.flops
        return [
            Ranked(self.kernels[i], us, flops / us * 1e-6)
            for i, us in zip(order.tolist(), times, strict=True)
        ]

    def coordinates(self, problem: Problem) -> Array:
        """Where a problem lies among the measured ones."""
        rows = pool_rows(self.model, self.kernels[:1], self.arch, problem)
        found = self.model.features.evaluate(rows, self.model.measured.axes)
        return np.array([found[a][0] for a in self.model.measured.axes])

    def expect(self, problem: Problem) -> Expectation:
        """How much a selection for this problem can be trusted."""
        return expectation(self.model, self.coordinates(problem))
