"""Files opened once: what is checked is what is open, and what is open is what is read.

A name can come to mean another file between two calls, a link can lead anywhere, and a pipe makes a
reader wait for ever; a descriptor does none of these.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

MOST_BYTES = 1 << 30
"""Of any file that is read whole."""
MOST_WAIT_S = 10.0
"""For others who write to a folder, which takes them milliseconds."""


def open_plain(
    path: Path | str, flags: int = os.O_RDONLY, *, is_private: bool = False, mode: int = 0o600
) -> int:
    """A descriptor of a regular file; with `is_private` of this user's own, and through no link.

    Raises OSError where it is anything else.
    """
    follow = os.O_NOFOLLOW if is_private else 0
    descriptor = os.open(path, flags | follow | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if is_private:
            why = why_not_private(status)
            if why is not None:
                raise PermissionError(errno.EPERM, why, str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def why_not_private(status: os.stat_result) -> str | None:
    """Why what is open may be changed by others than this user, or None."""
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & 0o022:
        return "others may write to it"
    return None


def read_plain(path: Path | str, *, most: int = MOST_BYTES, is_private: bool = False) -> bytes:
    """The bytes of a regular file, `most` at most; raises OSError."""
    descriptor = open_plain(path, is_private=is_private)
    with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor, not a path
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return data


def resolved(path: Path) -> Path:
    """Where a path leads through its links; an OSError where these go in a circle."""
    try:
        return path.resolve()
    except RuntimeError:  # by Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


@contextmanager
def replacing(
    path: Path, scratch: Path | None = None, *, mode: int = 0o666, sync: bool = True
) -> Iterator[BinaryIO]:
    """A new file to write to; whole and on the disk, it takes the place of `path`.

    Without `sync` it may be cut after a power failure: for files that tell when they are damaged.

    What a link at `path` leads to stays as it is. Its name until then is nobody's guess, or
    `scratch`, which only one process may use at a time: what a killed one left there goes first.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if scratch is None:
        scratch = path.with_name(f".{path.name[:100]}.{token_hex(8)}")
    else:
        scratch.unlink(missing_ok=True)
    try:
        with open(os.open(scratch, flags, mode), "wb") as file:  # noqa: PTH123  # a descriptor
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        with suppress(OSError):
            scratch.unlink()


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Has processes that read a file here and write it anew wait for each other.

    They wait `MOST_WAIT_S` at most, as anybody may hold a folder that they can read; where folders
    cannot be locked they do not wait. Raises OSError where there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + MOST_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.02)
                    continue
            except OSError:
                pass
            break
        yield
    finally:
        os.close(descriptor)


_given = count()


def path_of(descriptor: int) -> str | None:
    """A path to what is open, unlike any given out before; None where the system has none.

    A loader takes a path that it has seen for the library it found there then, and the next file
    to be opened has the same number: turns that lead nowhere tell the paths apart.
    """
    if not Path("/proc/self/fd").is_dir():
        return None
    turns = format(next(_given), "b").replace("0", "./").replace("1", ".//")
    return f"/proc/self/fd/{turns}{descriptor}"
