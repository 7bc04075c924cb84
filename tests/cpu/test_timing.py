"""How calls are timed: schedules, medians, turns, and what a disturbed machine does to them."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from tilewise.core.measurement import POLICIES, Policy
from tilewise.sweep.timing import CpuTimer, Timer, measure, measure_in_turn, paces, schedule


class Clock(CpuTimer):
    """Time that passes only in calls: what is measured is then exactly known."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, 1024)
        self.order: list[int] = []

    def samples(self, call: Any, count: int, inner: int) -> list[float]:
        return [float(call()) for _ in range(count)]

    def settle(self, call: Any) -> float:
        """There is nothing to wait for, nor to wake."""
        return 0.0


def test_medians_and_spreads_are_those_of_the_samples() -> None:
    policy = Policy(warmup=1, min_repeats=9, max_repeats=9, time_ms=0.0)
    ticks = iter([50.0, *range(41, 50)])
    timing = measure(lambda: next(ticks), Clock(policy), policy)
    assert (timing.time_us, timing.spread_us, timing.min_us, timing.repeats) == (45.0, 4.0, 41.0, 9)


@pytest.mark.parametrize(
    ("second", "kept"), [([7.0] * 5, 7.0), ([1.0, 9.0, 90.0, 99.0, 9.0], 30.0)]
)
def test_a_disturbed_reading_is_taken_again(second: list[float], kept: float) -> None:
    """Of two the steadier one counts, which need not be the second."""
    policy = Policy(warmup=1, min_repeats=5, max_repeats=5, time_ms=0.0)
    ticks = iter([9.0, 8.0, 20.0, 30.0, 40.0, 50.0, 9.0, *second])
    assert measure(lambda: next(ticks), Clock(policy), policy).time_us == kept


@pytest.mark.parametrize(("seconds", "calls"), [(0.6, 3), (0.9, 2), (1.3, 1), (2.4, 1)])
def test_slow_calls_all_count_and_stay_within_the_time(seconds: float, calls: int) -> None:
    policy, made = POLICIES["careful"], []

    class Slow(Clock):
        settle = Timer.settle

    def call() -> float:
        made.append(1e6 * seconds)
        return made[-1]

    timing = measure(call, Slow(policy), policy)
    assert (len(made), timing.repeats, timing.time_us) == (calls, calls, 1e6 * seconds)


def test_leaders_take_turns() -> None:
    policy = Policy(warmup=1, min_repeats=8, max_repeats=8, rounds=8)
    order: list[int] = []
    calls = [lambda at=at: 10.0 + at for at in range(4)]
    timings = measure_in_turn(calls, Clock(policy), policy, order.append)
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(rounds) == 1 + 8  # the first finds how often to call
    assert all(sorted(turns) == [0, 1, 2, 3] for turns in rounds)
    assert len(set(rounds[1:])) > 4
    before = [{a for turns in rounds[1:] for a, b in pairwise(turns) if b == at} for at in range(4)]
    assert all(len(others) > 1 for others in before)  # nobody runs after the same one always
    assert [t.time_us for t in timings] == [10.0, 11.0, 12.0, 13.0]
    assert [t.repeats for t in timings] == [8, 8, 8, 8]


def test_two_go_first_in_turn() -> None:
    policy = Policy(warmup=1, min_repeats=4, max_repeats=4, rounds=4)
    order: list[int] = []
    calls = [lambda: 10.0, lambda: 11.0]
    measure_in_turn(calls, Clock(policy), policy, order.append)
    firsts = order[2::2]
    assert sorted(firsts) == [0, 0, 1, 1]


@pytest.mark.parametrize("slow", [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.4, 0.8, 3.0, 1.0]])
def test_what_slows_a_whole_round_is_no_kernels_fault(slow: list[float]) -> None:
    """Times in turn keep their proportion, however the machine's pace changes between rounds."""
    own = np.array([[10.0], [11.0], [40.0]])
    found = [[[time, time] for time in row] for row in own * np.array(slow)]
    assert paces(found) == pytest.approx(slow)

    policy = Policy(warmup=1, min_repeats=5, max_repeats=5, rounds=5, threads=1)
    ticks = [iter([99.0, *(row * np.array(slow))]) for row in own]  # the first is the warm-up
    calls = [lambda at=at: next(ticks[at]) for at in range(3)]
    timings = measure_in_turn(calls, Clock(policy), policy, lambda _: None)
    assert [t.time_us for t in timings] == pytest.approx(own[:, 0])
    assert [t.spread_us for t in timings] == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def test_one_disturbed_call_does_not_slow_the_others_round() -> None:
    found = [[[10.0], [10.0], [90.0]], [[20.0], [20.0], [20.0]], [[30.0], [30.0], [30.0]]]
    assert paces(found) == pytest.approx([1.0, 1.0, 1.0])


def test_a_single_thread_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the turns of kernels every pause would let the machine's pace change."""
    made: list[int] = []
    ticks = count(step=0.0002)  # seconds; this clock moves when it is asked
    monkeypatch.setattr("tilewise.sweep.timing.time.monotonic", lambda: next(ticks))
    CpuTimer(Policy(threads=1), 1024).settle(lambda: made.append(1))
    assert len(made) == 1
    CpuTimer(Policy(threads=2), 1024).settle(lambda: made.append(1))
    assert len(made) > 2


def test_schedules_fill_the_time_within_the_repeats() -> None:
    policy = Policy(time_ms=50.0, min_repeats=5, max_repeats=100)
    timer = Clock(policy)
    quick = schedule(2.0, timer, policy)
    assert quick.count == 100
    assert quick.count * quick.inner * 2.0 == pytest.approx(50_000)
    assert (schedule(1000.0, timer, policy).count, schedule(1000.0, timer, policy).inner) == (50, 1)
    assert schedule(100_000.0, timer, policy).count == 5
    assert schedule(1_500_000.0, timer, policy).count == 1  # stays within the timeout
    cold = Policy(cache="cold", time_ms=50.0)
    assert schedule(2.0, timer, cold).inner == 1
