"""Warnings that are given once in a process."""

from __future__ import annotations

import logging

from tilewise.errors import printable

log = logging.getLogger("tilewise")

_told: set[str] = set()


def warn_once(message: str, *, why: str = "") -> None:
    """Logs a warning; the first about the same `why` speaks for all, whatever follows from it."""
    reason = why or message
    if reason not in _told:
        _told.add(reason)
        log.warning("%s", printable(message))
