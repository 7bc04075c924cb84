"""A store as it is published: what was measured, without what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilewise.data.derived import lean
from tilewise.data.store import Store, read_shard, write_shard
from tilewise.errors import InputError

_LEVEL = 19
"""Of compression: a published shard is written once and read often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What was written, and how much smaller it is."""

    rows: int
    shards: int
    bytes_before: int
    bytes_after: int


def publish(source: Path | str, target: Path | str) -> Published:
    """Writes the shards of a store, lean, into a new folder; both read alike."""
    store, place = Store(source), Path(target)
    if store.journals():
        raise InputError(f"a sweep of {source} is under way, or died; let it end, or run it again")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{target} is there already; name a new folder")
    home = Store(place, create=True)
    rows = after = 0
    for shard in store.shards():
        table = lean(read_shard(shard))
        write_shard(home.path / shard.name, table, level=_LEVEL)
        rows += len(table)
        after += (home.path / shard.name).stat().st_size
    before = sum(shard.stat().st_size for shard in store.shards())
    return Published(rows=rows, shards=len(store.shards()), bytes_before=before, bytes_after=after)
