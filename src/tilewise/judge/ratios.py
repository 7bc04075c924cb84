"""How many times as fast, as far as the readings allow to say.

Two readings are a median and a spread each, of calls that were timed in turn in a few rounds.
Calls of one round are slow or fast together, so a median is as sure as so many rounds make it, not
so many calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from tilewise.core.measurement import UNSTEADY

SURE = 2.0
"""Standard errors on either side: about nineteen of twenty intervals hold the true ratio."""
_MEDIAN_ERROR = 0.93
"""Standard error of a median of normal readings, in interquartile ranges over the root of n."""
NOISY = "too noisy"
WIDE = 1.1
"""An interval around 1 whose ends are further apart than this says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A median time with the interquartile range of its calls."""

    time_us: float
    spread_us: float
    rounds: int = 1

    @property
    def share(self) -> float:
        """The spread over the time."""
        return self.spread_us / self.time_us

    @property
    def error(self) -> float:
        """The standard error of the median over the median."""
        return _MEDIAN_ERROR * self.share / sqrt(max(1, self.rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A time over another's, with the ends of what it may be."""

    value: float
    low: float
    high: float
    is_steady: bool = True
    """Whether either side's readings were worth comparing at all."""

    @property
    def is_clear(self) -> bool:
        """Whether it says anything: faster, slower, or as good as equal."""
        is_swallowed = self.low < 1 < self.high and self.high > WIDE * self.low
        return self.is_steady and not is_swallowed

    @property
    def if_clear(self) -> float | None:
        """The ratio where it is clear."""
        return self.value if self.is_clear else None

    def spell(self) -> str:
        """For people."""
        if not self.is_clear:
            return NOISY
        return f"{self.value:.2f}x ±{(self.high / self.low) ** 0.5 - 1:.0%}"


def ratio(vendor: Reading, ours: Reading) -> Ratio:
    """How many times as fast ours is as the vendor's."""
    value = vendor.time_us / ours.time_us
    width = SURE * sqrt(vendor.error**2 + ours.error**2)
    # A spread of several times the median has no meaningful ends; it is not steady either.
    width = min(width, 20.0)
    return Ratio(
        value=value,
        low=value * exp(-width),
        high=value * exp(width),
        is_steady=max(vendor.share, ours.share) <= UNSTEADY,
    )


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio | None:
    """Of the clear ones among ratios of different problems; None where most are not."""
    clear = [r for r in ratios if r.is_clear]
    if not clear or 2 * len(clear) < len(ratios):
        return None
    middle = sum(log(r.value) for r in clear) / len(clear)
    width = sqrt(sum((log(r.high / r.low) / 2) ** 2 for r in clear)) / len(clear)
    return Ratio(value=exp(middle), low=exp(middle - width), high=exp(middle + width))
