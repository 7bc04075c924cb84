"""A store in figures: what it holds, for whom, how noisy, and who wins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.measurement import STATUSES
from tilewise.core.telling import Tell, silent
from tilewise.data.store import Store

_COLUMNS = (
    *("op", "dtype", "device", "policy_key", "problem_key", "kernel", "engine", "status"),
    *("time_us", "spread_us", "tflops", "measured_at", "stage", "key", "attempt"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The rows of one op and dtype on one device under one policy."""

    op: str
    dtype: str
    device: str
    policy_key: str
    rows: int
    ok: int
    problems: int
    kernels: int
    winners: int
    """Kernels that are the fastest on some problem."""
    vendor_wins: float | None
    """Share of problems on which the vendor is the fastest; None where it was not measured."""
    best_tflops: float
    noise: float
    """Median spread over time."""
    leaders_moved: float | None
    """Median change of a leader's time when it was measured again."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A whole store."""

    rows: int
    """Keys, each counted once, under the attempt that holds."""
    attempts: int
    shards: int
    bytes: int
    by_status: dict[str, int]
    slices: list[Slice]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "attempts": self.attempts,
            "shards": self.shards,
            "bytes": self.bytes,
            **self.by_status,
            "by_status": self.by_status,
            "slices": [one.to_dict() for one in self.slices],
        }


def overview(path: Path | str, tell: Tell = silent) -> Overview:
    """The figures of a store."""
    store = Store(path)
    tell(f"reading {len(store.shards())} shards")
    everything = store.table(_COLUMNS, latest=False).to_pylist()
    latest = store.table(_COLUMNS).to_pylist()
    tell(f"looking at {len(latest):,} measurements")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in latest:
        name = (row["op"], row["dtype"], row["device"], row["policy_key"])
        groups.setdefault(name, []).append(row)
    moved = _moves(everything)
    counts = Counter(row["status"] for row in latest)
    return Overview(
        rows=len(latest),
        attempts=len(everything),
        shards=len(store.shards()),
        bytes=sum(file.stat().st_size for file in [*store.shards(), *store.journals()]),
        by_status={status: counts[status] for status in STATUSES},
        slices=[_slice(name, rows, moved) for name, rows in sorted(groups.items())],
    )


def _slice(name: tuple[str, ...], rows: list[dict[str, Any]], moved: dict[str, float]) -> Slice:
    fine = [row for row in rows if row["status"] == "ok" and row["time_us"]]
    best: dict[str, dict[str, Any]] = {}
    for row in fine:
        rival = best.get(row["problem_key"])
        if rival is None or row["time_us"] < rival["time_us"]:
            best[row["problem_key"]] = row
    with_vendor = {row["problem_key"] for row in fine if row["engine"] == "vendor"}
    won = sum(best[problem]["engine"] == "vendor" for problem in with_vendor)
    changes = [moved[row["key"]] for row in fine if row["key"] in moved]
    spreads = [(row["spread_us"] or 0.0) / row["time_us"] for row in fine]
    op, dtype, device, policy_key = name
    return Slice(
        op=op,
        dtype=dtype,
        device=device,
        policy_key=policy_key,
        rows=len(rows),
        ok=len(fine),
        problems=len({row["problem_key"] for row in rows}),
        kernels=len({row["kernel"] for row in rows}),
        winners=len({row["kernel"] for row in best.values()}),
        vendor_wins=won / len(with_vendor) if with_vendor else None,
        best_tflops=max((row["tflops"] or 0.0 for row in fine), default=0.0),
        noise=float(np.median(spreads)) if spreads else 0.0,
        leaders_moved=float(np.median(changes)) if changes else None,
    )


def _moves(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Key -> how far a leader's time moved between its two passes, relatively."""
    first = {r["key"]: r["time_us"] for r in rows if r["stage"] != "leader" and r["time_us"]}
    again = {r["key"]: r["time_us"] for r in rows if r["stage"] == "leader" and r["time_us"]}
    return {key: abs(again[key] / first[key] - 1) for key in again.keys() & first.keys()}
