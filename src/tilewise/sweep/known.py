"""What a store already knows about a sweep: finished rows, leaders, kernels to stay away from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.core.measurement import STATUSES, VERDICTS, Measurement, Setting
from tilewise.sweep.store import Store

COSTLY = ("timeout", "crash", "launch_error")
"""Failures that take a worker with them."""


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


class Known:
    """An index over the rows of a store that stays small: arrays, not objects."""

    def __init__(self, store: Store, settings: Iterable[Setting], *, give_up_after: int) -> None:
        columns = ["key", "attempt", "stage", "status", "time_us", "spread_us"]
        identity = ["problem_key", "kernel_key", "policy_key", "device", "toolchain"]
        table = store.table([*columns, *identity], latest=False)
        self._give_up_after = give_up_after
        self._new: dict[str, Record] = {}
        self._index(table.select(columns))
        self._failed_pairs: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._good: set[str] = set()
        self._remember(table, list(settings))

    def _index(self, table: Any) -> None:
        import pyarrow.compute as pc

        encoded = pc.dictionary_encode(table.column("key").combine_chunks())
        codes = encoded.indices.to_numpy()
        keys = np.array(encoded.dictionary.to_pylist(), "S64")
        attempts = table.column("attempt").to_numpy()
        stage = table.column("stage").to_numpy(zero_copy_only=False)
        status = table.column("status").to_numpy(zero_copy_only=False)
        count = len(keys)
        order = np.lexsort((attempts, sum(status == verdict for verdict in VERDICTS)))
        self._status = np.zeros(count, np.uint8)
        numbers = {name: number for number, name in enumerate(STATUSES)}
        number_of = np.array([numbers.get(s, 0) for s in status], np.uint8)
        self._status[codes[order]] = number_of[order]
        self._attempts = np.zeros(count, np.int32)
        np.maximum.at(self._attempts, codes, (attempts + 1).astype(np.int32))
        self._confirmed = np.zeros(count, bool)
        self._confirmed[codes[stage == "leader"]] = True
        times = table.column("time_us").to_numpy(zero_copy_only=False)
        spreads = table.column("spread_us").to_numpy(zero_copy_only=False)
        passed = order[(stage[order] != "leader") & (status[order] == "ok")]
        self._time, self._spread = np.full(count, np.nan), np.full(count, np.nan)
        self._time[codes[passed]], self._spread[codes[passed]] = times[passed], spreads[passed]
        by_key = np.argsort(keys)
        self._keys = keys[by_key]
        for name in ("_status", "_attempts", "_confirmed", "_time", "_spread"):
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
            for row in here.filter(pc.invert(is_ok)).to_pylist():
                self._failed_pairs.add(row["problem_key"] + row["kernel_key"])
                self._failures[row["kernel_key"]] += row["status"] in COSTLY
            fine = here.filter(is_ok).select(["problem_key", "kernel_key"])
            if self._failed_pairs:
                fine_pairs = (r["problem_key"] + r["kernel_key"] for r in fine.to_pylist())
                self._failed_pairs.difference_update(fine_pairs)

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
        )

    def learn(self, row: Measurement, *, keep: bool) -> None:
        """Takes in a row measured meanwhile; `keep` where its key will be looked up again.

        Rows of other runs are met twice, in their journal and in their shard, and count once.
        """
        old = self.look_up([row.key])[0] if keep else None
        if old is not None and row.attempt < old.attempts:
            return
        if row.is_ok:
            self._good.add(row.kernel_key)
        elif row.status in COSTLY:
            self._failures[row.kernel_key] += 1
        if not keep:
            return
        record = old or Record(row.status, 0, float("nan"), float("nan"), False)
        is_leader = row.stage == "leader"
        if row.is_ok and not is_leader:
            time_us, spread_us = row.time_us or float("nan"), row.spread_us or 0.0
            record = replace(record, time_us=time_us, spread_us=spread_us)
        holds = row.status in VERDICTS or record.status not in VERDICTS
        self._new[row.key] = replace(
            record,
            status=row.status if holds else record.status,
            attempts=max(record.attempts, row.attempt + 1),
            is_confirmed=record.is_confirmed or is_leader,
        )

    def has_failed(self, problem_key: str, kernel_key: str) -> bool:
        """Whether the kernel failed on the problem here before, under another policy too."""
        return problem_key + kernel_key in self._failed_pairs

    def is_given_up(self, kernel_key: str) -> bool:
        """Whether the kernel has cost so many workers, and done so little, that it is left."""
        often = self._failures[kernel_key] >= self._give_up_after > 0
        return often and kernel_key not in self._good
