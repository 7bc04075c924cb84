"""Ratios of noisy readings: what may be said, by made-up times."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.cli.demo import DemoRow, compare
from tilewise.judge.ratios import NOISY, Ratio, Reading, geometric_mean, ratio
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.sweep.timing import summarise

ROUNDS, SHARE = 5, 20


def reading(time_us: float, noise: float, seed: int, bursts: float = 0.0) -> Reading:
    """Calls in rounds: lognormal noise, of which a round shares half, and bursts that triple it."""
    random = np.random.default_rng(seed)
    rounds = random.normal(0, noise / 2, (ROUNDS, 1))
    calls = np.exp(rounds + random.normal(0, noise, (ROUNDS, SHARE)))
    calls[random.random(calls.shape) < bursts] *= 3
    told = summarise((time_us * calls).ravel().tolist())
    return Reading(time_us=told.time_us, spread_us=told.spread_us, rounds=ROUNDS)


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("bursts", [0.0, 0.3])
def test_something_timed_against_itself_is_equal_or_too_noisy_to_say(
    noise: float, bursts: float
) -> None:
    """Hardly ever a false claim, whatever the noise."""
    found = [
        ratio(reading(100, noise, seed, bursts), reading(100, noise, 10_000 + seed, bursts))
        for seed in range(200)
    ]
    claims = [r for r in found if r.is_clear and not r.low <= 1 <= r.high]
    assert len(claims) <= 20
    assert all(0.5 < r.value < 2 for r in claims)


def test_a_quiet_machine_tells_small_differences() -> None:
    found = [ratio(reading(110, 0.01, s), reading(100, 0.01, 10_000 + s)) for s in range(100)]
    assert sum(r.is_clear and r.low > 1 for r in found) >= 95
    assert np.median([r.value for r in found]) == pytest.approx(1.1, rel=0.01)


def test_a_large_difference_survives_some_noise_and_not_any() -> None:
    some = [ratio(reading(300, 0.1, s), reading(100, 0.1, 10_000 + s)) for s in range(100)]
    assert sum(r.is_clear and r.low > 1 for r in some) >= 95
    any_ = [ratio(reading(300, 1.0, s), reading(100, 1.0, 10_000 + s)) for s in range(100)]
    assert not any(r.is_clear for r in any_)


def test_equal_times_are_told_as_equal_where_that_is_sure() -> None:
    found = ratio(Reading(time_us=100, spread_us=1, rounds=5), Reading(time_us=100, spread_us=1))
    assert found.is_clear
    assert found.if_clear == 1.0
    assert found.spell() == "1.00x ±2%"


def test_a_swallowed_ratio_is_withheld() -> None:
    found = ratio(Reading(time_us=211, spread_us=60, rounds=1), Reading(time_us=150, spread_us=45))
    assert found.low < 1 < found.high
    assert found.if_clear is None
    assert found.spell() == NOISY


def test_spreads_beyond_the_median_have_no_overflow() -> None:
    found = ratio(Reading(time_us=1e-3, spread_us=1e9), Reading(time_us=1e9, spread_us=1e-3))
    assert not found.is_clear


def test_a_mean_is_of_clear_ratios_and_needs_most_of_them() -> None:
    clear = Ratio(value=1.2, low=1.1, high=1.3)
    noisy = Ratio(value=9.0, low=0.1, high=90.0)
    unsteady = Ratio(value=300.0, low=290.0, high=310.0, is_steady=False)
    mean = geometric_mean([clear, clear, noisy, unsteady])
    assert mean is not None
    assert mean.value == pytest.approx(1.2)
    assert 1.1 < mean.low < 1.2 < mean.high < 1.3
    assert geometric_mean([clear, noisy, unsteady]) is None
    assert geometric_mean([]) is None


def test_a_demo_claims_no_more_than_its_readings() -> None:
    problem = GemmProblem(m=64, n=64, k=64)
    quiet, wild = Reading(time_us=10, spread_us=0.1, rounds=5), Reading(time_us=32, spread_us=40)
    row = DemoRow("noisy", problem)
    compare(row, quiet, {"NumPy": wild})
    assert row.vs_best is None
    assert row.comparison == NOISY
    row = DemoRow("quiet", problem)
    compare(row, quiet, {"NumPy": Reading(time_us=32, spread_us=0.3, rounds=5), "PyTorch": wild})
    assert row.vs_best == pytest.approx(3.2)
    row = DemoRow("itself", problem)
    compare(row, wild, {"PyTorch": wild, "NumPy": quiet})
    assert row.vs_best is None
