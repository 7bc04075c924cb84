"""Turns on a device that several workers share: many prepare at once, one alone measures.

Inputs, references and a vendor's search keep a GPU idle most of the time and a core busy, and take
longer than all kernels of a problem together; nothing of them is timed. Whoever is about to prepare
lets those who can measure do so first, so that preparing happens together.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable

from tilewise.sweep.device_info import open_lock

MEASURING = "-measuring"
"""Ends the name of the lock that those share who have something to measure."""
Say = Callable[[str], None]


class Turns:
    """One worker's locks: that of the device, and that of those who measure. They end with it."""

    def __init__(self, kind: str) -> None:
        self._device = open_lock(kind)
        self._measuring = open_lock(kind, MEASURING)
        self._held: dict[int, int] = {}

    def prepare(self, say: Say) -> None:
        """Waits until nobody has anything to measure, then keeps all from measuring."""
        self.end()
        waited = self._take(self._measuring, fcntl.LOCK_EX, say)
        waited |= self._take(self._device, fcntl.LOCK_SH, say)
        self._leave(self._measuring)
        if waited:
            say("preparing")  # from here on its time counts again

    def measure(self, say: Say) -> None:
        """Waits until nobody prepares or measures, and keeps all from it."""
        self._take(self._measuring, fcntl.LOCK_SH, say)
        self._take(self._device, fcntl.LOCK_EX, say)

    def rest(self) -> None:
        """Lets others measure; there is more to measure soon."""
        self._leave(self._device)

    def end(self) -> None:
        """There is nothing more to measure."""
        self._leave(self._device)
        self._leave(self._measuring)

    def _take(self, lock: int, how: int, say: Say) -> bool:
        """Whether it had to be waited for."""
        if self._held.get(lock) == how:
            return False
        waits = False
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            waits = True
            say("waiting")  # for another worker: not to be taken for a hang
            fcntl.flock(lock, how)
        self._held[lock] = how
        return waits

    def _leave(self, lock: int) -> None:
        fcntl.flock(lock, fcntl.LOCK_UN)
        self._held.pop(lock, None)
