"""A model as a dispatcher's ranker, for whatever kernels it is handed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.errors import printable
from tilewise.forks import make_rlock
from tilewise.selection.analytic import AnalyticRanker
from tilewise.selection.choice import Ranked
from tilewise.selection.compiled import CompiledScorer
from tilewise.selection.opening import measured_kernels, open_model
from tilewise.selection.selector import Selector, caveat, why_foreign
from tilewise.selection.unfamiliar import note

T = TypeVar("T")
log = logging.getLogger("tilewise")

MOST_KERNELS = 1 << 16
"""A pool that has grown beyond this is started anew."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Kernels as they were handed over, and where a selector has them."""

    kernels: tuple[Kernel, ...]
    arch: Arch
    selector: Selector
    places: NDArray[np.int64]
    """Of these kernels among the selector's."""
    asked: NDArray[np.uint8]
    """Which of the selector's kernels these are."""
    place_of: NDArray[np.int64]
    """Of the selector's kernels among these."""


class ModelRanker:
    """Predicts by a model. Kernels are known by value, a tuple given again by identity."""

    path = "model"

    def __init__(self, model: Model | Path | str, *, compiled: bool | None = None) -> None:
        self.model = model if isinstance(model, Model) else open_model(model)
        self._compiled = compiled
        self._trained = frozenset(self.model.manifest.get("kernels", ()))
        self._lock = make_rlock()
        self._selectors: dict[Arch, Selector] = {}
        self._caveats: dict[Arch, str | None] = {}
        self._places: dict[Arch, dict[Kernel, int]] = {}
        self._pools: dict[int, _Pool] = {}

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        """Another op, dtype or architecture, or a problem far from everything measured."""
        why = why_foreign(self.model, problem, arch)
        if why is not None:
            return why
        with self._lock:
            selector = self._selectors.get(arch) or self._grown(arch, ())
            with selector.lock:
                if selector.scorer.is_near(problem, self.model.measured.reach):
                    return None
                distance, _ = selector.scorer.nearest(problem)
        log.info("%s is unfamiliar to %s (%.1f octaves)", problem, self.model.name, distance)
        note(problem)
        return (
            f"the nearest measured problem is {distance:.1f} octaves away, "
            f"{self.model.measured.reach:.1f} are allowed"
        )

    def caveat(self, arch: Arch) -> str | None:
        """How the device differs from the one that the model learned from, or None."""
        try:
            return self._caveats[arch]
        except KeyError:
            found = self._caveats[arch] = caveat(self.model, arch)
            return found

    def knows_vendor(self, kernel: Kernel) -> bool:
        """Whether the model was trained on the vendor's times."""
        return kernel.name in self._trained

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> NDArray[np.bool_] | None:
        """Those that the model leaves to the end, on the architecture it learned."""
        return self.model.handicaps(kernels) > 0 if arch.name == self.model.arch else None

    def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Array:
        """Microseconds, in the order given."""
        with self._lock:
            pool = self._pool(kernels, arch)
            found = pool.selector.scores(problem)
        return np.exp2(found.level - found.score[pool.places])

    def leaders_us(
        self, problem: Problem, kernels: Sequence[Kernel], arch: Arch
    ) -> tuple[NDArray[np.int64], Array] | None:
        """Places of the kernels that are most likely fast, fastest first, and their microseconds.

        None where ranking all costs as little.
        """
        with self._lock:
            pool = self._pool(kernels, arch)
            scorer = pool.selector.scorer
            if not isinstance(scorer, CompiledScorer) or not scorer.can_lead:
                return None
            with pool.selector.lock:
                found = scorer.lead(problem, pool.asked)
        return pool.place_of[found.order], np.exp2(found.level - found.score)

    def rank(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> list[Ranked]:
        """All kernels, fastest first."""
        us = self.predict_us(problem, kernels, arch)
        flops = problem.flops
        return [
            Ranked(kernels[i], float(us[i]), float(flops / us[i] * 1e-6))
            for i in np.argsort(us, kind="stable")
        ]

    def _pool(self, kernels: Sequence[Kernel], arch: Arch) -> _Pool:
        held = self._pools.get(id(kernels))
        if held is not None and held.kernels is kernels and held.arch is arch:
            return held
        places = self._places.get(arch, {})
        if any(kernel not in places for kernel in kernels):
            self._grown(arch, kernels)
            places = self._places[arch]
        wanted = np.array([places[kernel] for kernel in kernels], np.int64)
        given = kernels if isinstance(kernels, tuple) else tuple(kernels)
        selector = self._selectors[arch]
        asked = np.zeros(len(selector.kernels), np.uint8)
        place_of = np.zeros(len(selector.kernels), np.int64)
        asked[wanted], place_of[wanted] = 1, np.arange(len(wanted))
        pool = _Pool(given, arch, selector, wanted, asked, place_of)
        if given is kernels:
            if len(self._pools) >= 16:
                self._pools.clear()
            self._pools[id(kernels)] = pool
        return pool

    def _grown(self, arch: Arch, kernels: Sequence[Kernel]) -> Selector:
        """The selector of an architecture, its pool grown by kernels it does not hold yet."""
        held = self._places.get(arch, {})
        pool = list(dict.fromkeys([*(held if len(held) < MOST_KERNELS else ()), *kernels]))
        # Without a pool only distances are asked for, which is no reason to compile.
        some = pool or measured_kernels(self.model)[:1]
        selector = Selector(self.model, some, arch, compiled=self._compiled if pool else False)
        self._selectors[arch] = selector
        self._places[arch] = {kernel: at for at, kernel in enumerate(pool)}
        return selector


class CarefulRanker:
    """A model that is given up, with one warning, when it fails: that costs quality, not the call.

    From then on it calls itself unfit; where it was asked already, the analytic model answers.
    """

    def __init__(self, ranker: ModelRanker) -> None:
        self.path = ranker.path
        self._ranker = ranker
        self._failure = ""

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        """What the model says, or that it failed."""
        why = self._answer(self._ranker.why_unfit, problem, arch)
        return self._failure or why

    def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Array:
        """Microseconds, in the order given."""
        found = self._answer(self._ranker.predict_us, problem, kernels, arch)
        return AnalyticRanker().predict_us(problem, kernels, arch) if found is None else found

    def leaders_us(
        self, problem: Problem, kernels: Sequence[Kernel], arch: Arch
    ) -> tuple[NDArray[np.int64], Array] | None:
        """Those of the model; none of one that failed."""
        return self._answer(self._ranker.leaders_us, problem, kernels, arch)

    def caveat(self, arch: Arch) -> str | None:
        """The model's; none of one that failed, and says so already."""
        return None if self._failure else self._ranker.caveat(arch)

    def knows_vendor(self, kernel: Kernel) -> bool:
        """Whether the vendor's times were measured; nothing was by a model that failed."""
        return not self._failure and self._ranker.knows_vendor(kernel)

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> NDArray[np.bool_] | None:
        """What the model says, where it has not failed."""
        return self._answer(self._ranker.strange, kernels, arch)

    def _answer(self, ask: Callable[..., T], *given: Any) -> T | None:
        """What the model answers; None of one that failed, now or before."""
        if self._failure:
            return None
        try:
            return ask(*given)
        except Exception as error:
            self.path = AnalyticRanker.path
            why = printable(f"{type(error).__name__}: {error}")
            self._failure = f"{self._ranker.model.name} failed ({why})"
            log.warning("%s; it is left out of selection", self._failure)
            return None
