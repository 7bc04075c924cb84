"""Measurements on disk: a folder of immutable Parquet shards, and journals of rows on their way.

    STORE/<run>-<n>.parquet    shards, written under a temporary name, then renamed
    STORE/<run>-<n>.journal    rows not yet in a shard; folded into the shard of the same name
    STORE/<run>-<n>.damaged    lines of a journal that could not be read when it was folded
    STORE/claims/<name>        locks of the sweeps at work, one per problem being measured

A shard always supersedes the journal of its name, so a process may die between any two steps:
what it leaves behind reads the same, and the next writer tidies it up.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tilewise.core.measurement import Measurement
from tilewise.core.plain_files import replacing
from tilewise.data.derived import columns_to_read
from tilewise.data.journal import SUFFIX, Journal, LockedFile, read_journal
from tilewise.data.schema import (
    RANKING,
    arrow_schema,
    check_schema,
    conform,
    from_table,
    holding,
    to_table,
)
from tilewise.errors import FileError, NoStoreError, StoreError
from tilewise.problems.tables import read_parquet

DAMAGED = ".damaged"
ROWS_PER_SHARD = 5000
SYNC_SECONDS = 2.0


def new_run_id() -> str:
    """A name for one run, in the order of time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


class Store:
    """A folder of measurements, open for reading; `writer` opens it for appending."""

    def __init__(self, path: Path | str, *, create: bool = False) -> None:
        self.path = Path(path)
        if create:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot make the store {path}: {error.strerror}") from None
        if not _is(self.path, Path.is_dir):
            what = "is a file" if _is(self.path, Path.exists) else "does not exist"
            raise NoStoreError(
                f"the store {str(path)[:200]} {what}; a store is a folder that `sweep` makes"
            )

    def shards(self) -> list[Path]:
        """The finished shards, in order of their names."""
        return sorted(self.path.glob("[!.]*.parquet"))

    def journals(self) -> list[Path]:
        """Rows on their way into shards."""
        return sorted(self.path.glob(f"[!.]*{SUFFIX}"))

    def damaged(self) -> list[Path]:
        """What could not be read of journals, set aside."""
        return sorted(self.path.glob(f"[!.]*{DAMAGED}"))

    def table(self, columns: Sequence[str] | None = None, *, latest: bool = True) -> Any:
        """Rows as an Arrow table; with `latest` one a key: its last verdict, else its last row."""
        import pyarrow as pa

        # Journals before shards: one that is folded meanwhile is then seen twice, never missed.
        pending = [(path.stem, _journal_table(path)) for path in self.journals()]
        shards = self.shards()
        done = {path.stem for path in shards}
        wanted = list(columns) if columns is not None else arrow_schema().names
        needed = list(dict.fromkeys([*wanted, *RANKING])) if latest else wanted
        parts = [read_shard(path, needed) for path in shards]
        parts += [t.select(needed) for stem, t in pending if stem not in done and len(t)]
        if not parts:
            return to_table([]).select(wanted)
        table = pa.concat_tables(parts)
        return (holding(table) if latest else table).select(wanted)

    def measurements(self, *, latest: bool = True) -> Iterator[Measurement]:
        """Every row as a value."""
        return from_table(self.table(latest=latest))

    def writer(self, run_id: str | None = None) -> Writer:
        """An open run; what dead runs left behind is tidied up first."""
        self.recover()
        return Writer(self, run_id or new_run_id())

    def recover(self) -> int:
        """Folds the journals of runs that died into shards; returns how many there were."""
        folded = 0
        for path in self.journals():
            held = self._take(path, create=False)
            if held is not None:
                fold(held)
                folded += 1
        return folded

    def claim(self, name: str) -> LockedFile | None:
        """The sole right to work on `name` until removed or the process ends; None if taken."""
        folder = self.path / "claims"
        try:
            folder.mkdir(exist_ok=True)
            if folder.is_symlink():  # where locks would be made is not for a store to say
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a link")
        except OSError as error:
            raise _unwritable(self.path, error) from None
        return self._take(folder / name, create=True)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """The sole right to write shards anew, which two at once would undo for each other."""
        held = self.claim("shards")
        if held is None:
            raise StoreError(
                f"another process writes shards of {self.path} anew; run again when it has ended"
            )
        try:
            yield
        finally:
            held.remove()

    def _take(self, path: Path, *, create: bool) -> LockedFile | None:
        try:
            return LockedFile.take(path, create=create)
        except OSError as error:
            raise _unwritable(self.path, error) from None


def _is(path: Path, asks: Callable[[Path], bool]) -> bool:
    """What `asks` says of a path; False of names that no file can have."""
    try:
        return asks(path)
    except (OSError, ValueError):
        return False


class Writer:
    """Appends the rows of one run; safe against death at any instant."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self._segment = 0
        self._synced = time.monotonic()
        self._journal = self._open()

    def _open(self) -> Journal:
        path = self.store.path / f"{self.run_id}-{self._segment:05d}{SUFFIX}"
        try:
            return Journal(path)
        except OSError as error:
            raise _unwritable(self.store.path, error) from None

    def append(self, rows: Sequence[Measurement]) -> None:
        """Stores the rows together: all of them or, should this process die, none."""
        if not rows:
            return
        self._journal.append(rows)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._journal.sync()
            self._synced = time.monotonic()
        if self._journal.rows >= ROWS_PER_SHARD:
            full = self._journal
            self._segment += 1
            self._journal = self._open()
            fold(full.file)

    def owns(self, path: Path) -> bool:
        """Whether a journal or shard is of this run."""
        return path.stem.rpartition("-")[0] == self.run_id

    def close(self) -> None:
        """Folds what is left; the run is then shards alone."""
        fold(self._journal.file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StoreError:
            # The rows are safe in the journal; the error already under way says more.
            if error is None:
                raise


def write_rows(path: Path | str, rows: Sequence[Measurement]) -> Store:
    """Adds rows to the store at `path`, made if needed, as one shard."""
    store = Store(path, create=True)
    if rows:
        write_shard(store.path / f"{new_run_id()}-00000.parquet", to_table(rows))
    return store


def fold(journal: LockedFile) -> None:
    """Turns a journal held by this process into a shard and removes it."""
    shard = journal.path.with_suffix(".parquet")
    if not shard.exists():
        contents = read_journal(journal.path)
        if contents.damaged:
            _set_aside(shard.with_suffix(DAMAGED), contents.damaged)
        if contents.rows:
            write_shard(shard, to_table(contents.rows))
    journal.remove()


def _set_aside(path: Path, data: bytes) -> None:
    """Keeps what could not be read; `data check` tells about it."""
    try:
        with replacing(path, path.with_name(f".{path.name}")) as file:
            file.write(data)
    except OSError as error:
        raise _unwritable(path.parent, error) from None


def write_shard(path: Path, table: Any, *, effort: int = 1) -> None:
    """Writes a shard so that it is there whole or not at all, even after a power cut."""
    import pyarrow.parquet as pq

    try:
        with replacing(path, path.with_name(f".{path.name}")) as file:
            pq.write_table(
                table, file, compression="zstd", compression_level=effort, write_page_checksum=True
            )
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unwritable(path.parent, error) from None


def read_shard(path: Path, columns: Sequence[str] | None = None) -> Any:
    """A shard's rows; a torn or foreign file is refused by name."""
    import pyarrow as pa

    wanted = arrow_schema().names if columns is None else list(columns)

    def choose(schema: Any) -> list[str]:
        check_schema(schema, path.name)
        return columns_to_read(wanted, schema.names)

    try:
        return conform(read_parquet(path, choose), f"the shard {path}", wanted)
    except (FileError, pa.ArrowException) as error:
        raise StoreError(
            f"the shard {path} cannot be read ({error}); "
            "restore it from its source or move it away, then run `data check`"
        ) from None


def _journal_table(path: Path) -> Any:
    try:
        return to_table(read_journal(path).rows)
    except FileNotFoundError:  # folded since it was listed: its rows are in a shard now
        return to_table([])


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write to the store {path} ({error.strerror or error}); everything stored before "
        "is safe: make room or fix the folder, then run again"
    )
