"""The union of stores: every measurement once, repeated ones kept side by side and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tilewise.core.measurement import Measurement
from tilewise.core.plain_files import resolved
from tilewise.core.telling import Tell, silent
from tilewise.data.journal import read_journal
from tilewise.data.schema import from_table, to_table
from tilewise.data.store import Store, read_shard, write_rows, write_shard
from tilewise.errors import InputError, NoStoreError, StoreError

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


def merge(target: Path | str, sources: Sequence[Path | str], tell: Tell = silent) -> Merged:
    """Adds the rows of `sources` to the store `target`, made if needed.

    Nothing is dropped: where several have measured a key, their rows become attempts in the order
    of their time, and of all attempts the last verdict holds. The union is the same whatever the
    order of `sources`, and in however many merges it is made: shards of the target whose rows make
    room for older ones are written anew. Merging the same stores again changes nothing.
    """
    stores = [Store(source) for source in sources]
    for store in stores:
        if _place(store.path) == _place(Path(target)):
            raise InputError(f"{store.path} cannot be merged into itself")
    incoming = []
    for store in stores:
        tell(f"reading {store.path}")
        found = list(store.measurements(latest=False))
        _check_readable(store.path, found)
        incoming += found
    # Made only now: sources that cannot be read leave no empty store behind.
    home = Store(target, create=True)
    with home.rewriting():
        return _merged(home, incoming, tell)


def _merged(home: Store, incoming: Sequence[Measurement], tell: Tell) -> Merged:
    """Rows put into a store that nobody else writes anew."""
    home.recover()
    tell(f"reading {home.path}")
    under_way = _under_way(home)
    shards = {path: list(from_table(read_shard(path))) for path in home.shards()}
    held = {_bare(row) for row in (*chain.from_iterable(shards.values()), *under_way)}
    attempts = _attempts([*chain.from_iterable(shards.values()), *under_way, *incoming])
    if any(attempts[_bare(row)] != row.attempt for row in under_way):
        raise InputError(
            f"a sweep is writing rows to {home.path} that older ones must come before; "
            "merge when it has ended"
        )
    tell(f"putting {len(attempts):,} rows in order")
    added = [_as(row, at) for row, at in attempts.items() if row not in held]
    # Should this be cut short, every row is still there: the same merge again puts them in order.
    for path, rows in shards.items():
        numbered = list(dict.fromkeys(_as(r, attempts[_bare(r)]) for r in rows))
        if numbered != rows:
            write_shard(path, to_table(numbered))
    write_rows(home.path, added)
    result = Merged(rows=len(held) + len(added), added=len(added))
    result.known = len(incoming) - len(added)
    _compare(attempts, held, result)
    return result


def _under_way(home: Store) -> list[Measurement]:
    """Rows in journals, to be read before shards: one that is folded meanwhile is in a shard."""
    found: list[Measurement] = []
    for path in home.journals():
        with suppress(FileNotFoundError):
            found += read_journal(path).rows
    return found


def _place(path: Path) -> Path:
    try:
        return resolved(path)
    except OSError:
        raise NoStoreError(f"the store {path} is a dangling link") from None


def _check_readable(path: Path, rows: Iterable[Measurement]) -> None:
    """Rows that nobody could read afterwards are not spread."""
    try:
        for row in rows:
            row.check()
    except InputError as error:
        raise StoreError(f"{path}: {error}. Nothing was merged") from None


def _bare(row: Measurement) -> Measurement:
    """The measurement itself, whatever attempt it counts as."""
    return _as(row, 0)


def _as(row: Measurement, attempt: int) -> Measurement:
    return row if row.attempt == attempt else replace(row, attempt=attempt)


def _attempts(rows: Iterable[Measurement]) -> dict[Measurement, int]:
    """Every measurement once, with its place among those of its key: key by key, in order of time.

    What was measured at one time in one run, as all that is imported was, keeps its order.
    """
    by_key: dict[str, dict[Measurement, Measurement]] = {}
    for row in rows:
        by_key.setdefault(row.key, {}).setdefault(_bare(row), row)
    attempts = {}
    for found in by_key.values():
        order = sorted(found, key=lambda bare: _order(found[bare])) if len(found) > 1 else found
        attempts.update({bare: at for at, bare in enumerate(order)})
    return attempts


def _order(row: Measurement) -> tuple[Any, ...]:
    return row.measured_at, row.run_id, row.attempt, repr(row)


def _compare(attempts: Mapping[Measurement, int], held: Set[Measurement], result: Merged) -> None:
    """Counts what measures a known key again, and tells where it contradicts another run."""
    by_key: dict[str, list[Measurement]] = {}
    for row in attempts:
        by_key.setdefault(row.key, []).append(row)
    for rows in by_key.values():
        for at, row in enumerate(rows):
            if len(rows) == 1 or row in held:
                continue
            before = [other for other in rows[:at] if other.run_id != row.run_id]
            after = [o for o in rows[at:] if o.run_id != row.run_id and o in held]
            if not before and not after:
                continue
            result.repeated += 1
            what = why_in_conflict(row, before[-1] if before else after[0])
            if what is not None:
                result.conflicts.append(Conflict(kernel=row.kernel, problem=row.problem, what=what))


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
