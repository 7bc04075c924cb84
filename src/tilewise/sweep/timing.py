"""Times of repeated calls under a policy: how many, how long, and what is said about them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

import numpy as np
from numpy.typing import NDArray

from tilewise.core.measurement import UNSTEADY, Policy

Call = Callable[[], object]
Array = NDArray[np.float64]

MOST_US = 2e6
"""No kernel is timed for longer, so that a slow one stays within the default timeout."""
SLOW_US = MOST_US / 4
"""Calls longer than this are not warmed up: the checked one was, and every one of them counts."""
MOST_SETTLING_S, IDLE_SHARE = 0.5, 0.3
"""How long other threads are waited for, and what share of a core still counts as none."""
WAKING_S = 0.002
"""How long a CPU is kept busy before its calls count."""
_POLISHES = 10
"""How often the paces of rounds and the times of kernels are fitted to each other."""
SHORTEST_SAMPLE_US = 20.0
"""Calls shorter than this are timed several at once: a reading of the clock costs 0.1 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The timed calls of one kernel, in microseconds."""

    time_us: float
    spread_us: float
    min_us: float
    repeats: int


def summarise(samples: Sequence[float]) -> Timing:
    """Median, interquartile range and minimum."""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return Timing(
        time_us=float(middle),
        spread_us=float(high - low),
        min_us=float(min(samples)),
        repeats=len(samples),
    )


class Timer(ABC):
    """A clock beside a device."""

    joins_calls = True
    """Whether short calls are timed several at once."""

    @abstractmethod
    def samples(self, call: Call, count: int, inner: int) -> list[float]:
        """`count` times of one call, each averaged over `inner` of them, in microseconds."""

    def prepare(self, call: Call) -> Call:
        """The call as it is timed; a graph where the policy asks for one."""
        return call

    def settle(self, call: Call) -> float:
        """Brings the device into the state it has after many of these calls, and no others.

        Returns what the first of them took, in microseconds.
        """
        return self.samples(call, 1, 1)[0]


class CpuTimer(Timer):
    """The monotonic clock; cold caches by writing a buffer larger than all of them."""

    def __init__(self, policy: Policy, cache_bytes: int) -> None:
        is_cold = policy.cache == "cold"
        self._flush = np.zeros(2 * cache_bytes if is_cold else 0, np.uint8)
        self._is_alone = policy.threads == 1

    def samples(self, call: Call, count: int, inner: int) -> list[float]:
        clock, found = time.perf_counter_ns, []
        for _ in range(count):
            if self._flush.size:
                self._flush += 1
            start = clock()
            for _ in range(inner):
                call()
            found.append((clock() - start) / (1000 * inner))
        return found

    def settle(self, call: Call) -> float:
        """Waits until no thread is busy (those of BLAS spin for 0.1 s after a call), then calls
        until our own threads are awake and the clock is up. One thread has none to wait for.
        """
        if self._is_alone:
            return super().settle(call)
        end = time.monotonic() + MOST_SETTLING_S
        share = 1.0
        while share > IDLE_SHARE and time.monotonic() < end:
            used, start = time.process_time(), time.perf_counter()
            time.sleep(0.001)
            share = (time.process_time() - used) / (time.perf_counter() - start)
        end = time.monotonic() + WAKING_S
        start = time.perf_counter()
        call()
        first = 1e6 * (time.perf_counter() - start)
        while time.monotonic() < end:
            call()
        return first


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many samples of how many calls each; settled once per kernel."""

    count: int
    inner: int


def settled(call: Call, timer: Timer, policy: Policy) -> float:
    """What one call takes, in microseconds, with the device ready for those that count."""
    first = timer.settle(call)
    return first if first > SLOW_US else warm_up(call, timer, policy)


def warm_up(call: Call, timer: Timer, policy: Policy) -> float:
    """Runs the untimed calls and returns what one call takes, in microseconds.

    A call that alone fills the time of a kernel is not repeated to warm up.
    """
    estimate = timer.samples(call, 1, 1)[0]
    for _ in range(policy.warmup - 1):
        if estimate > 1000 * policy.time_ms:
            break
        estimate = min(estimate, timer.samples(call, 1, 1)[0])
    return max(estimate, 0.01)


def schedule(estimate_us: float, timer: Timer, policy: Policy) -> Schedule:
    """Enough calls to fill the policy's time, within its repeats; cold calls are never joined."""
    wanted = 1000 * policy.time_ms
    inner = 1
    if policy.cache == "hot" and timer.joins_calls:
        shortest = min(MOST_US, max(SHORTEST_SAMPLE_US, wanted / policy.max_repeats))
        inner = max(1, int(shortest / estimate_us))
    count = min(policy.max_repeats, max(policy.min_repeats, ceil(wanted / (estimate_us * inner))))
    return Schedule(max(1, min(count, int(MOST_US / (estimate_us * inner)))), inner)


def measure(call: Call, timer: Timer, policy: Policy) -> Timing:
    """One kernel, timed on its own; a second time where something got in between."""
    ready = timer.prepare(call)
    first = _measure(ready, timer, policy)
    if first.spread_us <= UNSTEADY * first.time_us or first.time_us > SLOW_US:
        return first
    return min(first, _measure(ready, timer, policy), key=lambda t: t.spread_us / t.time_us)


def _measure(ready: Call, timer: Timer, policy: Policy) -> Timing:
    estimate = settled(ready, timer, policy)
    plan = schedule(estimate, timer, policy)
    if estimate > SLOW_US:  # timed like the rest, and too dear to be thrown away
        return summarise([estimate, *timer.samples(ready, plan.count - 1, plan.inner)])
    return summarise(timer.samples(ready, plan.count, plan.inner))


def measure_in_turn(
    calls: Sequence[Call], timer: Timer, policy: Policy, before: Callable[[int], None]
) -> list[Timing]:
    """Several kernels, timed in turn so that drift of the device falls on all alike.

    `before(i)` is called ahead of each turn of call `i`. Rounds change their order: who runs after
    whom tells in clocks and caches, by three hundredths for large products on an H200.
    """
    ready, plans = [], []
    for index, call in enumerate(calls):
        before(index)
        ready.append(timer.prepare(call))
        plans.append(schedule(settled(ready[-1], timer, policy), timer, policy))
    found: list[list[list[float]]] = [[[]] * policy.rounds for _ in calls]
    for turn in range(policy.rounds):
        order = Random(turn // 2).sample(range(len(calls)), len(calls))
        for index in order if turn % 2 == 0 else reversed(order):
            before(index)
            timer.settle(ready[index])  # the first call meets another kernel's cache, too
            share = ceil(plans[index].count / policy.rounds)
            found[index][turn] = timer.samples(ready[index], share, plans[index].inner)
    pace = paces(found)
    return [
        summarise([time / at for at, round_ in zip(pace, rounds, strict=True) for time in round_])
        for rounds in found
    ]


def paces(found: Sequence[Sequence[Sequence[float]]]) -> Array:
    """How much slower than usual each round was, from the times of every call in every round.

    Machines that are shared slow down for tens of milliseconds, by a fifth and more, and what falls
    on a whole round says nothing about one kernel. A time is taken for its kernel's own times the
    round's pace, and both are found in turn as medians, so that neither follows an outlier.
    """
    times = np.log([[np.median(samples) for samples in rounds] for rounds in found])
    pace = np.zeros(times.shape[1])
    for _ in range(_POLISHES):
        own = np.median(times - pace, axis=1, keepdims=True)
        pace = np.median(times - own, axis=0)
        pace -= np.median(pace)
    result: Array = np.exp(pace)
    return result
