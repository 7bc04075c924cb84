"""Judges selections by measurements of one device: against the best kernel and the vendor's.

The chosen kernel, the leaders and the vendor's are timed in turn (a *contest*), so that the best is
not the luckiest reading and drift of the device falls on all of them alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from tilewise.core.kernel import Kernel
from tilewise.core.measurement import BUILD_FAILURES, Measurement, json_object
from tilewise.core.problem import Problem
from tilewise.judge.ratios import Ratio, Reading, geometric_mean, ratio

TOP = (1, 3, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One problem: what was chosen, what was best and what the vendor's routine took."""

    problem: Problem
    labels: Mapping[str, Any] = field(default_factory=dict)
    path: str
    """Who chose, as in `Choice`."""
    chosen: str
    chosen_us: float | None
    """None where the chosen kernel failed."""
    best: str
    best_us: float
    place: int | None
    """Where the best stands in the ranking, from 1; None where it was not ranked."""
    vendor: str | None
    vendor_us: float | None
    ratio: Ratio | None
    """The vendor's time over the chosen kernel's, as far as the readings tell."""
    kernels: int
    """How many gave a right result."""
    spread: float | None
    """The contest's typical interquartile range over its time."""
    again: float | None
    """What the first pass's winner reached in the contest: an oracle, measured twice."""
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def efficiency(self) -> float:
        """Speed of the chosen kernel over the best one's; 0 where it failed."""
        return self.best_us / self.chosen_us if self.chosen_us else 0.0

    @property
    def vs_vendor(self) -> float | None:
        """The vendor's time over the chosen kernel's: above 1, the choice is faster.

        None where either failed, and where their spread swallows it.
        """
        return None if self.ratio is None else self.ratio.if_clear

    def to_dict(self) -> dict[str, Any]:
        names = ("path", "chosen", "chosen_us", "best", "best_us", "place", "vendor", "vendor_us")
        return {
            "problem": self.problem.to_dict(),
            **({"labels": dict(self.labels)} if self.labels else {}),
            **{name: getattr(self, name) for name in names},
            "efficiency": 100 * self.efficiency,
            "vs_vendor": self.vs_vendor,
            "vs_vendor_interval": self.ratio and [self.ratio.low, self.ratio.high],
            "kernels": self.kernels,
            "spread": self.spread,
            "failures": dict(self.failures),
        }


def judge(
    problem: Problem,
    path: str,
    ranking: Sequence[Kernel],
    rows: Iterable[Measurement],
    labels: Mapping[str, Any] | None = None,
) -> Verdict | None:
    """The verdict on a ranking of measured kernels; None where no kernel gave a right result.

    Kernels that do not build are passed over, as a dispatcher does; any other failure of the
    chosen one counts against it.
    """
    every = list(rows)
    held = _held(every)
    good = {name: row for name, row in held.items() if row.is_ok and row.time_us}
    if not good or not ranking:
        return None
    names = [kernel.name for kernel in ranking]
    chosen = next((n for n in names if n in held and not _is_unbuilt(held[n])), names[0])
    right = [row for row in every if row.kernel in good and row.is_ok and row.time_us]
    contest = _contest(right, chosen)
    read = contest or good
    times = {name: row.time_us or 0.0 for name, row in read.items()}
    best = min(times, key=lambda name: times[name])
    vendors = [n for n in times if held[n].engine == "vendor"]
    vendor = min(vendors, key=lambda name: times[name], default=None)
    return Verdict(
        problem=problem,
        labels=labels or {},
        path=path,
        chosen=chosen,
        chosen_us=times.get(chosen),
        best=best,
        best_us=times[best],
        place=names.index(best) + 1 if best in names else None,
        vendor=vendor,
        vendor_us=times[vendor] if vendor else None,
        ratio=_ratio(read, chosen, vendor),
        kernels=len(good),
        spread=_spread(read),
        again=_again(right, contest),
        failures=Counter(row.status for row in held.values() if not row.is_ok),
    )


def reading(row: Measurement) -> Reading:
    """A right result's time; among leaders it comes from as many rounds as the policy has."""
    rounds = json_object(row.policy, "a policy").get("rounds", 1) if row.stage == "leader" else 1
    return Reading(time_us=row.time_us or inf, spread_us=row.spread_us or 0.0, rounds=rounds)


def _ratio(rows: Mapping[str, Measurement], chosen: str, vendor: str | None) -> Ratio | None:
    if vendor is None or chosen not in rows:
        return None
    if chosen == vendor:  # one reading is as fast as itself
        return Ratio(value=1.0, low=1.0, high=1.0)
    return ratio(reading(rows[vendor]), reading(rows[chosen]))


def why_unjudged(rows: Iterable[Measurement]) -> str:
    """Why `judge` says nothing of a problem with these rows."""
    held = _held(rows)
    if not held:
        return "nothing was measured"
    if any(row.is_ok and row.time_us for row in held.values()):
        return "of the kernels that gave a right result none can be chosen"
    return f"no kernel gave a right result ({', '.join(sorted({r.status for r in held.values()}))})"


def _is_unbuilt(row: Measurement) -> bool:
    return row.status in BUILD_FAILURES


def _held(rows: Iterable[Measurement]) -> dict[str, Measurement]:
    """Kernel -> the row that holds: the last verdict, else the last row."""
    return {row.kernel: row for row in sorted(rows, key=lambda row: row.rank)}


def _contest(rows: Iterable[Measurement], chosen: str) -> dict[str, Measurement]:
    """The last time that the chosen kernel was timed in turn with the leaders; may be empty.

    Of right results of kernels whose right result holds: a wrong one may have a time too.
    """
    contests: dict[tuple[float, str], dict[str, Measurement]] = {}
    for row in rows:
        if row.stage == "leader":
            contests.setdefault((row.measured_at, row.run_id), {})[row.kernel] = row
    having = [when for when, contest in contests.items() if chosen in contest]
    return contests[max(having)] if having else {}


def _spread(rows: Mapping[str, Measurement]) -> float | None:
    known = [r.spread_us / r.time_us for r in rows.values() if r.time_us and r.spread_us]
    return float(np.median(known)) if known else None


def _again(rows: Iterable[Measurement], contest: Mapping[str, Measurement]) -> float | None:
    first = {r.kernel: r.time_us or 0.0 for r in rows if r.stage != "leader"}
    if not contest or not first:
        return None
    winner = contest.get(min(first, key=lambda name: first[name]))
    fastest = min(r.time_us or 0.0 for r in contest.values())
    return None if winner is None or not winner.time_us else fastest / winner.time_us


def summarise(verdicts: Sequence[Verdict], *, unjudged: int = 0) -> dict[str, Any]:
    """All verdicts in a few numbers, JSON-ready; efficiencies are in percent."""
    failures: Counter[str] = Counter()
    for verdict in verdicts:
        failures.update(verdict.failures)
    spreads = [v.spread for v in verdicts if v.spread is not None]
    ratios = [v.ratio for v in verdicts if v.ratio is not None]
    mean = geometric_mean(ratios)
    found: dict[str, Any] = {
        "problems": len(verdicts),
        "unjudged": unjudged,
        "efficiency": percentages([v.efficiency for v in verdicts]),
        "oracle_again": percentages([v.again for v in verdicts if v.again is not None]),
        "vs_vendor": round(mean.value, 4) if mean and mean.is_clear else None,
        "vs_vendor_interval": mean and [round(mean.low, 4), round(mean.high, 4)],
        "too_noisy": sum(not r.is_clear for r in ratios),
        "best_vs_vendor": geomean(
            [v.vendor_us and v.vendor_us / v.best_us for v in verdicts if v.vs_vendor]
        ),
        "paths": dict(Counter(v.path for v in verdicts)),
        "chosen_failed": sum(v.chosen_us is None for v in verdicts),
        "failures": dict(failures),
        "noise": round(float(np.median(spreads)), 5) if spreads else None,
    }
    places = [v.place for v in verdicts]
    for k in TOP if verdicts else ():
        hits = [place is not None and place <= k for place in places]
        found[f"top{k}"] = round(100 * sum(hits) / len(hits), 2)
    return found


def percentages(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, P10 and least of shares, in percent; None of none."""
    if not values:
        return None
    e = 100 * np.array(values)
    p10, median = np.percentile(e, [10, 50])
    named = {"mean": e.mean(), "median": median, "p10": p10, "min": e.min()}
    return {name: round(float(value), 3) for name, value in named.items()}


def geomean(ratios: Iterable[float | None]) -> float | None:
    """The geometric mean of what is there; None of none."""
    known = [ratio for ratio in ratios if ratio]
    return round(float(np.exp(np.mean(np.log(known)))), 4) if known else None
