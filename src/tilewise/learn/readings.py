"""Which of several readings of a kernel counts, and how those of a problem become comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.measurement import UNSTEADY, sources_of

SECOND_CONTESTS = 30
"""So many problems that were read in turn twice tell the noise, however many there are."""

_MOST_POLISHES = 200
_STEADY = 1e-9

Row = Mapping[str, Any]
Reading = tuple[Row, Row]


def usable(rows: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What can be learned from, of a `kind` of device: a GPU's steady readings, all of a CPU's.

    Whatever disturbs a shared CPU slows it, and readings in turn even that out; of those taken
    alone the shortest call is nearest to what a kernel takes.
    """
    if kind != "cpu":
        return [r for r in rows if (r["spread_us"] or 0) <= UNSTEADY * (r["time_us"] or 0)]
    return [
        r if r["stage"] == "leader" else {**r, "time_us": r["min_us"] or r["time_us"]} for r in rows
    ]


def of_newest_sources(rows: Sequence[Row]) -> Sequence[Row]:
    """The readings of a pair that were taken with the kernel as its last run had it.

    A kernel written anew keeps its name; what the old one took says nothing about it.
    """
    if len({r["toolchain"] for r in rows}) == 1:
        return rows
    last = sources_of(max(rows, key=lambda r: r["run_id"] or "")["toolchain"])
    return [r for r in rows if sources_of(r["toolchain"]) == last]


def right_readings(rows: Sequence[Row]) -> list[Row]:
    """The right readings of a pair in order; none where the row that holds says it has failed.

    Attempts are counted under one policy; runs, whose names begin with their time, under all.
    """
    order = sorted(rows, key=lambda r: (r["is_verdict"], r["attempt"], -(r["time_us"] or 0.0)))
    holds = {r["key"]: r["is_verdict"] and r["status"] == "ok" for r in order}
    right = [r for r in order if r["is_verdict"] and r["status"] == "ok" and holds[r["key"]]]
    return sorted(right, key=lambda r: r["run_id"] or "")


def reading(good: Sequence[Row]) -> Reading:
    """The first reading of a pair, if there are more, and the one that counts.

    One among leaders, taken in turn with them, counts before one taken alone; of several the last.
    """
    if not good:
        return {}, {}
    counts = ([r for r in good if r["stage"] == "leader"] or good)[-1]
    return (good[0] if good[0] is not counts else {}), counts


def read_twice(
    right: Sequence[Sequence[Row]], read: Sequence[Reading], problem_index: NDArray[np.int64]
) -> tuple[Array, Array]:
    """The first reading of pairs that were read again, and the one that counts.

    A reading taken alone and one taken in turn differ by more than noise. So where enough problems
    had two contests, the last two that share most kernels tell how well a reading can be repeated.
    """
    found = [_contests(good) for good in right]
    both: list[tuple[float | None, float | None]] = [(None, None)] * len(found)
    again = 0
    for rows in _by_problem(problem_index, np.array([len(runs) > 1 for runs in found], bool)):
        shared = Counter(pair for row in rows for pair in combinations(sorted(found[row]), 2))
        first, last = max(shared, key=lambda pair: (shared[pair], pair))
        again += 1
        for row in rows:
            both[row] = (found[row].get(first), found[row].get(last))
    if again < SECOND_CONTESTS:
        both = [(f.get("time_us"), c.get("time_us") if f else None) for f, c in read]
    kept = [pair if None not in pair else (None, None) for pair in both]
    return column(first for first, _ in kept), column(last for _, last in kept)


def _contests(good: Sequence[Row]) -> dict[str, float]:
    """Run -> the time that a kernel took in turn with others."""
    return {r["run_id"]: r["time_us"] for r in good if r["stage"] == "leader"}


def _by_problem(
    problem_index: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> list[NDArray[np.int64]]:
    """The chosen rows, problem by problem."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return []
    rows = rows[np.argsort(problem_index[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(problem_index[rows])) + 1)


def in_turn_us(right: Sequence[Sequence[Row]], problem_index: NDArray[np.int64]) -> Array:
    """Each pair's time in turn with others, NaN where it was never read so.

    A problem may have had several contests, each on a device at a pace of its own. Kernels of more
    than one tell the paces; the mean of a kernel's readings counts, at the pace of the last.
    """
    found = [_contests(good) for good in right]
    time_us = column(next(reversed(runs.values()), None) for runs in found)
    for rows in _by_problem(problem_index, np.isfinite(time_us)):
        runs = sorted({run for row in rows for run in found[row]})
        if len(runs) > 1:
            log = np.log([column(found[row].get(run) for run in runs) for row in rows])
            time_us[rows] = np.exp(_at_last_pace(log))
    return time_us


def _at_last_pace(log: Array) -> Array:
    """The mean of each row without NaN, every column brought to the pace of the last.

    A column that shares no row with another is left as it is.
    """
    shared = log[np.isfinite(log).sum(axis=1) > 1]
    known = np.isfinite(shared).any(axis=0)
    pace = np.zeros(log.shape[1])
    for _ in range(_MOST_POLISHES if len(shared) else 0):
        before = pace.copy()
        own = np.nanmedian(shared - pace, axis=1, keepdims=True)
        pace[known] = np.nanmedian((shared - own)[:, known], axis=0)
        pace[known] -= pace[-1]
        if np.abs(pace - before).max() < _STEADY:
            break
    result: Array = np.nanmean(log - pace, axis=1)
    return result


def comparable(
    read: Sequence[Reading], turns_us: Array, problem_index: NDArray[np.int64], first_us: Array
) -> Array:
    """The times that count, those read alone moved to where those read in turn are.

    Kernels read in turn find the device in another state than each of them did alone: on an H200
    short ones took 0.4 us less, and those of a millisecond up to a quarter more. Left as they are,
    the best of a problem would be whichever kind of reading is the faster. What was read both ways
    tells by how much; faster kernels are moved in proportion, so that no time falls below zero.
    """
    in_turn = np.isfinite(turns_us)
    time_us = np.where(in_turn, turns_us, column(counts.get("time_us") for _, counts in read))
    twice = in_turn & np.isfinite(first_us)
    order = np.argsort(problem_index, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(problem_index[order])) + 1):
        both, alone = rows[twice[rows]], rows[~in_turn[rows]]
        if len(both):
            shift = np.median(time_us[both] - first_us[both])
            usual_us = np.median(first_us[both])
            time_us[alone] += shift * np.minimum(1.0, time_us[alone] / usual_us)
    return time_us


def column(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], np.float64)
