"""What is wrong with a store: torn files, duplicates, impossible rows, mixed timings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import isclose, isfinite
from pathlib import Path
from typing import Any

from tilewise.core.arch import devices, known_archs, load_arch
from tilewise.core.faults import fault_of
from tilewise.core.measurement import (
    LEAST_US,
    STAGES,
    STATUSES,
    Measurement,
    row_key,
    way_of_timing,
)
from tilewise.core.telling import Tell, silent
from tilewise.data.derived import part_key
from tilewise.data.journal import LockedFile, read_journal
from tilewise.data.schema import SchemaError, from_table
from tilewise.data.store import Store, read_shard
from tilewise.engines.device import detect
from tilewise.errors import InputError, StoreError, TilewiseError
from tilewise.ops.contract import all_ops, get_op

TURBO = {"gpu": 1.1, "cpu": 2.0}
"""How far above its listed peak a device may run: listed clocks are sustained ones."""
MOST_SHOWN = 20
_AGAIN = "sweeps measure it again, --forget takes it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    where: str
    what: str

    def to_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "where": self.where, "what": self.what}


@dataclass(slots=True, kw_only=True)
class Report:
    """What a check looked at, and what it found."""

    rows: int = 0
    shards: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Findings by kind; of each kind the first few are kept in `findings`."""

    @property
    def is_sound(self) -> bool:
        return not self.counts

    def add(self, kind: str, where: str, what: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= MOST_SHOWN:
            self.findings.append(Finding(kind=kind, where=where, what=what))

    def to_dict(self) -> dict[str, Any]:
        statuses = {status: self.by_status[status] for status in STATUSES}
        return {
            "rows": self.rows,
            "shards": self.shards,
            **statuses,
            "by_status": statuses,
            "is_sound": self.is_sound,
            "counts": dict(self.counts),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def check(path: Path | str, tell: Tell = silent) -> Report:
    """Reads every row of a store and reports what cannot be."""
    store, report = Store(path), Report()
    seen: dict[tuple[str, int], str] = {}
    policies: dict[tuple[str, str, str, str], Counter[str]] = {}
    done = {shard.stem for shard in store.shards()}
    files = [*store.shards(), *store.journals()]
    for place, file in enumerate(files, 1):
        tell(f"checking file {place} of {len(files)}; {report.rows:,} rows so far")
        if file.suffix != ".parquet" and file.stem in done:
            continue
        for row in _rows(file, report):
            report.rows += 1
            report.by_status[row.status] += 1
            if row.identity in seen:
                report.add("duplicate", file.name, f"{_name(row)} is also in {seen[row.identity]}")
            seen.setdefault(row.identity, file.name)
            for kind, what in flaws(row):
                report.add(kind, file.name, f"{_name(row)}: {what}")
            group = (row.op, row.dtype, row.device, row.engine)
            policies.setdefault(group, Counter())[_timed(row.policy)] += 1
    for file in store.damaged():
        size = file.stat().st_size
        what = f"{size} bytes of a journal could not be read; a sweep measures their rows again"
        report.add("damaged_journal", file.name, f"{what}. Remove the file when you have seen it")
    for (op, dtype, device, engine), found in policies.items():
        if len(found) > 1:
            shown = "; ".join(f"{count} rows under {text}" for text, count in found.most_common(3))
            where = f"{op} {dtype} on {device} by {engine}"
            report.add("mixed_policies", where, f"times of {len(found)} different things: {shown}")
    return report


def _rows(file: Path, report: Report) -> list[Measurement]:
    if file.suffix == ".parquet":
        report.shards += 1
        try:
            return list(from_table(read_shard(file)))
        except StoreError as error:
            kind = "unknown_schema" if isinstance(error, SchemaError) else "torn_shard"
            report.add(kind, file.name, str(error))
            return []
    try:
        contents = read_journal(file)
    except FileNotFoundError:  # folded meanwhile, into a shard that this check did not see
        return []
    if contents.damaged:
        count = contents.damaged.count(b"\n")
        report.add("damaged_journal", file.name, f"{count} lines are damaged; the rest was read")
    if contents.torn_bytes and not _is_being_written(file):
        report.add(
            "torn_journal",
            file.name,
            f"{contents.torn_bytes} bytes after {len(contents.rows)} whole rows are damaged",
        )
    return contents.rows


def _is_being_written(journal: Path) -> bool:
    """Whether a run holds the journal: its tail is then on its way, not broken."""
    try:
        held = LockedFile.take(journal, create=False)
    except OSError:  # a store that may only be read has no writer either
        return False
    if held is not None:
        held.close()
    return held is None


def flaws(row: Measurement) -> list[tuple[str, str]]:
    """Kind and words of everything about a row that cannot be."""
    found = [("impossible", what) for what in impossible(row)]
    fault = fault_of(row.status, row.message)
    if fault is not None:
        found.append(("machine_fault", f"{fault!r} is no fact about a kernel; {_AGAIN}"))
    if row.op not in all_ops():
        found.append(("unknown_op", f"op is {row.op!r}; there are {', '.join(all_ops())}"))
    if row.arch not in known_archs():
        found.append(("unknown_arch", f"arch is {row.arch!r}"))
    torn = row.torn()
    for name, text in torn.items():
        found.append(("invalid_json", f"{name} is not a JSON object: {text[:80]!r}"))
    keyed = {"problem": row.problem, "kernel": row.kernel_fields, "policy": row.policy}
    for part, text in keyed.items():
        if text not in torn.values() and part_key(part, text) != getattr(row, f"{part}_key"):
            found.append(("wrong_key", f"its {part}_key is not that of its {part}"))
    return found or _wrong_rates(row)


def _wrong_rates(row: Measurement) -> list[tuple[str, str]]:
    try:
        *work, dtype = _work(row.op, row.problem)
    except (TilewiseError, TypeError) as error:
        return [("invalid_problem", str(error))]
    if dtype != row.dtype:
        return [("wrong_dtype", f"its dtype is {row.dtype!r}, its problem's {dtype!r}")]
    if row.time_us is None:
        return []
    rates = {"tflops": work[0] / row.time_us * 1e-6, "gb_s": work[1] / row.time_us * 1e-3}
    return [
        ("wrong_rate", f"{name} is {given:.6g}; its time makes it {rate:.6g}")
        for name, rate in rates.items()
        if (given := getattr(row, name)) is not None and not isclose(given, rate, rel_tol=1e-6)
    ]


@lru_cache(maxsize=64)
def _timed(policy: str) -> str:
    """How a policy times, by which alone times may be compared; itself where it is no JSON."""
    try:
        return way_of_timing(policy)
    except InputError:
        return policy


@lru_cache(maxsize=4096)
def _work(op: str, problem: str) -> tuple[int, int, str]:
    """FLOPs, bytes and dtype of a problem by its JSON."""
    found = get_op(op).problem.from_dict(json.loads(problem))
    return found.flops, found.bytes, found.dtype


def impossible(row: Measurement) -> list[str]:
    """Every number and word of a row that cannot be."""
    found = []
    if row.status not in STATUSES:
        found.append(f"status is {row.status!r}")
    if row.stage not in STAGES:
        found.append(f"stage is {row.stage!r}")
    if row.attempt < 0:
        found.append(f"attempt is {row.attempt}")
    if row.repeats < 0:
        found.append(f"repeats is {row.repeats}")
    if row.min_us is not None and row.time_us is not None and row.min_us > row.time_us:
        found.append(f"min_us is {row.min_us:g}, above its median {row.time_us:g}")
    if row.status == "ok" and row.time_us is None:
        found.append("it is ok but has no time")
    for name in ("time_us", "min_us"):
        value = getattr(row, name)
        if value is not None and not (isfinite(value) and value >= LEAST_US):
            found.append(f"{name} is {value:g}")
    for name in ("spread_us", "tflops", "gb_s", "rel_error", "compile_s"):
        value = getattr(row, name)
        if value is not None and not (isfinite(value) and value >= 0):
            found.append(f"{name} is {value:g}")
    peak = _peak(row.arch, row.device, row.dtype)
    if peak and row.tflops is not None and row.tflops > peak:
        found.append(
            f"{row.tflops:.4g} TFLOPS; {row.device} cannot exceed {peak:.4g} in {row.dtype}"
        )
    parts = (row.problem_key, row.kernel_key, row.device, row.toolchain, row.policy_key)
    if row.key != row_key(*parts):
        found.append("its key is not that of its problem, kernel, device, toolchain and policy")
    return found


@cache
def _peak(arch: str, device: str, dtype: str) -> float:
    """The most TFLOPS that a device can reach; 0 where unknown.

    Processors of one architecture differ a hundredfold: this machine's own figures judge its own
    rows. Of any other device the largest product of its architecture is the bound.
    """
    if arch not in known_archs():
        return 0.0
    if load_arch(arch).kind == "cpu" and detect("cpu").device == device:
        products = [detect("cpu")]
    else:
        products = [load_arch(arch, product) for product in devices(arch) or [""]]
    return max(p.peak_tflops.get(dtype, 0.0) * TURBO[p.kind] for p in products)


def _name(row: Measurement) -> str:
    return f"{row.kernel} on {row.problem}, attempt {row.attempt}"
