"""Problems that models were asked about and did not know, written down for the next sweep.

The log is a problem file, ready for `tilewise sweep STORE --op OP --problems LOG`. Each problem
stands in it once, whichever process met it, and it stops growing at a limit.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewise.core.plain_files import open_plain
from tilewise.core.problem import Problem
from tilewise.engines.toolchain import private_folder
from tilewise.errors import BuildError
from tilewise.forks import make_lock
from tilewise.settings import settings

log = logging.getLogger("tilewise")

MOST_BYTES = 1 << 20
"""Of the log: some five thousand problems."""
MOST_TOLD = 10_000
"""Problems that one process remembers to have written down."""

_told: set[Problem] = set()
_lock = make_lock()


def log_path() -> Path:
    """Where unfamiliar problems are written down."""
    return settings().cache_dir / "unfamiliar.jsonl"


def note(problem: Problem) -> None:
    """Writes a problem down unless it stands there already; never fails."""
    with _lock:
        if problem in _told or len(_told) >= MOST_TOLD:
            return
        _told.add(problem)
    line = json.dumps(problem.to_dict(), sort_keys=True).encode() + b"\n"
    try:
        path = log_path()
        private_folder(path.parent)
        with _locked(path) as descriptor:
            _append(descriptor, line)
    except (OSError, BuildError) as error:
        log.debug("unfamiliar problems cannot be written down: %s", error)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, for this process alone; one that is a link or another's is left alone."""
    descriptor = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, is_private=True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _append(descriptor: int, line: bytes) -> None:
    size = os.fstat(descriptor).st_size
    if size + len(line) > MOST_BYTES:
        return
    held = os.pread(descriptor, size, 0)
    if held.startswith(line) or b"\n" + line in held:
        return
    # A process that was killed while writing leaves half a line behind.
    os.write(descriptor, line if held.endswith(b"\n") or not held else b"\n" + line)
