"""Calls by what decides them: shapes, strides, dtypes, devices and flags."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tilewise.forks import make_lock
from tilewise.settings import Settings, settings

MOST = 4096


class Remembered:
    """Ready calls, as many as are worth keeping; forgotten whenever kernels or settings change.

    Looking up takes no lock: a dictionary's `get` is atomic.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = make_lock()
        self._calls: dict[Hashable, Any] = {}
        self._settings: Settings | None = None
        self.generation = 0
        """Whoever makes a call reads it first, and what grew stale meanwhile is not kept."""

    def get(self, key: Hashable) -> Any:
        """What is kept for `key`, a call or several, or None."""
        if settings() is not self._settings:
            self.forget()
        return self._calls.get(key)

    def keep(self, key: Hashable, call: Any, generation: int) -> None:
        """Remembers a call that was made under `generation`; the oldest one makes room."""
        with self._lock:
            if generation != self.generation:
                return
            if len(self._calls) >= self._most:
                self._calls.pop(next(iter(self._calls)))
            self._calls[key] = call

    def forget(self) -> None:
        """Drops everything: registries changed, or settings were read again."""
        with self._lock:
            self.generation += 1
            self._settings = settings()
            self._calls.clear()

    def __len__(self) -> int:
        return len(self._calls)


CALLS = Remembered()
"""Those of the functional API."""
