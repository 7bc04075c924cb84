"""What a store already knows about a sweep: finished rows, leaders, kernels to stay away from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import numpy as np

from tilewise.core.measurement import STATUSES, Measurement, Setting
from tilewise.data.schema import faults, holding, verdicts
from tilewise.data.store import Store

COSTLY = ("timeout", "crash", "launch_error")
"""Failures that can cost a worker: it is gone, or may have to be replaced."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known about one key."""

    status: str
    """Of the attempt that holds: the last verdict, else the last."""
    attempts: int
    time_us: float
    """Of the last attempt that was not a leader's; NaN where there is none."""
    spread_us: float
    is_confirmed: bool
    """Whether it was measured among leaders."""
    is_verdict: bool
    """Whether the attempt that holds is one: `Measurement.is_verdict`."""
    is_settled: bool = True
    """Whether any attempt tells of the kernel; otherwise all tell of the machine."""

    @property
    def is_good(self) -> bool:
        """Whether a right result with a time holds."""
        return self.status == "ok" and self.is_verdict


class Known:
    """An index over the rows of stores that stays small: arrays, not objects."""

    def __init__(
        self, stores: Sequence[Store], settings: Iterable[Setting], *, give_up_after: int
    ) -> None:
        import pyarrow as pa

        columns = ["key", "attempt", "stage", "status", "time_us", "spread_us"]
        identity = ["problem_key", "kernel_key", "policy_key", "device", "toolchain", "message"]
        wanted = [*columns, *identity]
        table = pa.concat_tables([store.table(wanted, latest=False) for store in stores])
        self._give_up_after = give_up_after
        self._new: dict[str, Record] = {}
        is_fault = faults(table)
        self._index(table.select(columns), is_fault)
        table = table.filter(~is_fault)
        self._failed_pairs: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._good: set[str] = set()
        self._remember(table, list(settings))

    def _index(self, table: Any, is_fault: Any) -> None:
        import pyarrow.compute as pc

        encoded = pc.dictionary_encode(table.column("key").combine_chunks())
        codes = encoded.indices.to_numpy()
        keys = np.array(encoded.dictionary.to_pylist(), "S64")
        attempts = table.column("attempt").to_numpy()
        stage = table.column("stage").to_numpy(zero_copy_only=False)
        status = table.column("status").to_numpy(zero_copy_only=False)
        count = len(keys)
        is_verdict = verdicts(table)
        order = np.lexsort((attempts, is_verdict))
        order = order[~is_fault[order]]
        self._verdict, self._status = np.zeros(count, bool), np.zeros(count, np.uint8)
        self._verdict[codes[order]] = is_verdict[order]
        numbers = {name: number for number, name in enumerate(STATUSES)}
        number_of = np.array([numbers.get(s, 0) for s in status], np.uint8)
        self._status[codes[order]] = number_of[order]
        self._attempts = np.zeros(count, np.int32)
        np.maximum.at(self._attempts, codes, (attempts + 1).astype(np.int32))
        self._settled, self._confirmed = np.zeros(count, bool), np.zeros(count, bool)
        self._settled[codes[order]] = True
        self._confirmed[codes[stage == "leader"]] = True
        times = table.column("time_us").to_numpy(zero_copy_only=False)
        spreads = table.column("spread_us").to_numpy(zero_copy_only=False)
        passed = order[(stage[order] != "leader") & (status[order] == "ok")]
        self._time, self._spread = np.full(count, np.nan), np.full(count, np.nan)
        self._time[codes[passed]], self._spread[codes[passed]] = times[passed], spreads[passed]
        by_key = np.argsort(keys)
        self._keys = keys[by_key]
        arrays = ("_status", "_attempts", "_confirmed", "_time", "_spread", "_verdict", "_settled")
        for name in arrays:
            setattr(self, name, getattr(self, name)[by_key])

    def _remember(self, table: Any, settings: Sequence[Setting]) -> None:
        """Failures on this device with these toolchains, whatever the policy."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not len(table):
            return
        for device, toolchain in {(s.device, s.toolchain) for s in settings}:
            here = table.filter(
                pc.and_(
                    pc.equal(table.column("device"), pa.scalar(device)),
                    pc.equal(table.column("toolchain"), pa.scalar(toolchain)),
                )
            )
            is_ok = pc.equal(here.column("status"), "ok")
            self._good.update(pc.unique(here.filter(is_ok).column("kernel_key")).to_pylist())
            bad = here.filter(pc.invert(is_ok))
            if not len(bad):
                continue
            costly = bad.filter(pc.is_in(bad.column("status"), pa.array(COSTLY)))
            self._failures.update(costly.column("kernel_key").to_pylist())
            self._failed_pairs |= _failed(holding(here))

    def look_up(self, keys: Sequence[str]) -> list[Record | None]:
        """What is known about each key."""
        if not len(self._keys):
            return [self._new.get(key) for key in keys]
        wanted = np.array(keys, "S64")
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        hits = self._keys[at] == wanted
        return [
            self._new.get(key) or (self._record(int(i)) if hit else None)
            for key, i, hit in zip(keys, at, hits, strict=True)
        ]

    def _record(self, at: int) -> Record:
        return Record(
            STATUSES[self._status[at]],
            int(self._attempts[at]),
            float(self._time[at]),
            float(self._spread[at]),
            bool(self._confirmed[at]),
            bool(self._verdict[at]),
            bool(self._settled[at]),
        )

    def learn(self, row: Measurement, *, keep: bool) -> None:
        """Takes in a row measured meanwhile; `keep` where its key will be looked up again.

        Rows of other runs are met twice, in their journal and in their shard, and count once. They
        are met in any order: a first pass may be in a shard that is read after a leader's journal.
        """
        old = self.look_up([row.key])[0] if keep else None
        is_leader = row.stage == "leader"
        is_timed = row.is_ok and row.time_us is not None and not is_leader
        if old is not None and row.attempt < old.attempts:
            if is_timed and isnan(old.time_us):
                self._new[row.key] = _timed(old, row)
            return
        if row.is_ok:
            self._good.add(row.kernel_key)
        elif row.status in COSTLY:
            self._failures[row.kernel_key] += 1
        if not keep:
            return
        record = old or Record(row.status, 0, float("nan"), float("nan"), False, False, False)
        if is_timed:
            record = _timed(record, row)
        holds = row.is_verdict or not record.is_verdict
        self._new[row.key] = replace(
            record,
            status=row.status if holds else record.status,
            attempts=max(record.attempts, row.attempt + 1),
            is_confirmed=record.is_confirmed or is_leader,
            is_verdict=record.is_verdict or row.is_verdict,
            is_settled=record.is_settled or not row.is_fault,
        )

    def has_failed(self, problem_key: str, kernel_key: str) -> bool:
        """Whether the kernel failed on the problem here before, under another policy too."""
        return problem_key + kernel_key in self._failed_pairs

    def is_given_up(self, kernel_key: str) -> bool:
        """Whether the kernel has cost so many workers, and done so little, that it is left."""
        often = self._failures[kernel_key] >= self._give_up_after > 0
        return often and kernel_key not in self._good


def _timed(record: Record, row: Measurement) -> Record:
    assert row.time_us is not None
    return replace(record, time_us=row.time_us, spread_us=row.spread_us or 0.0)


def _failed(held: Any) -> set[str]:
    """Problem and kernel where a wrong result holds, or nothing but failures under any policy."""
    import pyarrow.compute as pc

    pairs = pc.binary_join_element_wise(held.column("problem_key"), held.column("kernel_key"), "")
    status = held.column("status")
    is_ok, is_wrong = pc.equal(status, "ok"), pc.equal(status, "wrong_result")
    failed = set(pairs.filter(pc.invert(is_ok)).to_pylist())
    return failed - set(pairs.filter(is_ok).to_pylist()) | set(pairs.filter(is_wrong).to_pylist())
