"""Chooses: predicts the whole pool at once, then asks down the ranking who can serve.

Legality is asked of the fastest first and of the others only when somebody looks at them, so a
choice costs a prediction and a few answers, however large the pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR_TIE
from tilewise.core.problem import Problem
from tilewise.dispatch.padding import Copies, CopyCosts, aligned
from tilewise.dispatch.reshaping import differing, reshaped_for, simpler
from tilewise.forks import make_lock
from tilewise.ops.roofline import judges_vendor
from tilewise.selection.choice import TIE, WHO, Choice, Ranked, Ranker, Ranking
from tilewise.selection.measured import MeasuredRanker
from tilewise.settings import settings

if TYPE_CHECKING:
    from tilewise.dispatch.registry import Registry

REMEMBERED = 512
FEW = 128
"""Kernels that are ranked whole: picking the leaders among so few spares nothing."""

Key = tuple[int, bool, float, int]
"""Priority turned round, whether it is left to the end, time, place in the pool."""


def served_by(dtype: str) -> tuple[str, ...]:
    """Dtypes of kernels that may serve problems of a dtype."""
    return ("tf32", "fp32") if dtype == "tf32" else (dtype,)


@dataclass(frozen=True, slots=True)
class Pool:
    """The kernels that are made for a dtype or for any, and what orders them before time does."""

    kernels: tuple[Kernel, ...]
    priority: NDArray[np.int64]
    """Turned round: the lowest come first."""
    has_priorities: bool
    """Whether some come before others whatever they take."""
    vendors: tuple[int, ...]
    """Places of the vendor's routines."""
    copies: Copies
    strange: NDArray[np.bool_]
    """Which are of families that no model saw measured; none where there is no model."""


class Question(NamedTuple):
    """What a choice is made from: a problem in the shapes that matter, and what ranks kernels."""

    problem: Problem
    """As it was asked."""
    simple: Problem
    """In its simplest shapes: the very same where it has no simpler ones."""
    ranker: Ranker
    """The first that knows the problem in one of these shapes."""
    seen: Problem
    """The shapes in which it does."""
    notes: list[str]
    """Why the rankers before it do not."""

    @property
    def is_simple(self) -> bool:
        return self.simple is self.problem


def _charged(keys: Iterable[Key], copies_us: CopyCosts) -> Iterator[Key]:
    """Keys in order of what kernels take with the copies they need, given by what they take."""
    waiting: list[Key] = []
    for key in keys:
        while waiting and waiting[0] < key:
            yield heapq.heappop(waiting)
        extra = copies_us[key[3]]
        if extra:
            heapq.heappush(waiting, (key[0], key[1], key[2] + extra, key[3]))
        else:
            yield key
    while waiting:
        yield heapq.heappop(waiting)


class Chooser:
    """Makes and remembers the choices of one registry."""

    def __init__(self, registry: Registry, rankers: Sequence[Ranker]) -> None:
        self.registry = registry
        self.rankers = rankers
        self._lock = make_lock()
        self._version = -1
        self._pools: dict[str, Pool] = {}
        self._choices: dict[tuple[Problem, bool], Choice] = {}

    def recall(self, problem: Problem, deterministic: bool) -> Choice | None:
        """The choice made before, where nothing has changed since."""
        if self._version != self.registry.version:
            return None
        return self._choices.get((problem, deterministic))

    def choose(self, problem: Problem, deterministic: bool) -> Choice | None:
        """The choice for a problem that is not empty; None where no kernel can serve."""
        if self._version != self.registry.version:
            self._forget()
        version = self._version
        choice = self._choose(problem, deterministic)
        if choice is not None:
            with self._lock:
                if version == self._version:  # else kernels were declared while it was made
                    if len(self._choices) >= REMEMBERED:
                        self._choices.clear()
                    self._choices[problem, deterministic] = choice
        return choice

    def rejected(self, problem: Problem, deterministic: bool = False) -> dict[str, str]:
        """Kernel name -> why it cannot serve, of the whole registry."""
        reasons = {k.name: self.why_not(k, problem, deterministic) for k in self.registry.kernels}
        return {name: why for name, why in reasons.items() if why is not None}

    def why_not(self, kernel: Kernel, problem: Problem, deterministic: bool) -> str | None:
        """Why a kernel cannot serve, padded where it needs that, or None."""
        simple = simpler(self.registry.op, problem)
        return self._why_not(kernel, problem, simple, deterministic)

    def _why_not(
        self, kernel: Kernel, problem: Problem, simple: Problem, deterministic: bool
    ) -> str | None:
        """The same, of a problem whose simplest shapes are known."""
        op, arch = self.registry.op, self.registry.arch
        if not self._is_reshaped(kernel, problem, simple):
            why = op.why_unusable(kernel, aligned(op, kernel, problem), arch)
            if why is not None:
                return why
        build = self.registry.build_of(kernel)
        if build is not None and build.status != "ok":
            return f"{build.status}: {build.message.splitlines()[0] if build.message else ''}"
        if deterministic and not kernel.is_deterministic:
            return "its sums depend on the order of execution, and deterministic=True was asked"
        if settings().strict and getattr(kernel, "spreads_nonfinite", False):
            return "it lets an Inf or NaN spread to other channels, and TILEWISE_STRICT is set"
        return None

    def vendor_us(self, problem: Problem, library: str) -> float | None:
        """How long the vendor's routine is expected to take; None where nobody measured it."""
        asked = self._question(problem)
        kernels = self._pool(problem.dtype).kernels
        for place, kernel in enumerate(kernels):
            if kernel.engine == "vendor" and getattr(kernel, "library", "") == library:
                if not asked.ranker.knows_vendor(kernel):
                    return None
                times = asked.ranker.predict_us(asked.seen, kernels, self.registry.arch)
                return float(times[place]) if times[place] < inf else None
        return None

    def _forget(self) -> None:
        with self._lock:
            self._version = self.registry.version
            self._pools.clear()
            self._choices.clear()

    def _pool(self, dtype: str) -> Pool:
        version, pool = self._version, self._pools.get(dtype)
        if pool is None:
            every = self.registry.kernels
            kernels = tuple(k for k in every if getattr(k, "dtype", dtype) in served_by(dtype))
            priority = np.array([-int(self.registry.priority_of(k)) for k in kernels], np.int64)
            pool = Pool(
                kernels,
                priority,
                bool((priority != priority[:1]).any()),
                tuple(at for at, k in enumerate(kernels) if k.engine == "vendor"),
                Copies(self.registry.op, kernels, self.registry.arch),
                self._strange(kernels),
            )
            with self._lock:
                if version == self._version:
                    self._pools[dtype] = pool
        return pool

    def _choose(self, problem: Problem, deterministic: bool) -> Choice | None:
        for asked in self._questions(problem):
            ranking = Ranking(self._walk(asked, deterministic))
            if not ranking:
                return None
            if ranking[0].predicted_us < inf or asked.ranker.path != MeasuredRanker.path:
                break
            asked.notes.append(f"{asked.ranker.path} not used: no kernel that can serve was timed")
        path, notes = asked.ranker.path, asked.notes
        reason = f"predicted fastest by {WHO.get(path, path)}"
        place, taken = self._among_ties(ranking, self._pool(problem.dtype))
        if place:
            ranking.promote(place)
            notes.append(f"of the kernels that tie with it, {taken} is taken")
        if self._is_reshaped(ranking[0].kernel, problem, asked.simple):
            notes.append(f"its tensors are read as {differing(asked.simple, problem)}")
        if (caveat := asked.ranker.caveat(self.registry.arch)) is not None:
            notes.append(caveat)
        return Choice(
            problem=problem,
            kernel=ranking[0].kernel,
            path=path,
            reason="; ".join([reason, *notes]),
            ranking=ranking,
            rejected=ranking.rejected,
        )

    def _is_reshaped(self, kernel: Kernel, problem: Problem, simple: Problem) -> bool:
        """Whether a kernel serves a problem in its simplest shapes."""
        op, arch = self.registry.op, self.registry.arch
        return simple is not problem and reshaped_for(op, kernel, problem, arch) is not None

    def _question(self, problem: Problem) -> Question:
        """To the first ranker that knows a problem."""
        return next(self._questions(problem))

    def _questions(self, problem: Problem) -> Iterator[Question]:
        """To the rankers that know a problem in its simplest shapes or as it is, in turn.

        The last of all knows everything.
        """
        simple, notes = simpler(self.registry.op, problem), list[str]()
        *others, last = self.rankers
        for ranker in others:
            for seen in (problem,) if simple is problem else (simple, problem):
                why = ranker.why_unfit(seen, self.registry.arch)
                if why is None:
                    yield Question(problem, simple, ranker, seen, notes)
                    break
            else:
                notes.append(f"{ranker.path} not used: {why}")
        yield Question(problem, simple, last, simple, notes)

    def _walk(self, asked: Question, deterministic: bool) -> Iterator[Ranked | tuple[Kernel, str]]:
        """Every kernel in order: ranked, or with the reason that it cannot serve."""
        problem, simple = asked.problem, asked.simple
        pool, flops = self._pool(problem.dtype), problem.flops
        for place, us in self._ordered(asked, pool):
            kernel = pool.kernels[place]
            why = self._why_not(kernel, problem, simple, deterministic)
            yield (kernel, why) if why is not None else Ranked(kernel, us, flops / us / 1e6)
        known = set(pool.kernels)
        for kernel in self.registry.kernels:
            if kernel not in known:
                why = self._why_not(kernel, problem, simple, deterministic)
                yield (kernel, why) if why is not None else Ranked(kernel, inf, 0.0)

    def _ordered(self, asked: Question, pool: Pool) -> Iterator[tuple[int, float]]:
        """Places and times, priorities first; copies for padding are charged on the way."""
        copies_us = pool.copies.us(asked.problem)
        given = set()
        can_lead = asked.is_simple and len(pool.kernels) > FEW and not pool.has_priorities
        can_lead = can_lead and not copies_us.any()
        for place, us in self._leaders(asked, pool) if can_lead else ():
            given.add(place)
            yield place, us
        times = self._times(asked, pool, copies_us)
        is_last = self._is_last(asked.ranker, pool)
        # A remembered choice keeps these two arrays, so they are kept small.
        order = np.lexsort((times, is_last, pool.priority)).astype(np.int32)
        times = np.where(is_last, inf, times)
        left = (at for at in map(int, order) if at not in given)
        if copies_us.are_none:
            yield from ((at, float(times[at])) for at in left)
            return
        keys = ((int(pool.priority[at]), bool(is_last[at]), float(times[at]), at) for at in left)
        for _, _, us, place in _charged(keys, copies_us):
            yield place, us

    def _times(self, asked: Question, pool: Pool, copies_us: CopyCosts) -> Array:
        """What each kernel takes, for the problem in the shapes in which it serves that.

        Kernels that serve it in its simplest shapes copy nothing for it. The vendor's routines take
        calls as they are, and are predicted so where the ranker knows that.
        """
        arch = self.registry.arch
        times = asked.ranker.predict_us(asked.seen, pool.kernels, arch)
        if asked.is_simple:
            return times
        found = (self._is_reshaped(k, asked.problem, asked.simple) for k in pool.kernels)
        is_reshaped = np.fromiter(found, bool, len(pool.kernels))
        copies_us.spare(is_reshaped.tolist())
        if asked.seen is asked.problem:
            return times
        as_is = ~is_reshaped
        as_is[list(pool.vendors)] = asked.ranker.why_unfit(asked.problem, arch) is None
        return np.where(as_is, asked.ranker.predict_us(asked.problem, pool.kernels, arch), times)

    def _is_last(self, ranker: Ranker, pool: Pool) -> NDArray[np.bool_]:
        """Which kernels are left to the end, whatever they are predicted to take.

        Vendor routines have no tiles to judge, so a ranker that never saw them measured leaves
        them there, unless the op itself can say how they do. Estimates leave families there that
        nobody measured where others were: an estimate never ran.
        """
        is_estimate = ranker is self.rankers[-1]
        is_last = pool.strange.copy() if is_estimate else np.zeros(len(pool.kernels), bool)
        for vendor in pool.vendors:
            is_last[vendor] = not self.can_judge(ranker, pool.kernels[vendor])
        return is_last

    def _strange(self, kernels: tuple[Kernel, ...]) -> NDArray[np.bool_]:
        """Which kernels every model that says so calls strange."""
        said = [ranker.strange(kernels, self.registry.arch) for ranker in self.rankers]
        known = [strange for strange in said if strange is not None]
        return np.logical_and.reduce(known) if known else np.zeros(len(kernels), bool)

    def _leaders(self, asked: Question, pool: Pool) -> Iterator[tuple[int, float]]:
        """Places and times of the fastest few, without ranking all."""
        found = asked.ranker.leaders_us(asked.problem, pool.kernels, self.registry.arch)
        for place, us in zip(*(array.tolist() for array in found or ()), strict=True):
            if place not in pool.vendors or self.can_judge(asked.ranker, pool.kernels[place]):
                yield place, us

    def can_judge(self, ranker: Ranker, vendor: Kernel) -> bool:
        """Whether predictions for a vendor's routine can be held against those for kernels."""
        return ranker.knows_vendor(vendor) or judges_vendor(vendor.op, self.registry.arch)

    def _among_ties(self, ranking: Ranking, pool: Pool) -> tuple[int, str]:
        """Which of the kernels that tie with the best is taken, and why; 0 for the best itself."""
        if not self.registry.has_builds and not pool.vendors:
            return 0, ""
        best = ranking[0]
        priority = self.registry.priority_of(best.kernel)
        ties = []
        for place, ranked in enumerate(ranking):
            # Who comes later and is predicted faster was put there for other reasons than time.
            behind = ranked.predicted_us / best.predicted_us - 1
            if not 0 <= behind <= VENDOR_TIE:
                break
            if self.registry.priority_of(ranked.kernel) == priority:
                ties.append((place, ranked.kernel, behind))
        for place, kernel, _ in ties:
            if kernel.engine == "vendor":
                return place, "the vendor's routine"
        for place, kernel, behind in ties:
            build = self.registry.build_of(kernel)
            if behind <= TIE and build is not None and build.status == "ok":
                return place, "one that is already built"
        return 0, ""
