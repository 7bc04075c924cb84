"""A store as it is published: what was measured, without what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tilewise.core.telling import Tell, silent
from tilewise.data.derived import lean
from tilewise.data.store import Store, read_shard, write_shard
from tilewise.errors import FileError, InputError

_COMPRESSION = 19
"""Of compression: a published shard is written once and read often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What was written, and how much smaller it is."""

    rows: int
    shards: int
    bytes_before: int
    bytes_after: int


def publish(source: Path | str, target: Path | str, tell: Tell = silent) -> Published:
    """Writes the shards of a store, lean, into a new folder; both read alike."""
    store, place = Store(source), Path(target)
    if store.journals():
        raise InputError(f"a sweep of {source} is under way, or died; let it end, or run it again")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{target} already exists; choose a new folder")
    rows, shards = 0, store.shards()
    with _appearing(place) as folder:
        for number, shard in enumerate(shards, 1):
            tell(f"writing shard {number} of {len(shards)}")
            table = lean(read_shard(shard))
            write_shard(folder / shard.name, table, effort=_COMPRESSION)
            rows += len(table)
    before, after = (
        sum((home / shard.name).stat().st_size for shard in shards) for home in (store.path, place)
    )
    return Published(rows=rows, shards=len(shards), bytes_before=before, bytes_after=after)


@contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `place` when it is whole: half a store reads like one."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
            fresh = Path(scratch, "new")
            fresh.mkdir()
            yield fresh
            fresh.replace(place)  # an empty folder gives way
    except OSError as error:
        raise FileError(f"{place} cannot be written: {error.strerror or error}") from None
