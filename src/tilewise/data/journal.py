"""Rows between shards: an append-only file of checksummed lines, locked by the run that writes it.

A line holds all rows of one append, so that an append is there whole or not at all; a line that the
disk has damaged costs itself alone. The lock ends with its process, however that ends: a journal
that can be locked has no writer.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Self

from tilewise.core.measurement import Measurement
from tilewise.core.plain_files import open_plain
from tilewise.core.strict_json import loads
from tilewise.errors import StoreError

SUFFIX = ".journal"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a journal holds, and what it has lost."""

    rows: list[Measurement]
    end: int
    """Where the last whole line ends."""
    torn_bytes: int
    """After that: an append that was cut short, or is on its way."""
    damaged: bytes
    """The lines that were written whole and no longer are."""


class LockedFile:
    """A file held exclusively by this process; `take` gives None while another holds it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path, *, create: bool) -> Self | None:
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0) | os.O_NOFOLLOW
        while True:
            try:
                descriptor = open_plain(path, flags, mode=0o644)
            except FileNotFoundError:
                if create:
                    raise
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            if _is_at(descriptor, path):
                return cls(path, descriptor)
            # The last holder removed the file between the open and the lock.
            os.close(descriptor)

    def remove(self) -> None:
        """Deletes the file, then gives it up."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


class Journal:
    """The journal that this process writes."""

    def __init__(self, path: Path) -> None:
        held = LockedFile.take(path, create=True)
        if held is None:
            raise StoreError(f"{path} is being written by another process")
        self.file = held
        self.rows = 0
        self._end = 0

    def append(self, rows: Sequence[Measurement]) -> None:
        """Writes the rows as one line; on failure the journal is as before."""
        text = json.dumps([row.to_dict() for row in rows], separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            written = 0
            while written < len(line):
                written += os.write(self.file.descriptor, line[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.file.descriptor, self._end)
            raise StoreError(
                f"cannot write to {self.file.path.parent} ({error.strerror}); everything measured "
                "before is safe: make room or fix the folder, then run the same sweep again"
            ) from None
        self._end += len(line)
        self.rows += len(rows)

    def sync(self) -> None:
        """Survives a power cut from here on; a killed process loses nothing even without."""
        os.fdatasync(self.file.descriptor)


def read_journal(path: Path, offset: int = 0) -> Contents:
    """The rows after `offset`, which must be where a line starts."""
    try:
        with open(open_plain(path), "rb") as file:  # noqa: PTH123  # a descriptor, not a path
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"the journal {path} cannot be read: {error.strerror}") from None
    *lines, tail = data.split(b"\n")
    rows: list[Measurement] = []
    damaged = b""
    for line in lines:
        found = _rows(line)
        if found is None:
            damaged += line + b"\n"
        else:
            rows += found
    return Contents(rows, offset + len(data) - len(tail), len(tail), damaged)


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int)}
_TYPES |= {f"{name} | None": (*types, NoneType) for name, types in _TYPES.items()}
_KINDS = {f.name: _TYPES[str(f.type)] for f in fields(Measurement)}
"""Column -> the types that a value may have."""


def _rows(line: bytes) -> list[Measurement] | None:
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        listed: list[dict[str, Any]] = loads(text)
        return [_row(row) for row in listed]
    except (ValueError, TypeError, AttributeError):
        return None


def _row(values: dict[str, Any]) -> Measurement:
    """The measurement; raises where a value is of another kind than its column."""
    row = Measurement(**{k: v for k, v in values.items() if k in _KINDS})
    for name, kinds in _KINDS.items():
        value = getattr(row, name)
        if type(value) not in kinds or (type(value) is int and abs(value) >= 2**63):
            raise TypeError(name)
        if type(value) is str:
            value.encode()  # lone surrogates, which no table holds, are a ValueError
    return row
