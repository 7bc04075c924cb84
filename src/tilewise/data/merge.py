"""The union of stores: every measurement once, repeated ones kept side by side and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewise.core.measurement import Measurement
from tilewise.errors import InputError
from tilewise.sweep.store import Store, write_rows

APART = 0.25
"""Times of one key further apart than this, relatively, contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two measurements of one key that do not agree."""

    kernel: str
    problem: str
    what: str

    def to_dict(self) -> dict[str, str]:
        return {"kernel": self.kernel, "problem": self.problem, "what": self.what}


@dataclass(slots=True, kw_only=True)
class Merged:
    """What became of the rows of a merge."""

    rows: int = 0
    """In the target afterwards."""
    added: int = 0
    known: int = 0
    """Rows that the target had already."""
    repeated: int = 0
    """Other measurements of a key that the target had; kept as further attempts."""
    conflicts: list[Conflict] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "added": self.added,
            "known": self.known,
            "repeated": self.repeated,
            "conflicts": [conflict.to_dict() for conflict in self.conflicts],
        }


def merge(target: Path | str, sources: Sequence[Path | str]) -> Merged:
    """Adds the rows of `sources` to the store `target`, made if needed.

    Nothing is dropped: where several have measured a key, their rows become attempts in the order
    of their time, whatever the order of `sources`, and of all attempts the last verdict holds.
    Merging the same stores again changes nothing.
    """
    stores = [Store(source) for source in sources]
    for store in stores:
        if store.path.resolve() == Path(target).resolve():
            raise InputError(f"{store.path} cannot be merged into itself")
    incoming = [row for store in stores for row in store.measurements(latest=False)]
    result = Merged()
    held: dict[str, list[Measurement]] = {}
    # Made only now: sources that cannot be read leave no empty store behind.
    for row in Store(target, create=True).measurements(latest=False):
        held.setdefault(row.key, []).append(row)
        result.rows += 1
    added = []
    for row in sorted(incoming, key=lambda r: (r.key, *_when(r), r.status, r.time_us or 0.0)):
        kept = _place(row, held.setdefault(row.key, []), result)
        if kept is not None:
            added.append(kept)
    write_rows(target, added)
    result.added = len(added)
    result.rows += len(added)
    return result


def _place(row: Measurement, others: list[Measurement], result: Merged) -> Measurement | None:
    """The row as it is added, or None where it is there; it joins `others`."""
    if any(_is_same(row, other) for other in others):
        result.known += 1
        return None
    foreign = [other for other in others if other.run_id != row.run_id]
    if foreign:
        result.repeated += 1
        what = why_in_conflict(row, foreign[-1])
        if what is not None:
            result.conflicts.append(Conflict(kernel=row.kernel, problem=row.problem, what=what))
    kept = replace(row, attempt=_attempt(row, others))
    others.append(kept)
    return kept


def _attempt(row: Measurement, others: Sequence[Measurement]) -> int:
    """The row's number: after all that is older, and before all that is newer if there is room."""
    later = [other.attempt for other in others if _when(other) > _when(row)]
    earlier = [other.attempt for other in others if _when(other) <= _when(row)]
    wanted = max([row.attempt, *(attempt + 1 for attempt in earlier)])
    return wanted if not later or wanted < min(later) else max(*later, *earlier, wanted - 1) + 1


def _when(row: Measurement) -> tuple[float, str, int]:
    return row.measured_at, row.run_id, row.attempt


def _is_same(row: Measurement, other: Measurement) -> bool:
    """Whether both are one measurement, whatever attempt it counts as."""
    return replace(row, attempt=0) == replace(other, attempt=0)


def why_in_conflict(row: Measurement, other: Measurement) -> str | None:
    """What two measurements of one key disagree about, or None."""
    if row.status != other.status:
        return f"{row.status} in run {row.run_id}, {other.status} in run {other.run_id}"
    if row.time_us is None or other.time_us is None:
        return None
    apart = abs(row.time_us - other.time_us) / min(row.time_us, other.time_us)
    noise = ((row.spread_us or 0.0) + (other.spread_us or 0.0)) / min(row.time_us, other.time_us)
    if apart <= max(APART, noise):
        return None
    return f"{row.time_us:.4g} us in run {row.run_id}, {other.time_us:.4g} us in run {other.run_id}"
