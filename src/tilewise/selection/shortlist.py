"""What is worth measuring: the kernels that models expect most of, with a grain of doubt.

Most of a pool is hopeless on any one problem. Measuring the few that may win, and the vendor's
beside them, covers ten times as many problems in the same time, and it is near the top that a
model must be right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.ops.contract import get_op
from tilewise.selection.analytic import AnalyticRanker
from tilewise.selection.choice import Ranker
from tilewise.selection.models import load_models
from tilewise.selection.ranker import ModelRanker
from tilewise.selection.selector import why_foreign

DOUBT = 0.15
"""Octaves by which each expectation is moved at random, about as far as models err: kernels that
a model takes for slower than they are get their turn, too."""


def fair(ranked: Sequence[Kernel], count: int) -> list[Kernel]:
    """The first `count` of a ranking, half of them dealt out to the families in turn.

    Estimates compare tiles of one family better than families with each other.
    """
    families: dict[str, list[Kernel]] = {}
    for kernel in ranked:
        families.setdefault(_family(kernel), []).append(kernel)
    turns = (own[turn] for turn in range(count) for own in families.values() if turn < len(own))
    kept = list(islice(turns, max(count // 2, min(count, len(families)))))
    return list(dict.fromkeys([*kept, *ranked]))[:count]


def with_absent(ranked: Sequence[Kernel], count: int) -> list[Kernel]:
    """The first `count` of a ranking, up to a quarter of them families that would have none.

    A model knows nothing of families that nobody measured, and learns of them in no other way.
    """
    first, rest = list(ranked[: count - count // 4]), ranked[count - count // 4 :]
    seen = {_family(kernel) for kernel in first}
    absent: dict[str, Kernel] = {}
    for kernel in rest:
        if _family(kernel) not in seen:
            absent.setdefault(_family(kernel), kernel)
    strangers = list(absent.values())[: count // 4]
    return list(dict.fromkeys([*first, *strangers, *rest]))[:count]


def with_strange(ranked: Sequence[Kernel], strange: frozenset[Kernel], count: int) -> list[Kernel]:
    """`count` of a ranking; up to half of them of families that its model never met, in turn.

    It takes all of them for slower than the slowest that it knows.
    """
    first = fair([kernel for kernel in ranked if kernel in strange], count // 2)
    known = [kernel for kernel in ranked if kernel not in strange]
    own = with_absent(known, count - len(first))
    return list(dict.fromkeys([*own, *first, *ranked]))[:count]


def _family(kernel: Kernel) -> str:
    return str(getattr(kernel, "family", kernel.engine))


_Pool = tuple[tuple[Kernel, ...], Ranker, frozenset[Kernel]]


class Shortlist:
    """Legality for a sweep that measures `count` kernels a problem, and the vendor's.

    Equal problems and kernels give equal lists.
    """

    def __init__(
        self,
        count: int,
        op: str,
        kernels: Callable[[Arch], Sequence[Kernel]],
        model: Model | None = None,
    ) -> None:
        self.count = count
        self._all = kernels
        self._why = get_op(op).why_unusable
        self._model = model
        self._left_out = f"it is not among the {count} that are expected to be fastest"
        self._held: tuple[Problem, frozenset[Kernel]] | None = None
        self._pools: dict[tuple[str, str], _Pool] = {}

    def __call__(self, kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
        """Why a sweep leaves a kernel out, or None."""
        if problem is None or kernel.engine == "vendor":
            return self._why(kernel, problem, arch)
        if self._held is None or self._held[0] is not problem:
            self._held = (problem, frozenset(self.chosen(problem, arch)))
        of_another = getattr(kernel, "dtype", problem.dtype) != problem.dtype
        return self._left_out if of_another or kernel not in self._held[1] else None

    def chosen(self, problem: Problem, arch: Arch, count: int = 0) -> list[Kernel]:
        """The kernels that are expected to be fastest, best first; `count` of them if given."""
        pool, ranker, strange = self._pool(problem, arch)
        if not pool:
            return []
        count = count or self.count
        seed = hashlib.sha256(problem.key.encode()).digest()[:8]
        random = np.random.default_rng(int.from_bytes(seed, "little"))
        expected = np.log2(ranker.predict_us(problem, pool, arch))
        order = np.argsort(expected + DOUBT * random.standard_normal(len(pool)), kind="stable")
        legal = [pool[at] for at in order if self._why(pool[at], problem, arch) is None]
        if ranker.path == "analytic":
            return fair(legal, count)
        return with_strange(legal, strange, count)

    def _pool(self, problem: Problem, arch: Arch) -> _Pool:
        """The kernels made for the problem's dtype, who ranks them, and whom that one never met."""
        key = (arch.label, problem.dtype)
        if key not in self._pools:
            usable = [k for k in self._all(arch) if k.engine != "vendor"]
            own = tuple(k for k in usable if getattr(k, "dtype", problem.dtype) == problem.dtype)
            ranker = self._ranker(problem, arch)
            strange: frozenset[Kernel] = frozenset()
            if isinstance(ranker, ModelRanker):
                taken = ranker.model.handicaps(own)
                strange = frozenset(k for k, octaves in zip(own, taken, strict=True) if octaves)
            self._pools[key] = (own, ranker, strange)
        return self._pools[key]

    def _ranker(self, problem: Problem, arch: Arch) -> Ranker:
        if self._model is not None:
            why = why_foreign(self._model, problem, arch)
            if why is not None:
                raise InputError(f"{why}; name another model, or leave --model out")
            return ModelRanker(self._model)
        for model in load_models(problem.op, arch):
            if why_foreign(model, problem, arch) is None:
                return ModelRanker(model)
        return AnalyticRanker()
