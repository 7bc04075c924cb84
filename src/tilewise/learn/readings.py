"""Which of several readings of a kernel counts, and how those of a problem become comparable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.measurement import UNSTEADY

SECOND_CONTESTS = 30
"""So many problems that were read in turn twice tell the noise, however many there are."""

_POLISHES = 3

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


def right_readings(rows: Sequence[Row]) -> list[Row]:
    """The right readings of a pair in order; none where the row that holds says it has failed."""
    order = sorted(rows, key=lambda r: (r["is_verdict"], r["attempt"], -(r["time_us"] or 0.0)))
    holds = {r["key"]: r["is_verdict"] and r["status"] == "ok" for r in order}
    return [r for r in order if r["is_verdict"] and r["status"] == "ok" and holds[r["key"]]]


def reading(good: Sequence[Row]) -> Reading:
    """The first reading of a pair, if there are more, and the one that counts.

    One among leaders, taken in turn with them, counts before one taken alone; of several the last.
    """
    if not good:
        return {}, {}
    counts = ([r for r in good if r["stage"] == "leader"] or good)[-1]
    return (good[0] if good[0] is not counts else {}), counts


def read_twice(right: Sequence[Sequence[Row]], read: Sequence[Reading]) -> tuple[Array, Array]:
    """The first reading of pairs that were read again, and the one that counts.

    A reading taken alone and one taken in turn differ by more than noise. So where enough problems
    were read in turn twice, the last two of those tell how well a reading can be repeated.
    """
    turns = [[r for r in good if r["stage"] == "leader"][-2:] for good in right]
    if len({pair[0]["problem_key"] for pair in turns if len(pair) == 2}) >= SECOND_CONTESTS:
        both = [(pair[0], pair[1]) if len(pair) == 2 else ({}, {}) for pair in turns]
    else:
        both = [(first, counts if first else {}) for first, counts in read]
    first, again = (column(pair[at].get("time_us") for pair in both) for at in (0, 1))
    return first, again


def in_turn_us(right: Sequence[Sequence[Row]], problem_index: NDArray[np.int64]) -> Array:
    """Each pair's time in turn with others, NaN where it was never read so.

    A problem may have had several contests, each on a device at a pace of its own. Kernels of more
    than one tell the paces; the mean of a kernel's readings counts, at the pace of the last.
    """
    found = [{r["run_id"]: r["time_us"] for r in good if r["stage"] == "leader"} for good in right]
    time_us = column(next(reversed(runs.values()), None) for runs in found)
    again = np.array([len(runs) > 1 for runs in found], bool)
    rows = np.flatnonzero(np.isin(problem_index, problem_index[again]) & np.isfinite(time_us))
    rows = rows[np.argsort(problem_index[rows], kind="stable")]
    for of_one in np.split(rows, np.flatnonzero(np.diff(problem_index[rows])) + 1):
        runs = sorted({run for row in of_one for run in found[row]})  # they begin with their time
        log = np.log([column(found[row].get(run) for run in runs) for row in of_one])
        time_us[of_one] = np.exp(_at_last_pace(log)) if len(runs) > 1 else time_us[of_one]
    return time_us


def _at_last_pace(log: Array) -> Array:
    """The mean of each row without NaN, every column brought to the pace of the last."""
    shared = log[np.isfinite(log).sum(axis=1) > 1]
    pace = np.zeros(log.shape[1])
    for _ in range(_POLISHES):
        own = np.nanmedian(shared - pace, axis=1, keepdims=True)
        apart = shared - own
        known = np.isfinite(apart).any(axis=0)
        pace[known] = np.nanmedian(apart[:, known], axis=0)
    result: Array = np.nanmean(log - pace + pace[-1], axis=1)
    return result


def comparable(
    read: Sequence[Reading], in_turn_us: Array, problem_index: NDArray[np.int64], first_us: Array
) -> Array:
    """The times that count, those read alone moved to where those read in turn are.

    Kernels read in turn find the device in another state than each of them did alone: on an H200
    short ones took 0.4 us less, and those of a millisecond up to a quarter more. Left as they are,
    the best of a problem would be whichever kind of reading is the faster. What was read both ways
    tells by how much; faster kernels are moved in proportion, so that no time falls below zero.
    """
    in_turn = np.isfinite(in_turn_us)
    time_us = np.where(in_turn, in_turn_us, column(counts.get("time_us") for _, counts in read))
    twice = in_turn & np.isfinite(first_us)
    order = np.argsort(problem_index, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(problem_index[order])) + 1):
        both, alone = rows[twice[rows]], rows[~in_turn[rows]]
        if len(both):
            shift = np.median(time_us[both] - first_us[both])
            level = np.median(first_us[both])
            time_us[alone] += shift * np.minimum(1.0, time_us[alone] / level)
    return time_us


def column(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], np.float64)
