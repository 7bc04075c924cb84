"""What a selection gives: the kernel, why it was chosen, and everything ranked behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.forks import make_lock

TIE = 0.02
"""Predictions this close to the best are as good; a dispatcher then takes one that is built."""
WHO = {
    "measured": "the times that `tune` measured",
    "model": "the model",
    "analytic": "the analytic model",
}
"""Path of a choice -> who ranked, for people."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A kernel with its predicted speed."""

    kernel: Kernel
    predicted_us: float
    predicted_tflops: float


class Ranking(Sequence[Ranked]):
    """Kernels that can serve a problem, fastest first; worked out as far as it is looked at.

    `walk` gives kernels in order, those that cannot serve with the reason.
    """

    def __init__(self, walk: Iterator[Ranked | tuple[Kernel, str]]) -> None:
        self._walk = walk
        self._lock = make_lock()
        self._found: list[Ranked] = []
        self._rejected: list[tuple[Kernel, str]] = []

    def _reach(self, count: float) -> list[Ranked]:
        """What was found, `count` or more of them unless there are fewer."""
        if len(self._found) < count:
            with self._lock:
                while len(self._found) < count and (item := next(self._walk, None)) is not None:
                    if isinstance(item, Ranked):
                        self._found.append(item)
                    else:
                        self._rejected.append(item)
        return self._found

    def promote(self, place: int) -> None:
        """Puts a kernel first; before the ranking is shared."""
        self._found.insert(0, self._found.pop(place))

    @property
    def rejected(self) -> Mapping[str, str]:
        """Kernel name -> why it cannot serve."""
        return _Rejected(self)

    def __bool__(self) -> bool:
        return bool(self._reach(1))

    def __len__(self) -> int:
        return len(self._reach(inf))

    def __iter__(self) -> Iterator[Ranked]:
        place = 0
        while len(found := self._reach(place + 1)) > place:
            yield found[place]
            place += 1

    @overload
    def __getitem__(self, at: int) -> Ranked: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Ranked]: ...
    def __getitem__(self, at: int | slice) -> Ranked | Sequence[Ranked]:
        last = at if isinstance(at, int) else at.stop
        return self._reach(inf if last is None or last < 0 else last + 1)[at]


class _Rejected(Mapping[str, str]):
    """The reasons of a ranking, which is worked out to its end where they are asked for."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._reasons: dict[str, str] | None = None

    def _all(self) -> dict[str, str]:
        if self._reasons is None:
            self._ranking._reach(inf)
            self._reasons = {kernel.name: why for kernel, why in self._ranking._rejected}
        return self._reasons

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The outcome of one selection."""

    problem: Problem
    kernel: Kernel
    path: str
    """Who chose: `measured` (a plan file), `model`, `analytic`, `vendor` (the last resort) or
    `empty` (no work)."""
    reason: str
    ranking: Sequence[Ranked] = ()
    """Those that can serve, the chosen one first; worked out as far as it is looked at."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Kernel name -> why it cannot serve."""

    @property
    def candidates(self) -> int:
        """How many kernels can serve; none where nothing was ranked."""
        return len(self.ranking)

    @property
    def predicted_tflops(self) -> float:
        """What the chosen kernel is expected to reach; 0 where nothing was predicted."""
        return next((r.predicted_tflops for r in self.ranking if r.kernel == self.kernel), 0.0)

    @property
    def predicted_us(self) -> float:
        """How long the chosen kernel is expected to take; 0 where nothing was predicted."""
        return next((r.predicted_us for r in self.ranking if r.kernel == self.kernel), 0.0)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a scorer says about one problem."""

    order: NDArray[np.int32]
    """Places in the pool, fastest first."""
    score: Array
    level: float
    """Times are 2 ** (level - score) microseconds."""


class Ranker(Protocol):
    """Anything that can tell how long kernels take."""

    path: str

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        """Why this ranker should not be asked about a problem, or None."""

    def caveat(self, arch: Arch) -> str | None:
        """What a user must know of predictions for this device, or None."""

    def knows_vendor(self, kernel: Kernel) -> bool:
        """Whether predictions of a vendor's routine rest on measurements of it."""

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> NDArray[np.bool_] | None:
        """Which kernels are of families that were never measured; None where nothing was."""

    def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Array:
        """Microseconds, in the order given; quick where the same tuple is given again."""

    def leaders_us(
        self, problem: Problem, kernels: Sequence[Kernel], arch: Arch
    ) -> tuple[NDArray[np.int64], Array] | None:
        """Places of the few most likely fast, fastest first, and their microseconds.

        None where ranking all costs as little.
        """
