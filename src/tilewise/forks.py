"""Forks of a process whose other threads are at work: the child has their locks, but not them.

Locks made here are free again in a child. A fork waits for what other threads are importing, since
nobody would finish that in the child, and importing the same there would wait for ever.
"""

from __future__ import annotations

import _imp
import concurrent.futures.thread
import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

MOST_WAITING_S = 60.0
"""An import that takes longer is not waited for: it may itself wait for the one who forks."""
_ROOTS = sys.stdlib_module_names | {"tilewise", "numpy", "pyarrow", "torch", "triton"}
"""What is imported on first use, by ourselves or by the standard library."""

_locks: WeakSet[Any] = WeakSet()


def make_lock() -> threading.Lock:
    """A lock that is free in a forked child, whichever thread held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def make_rlock() -> threading.RLock:
    """The same, for threads that take it several times."""
    made = threading.RLock()
    _locks.add(made)
    return made


if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801  # in place of that one
        """A property worked out once, without the lock that Python 3.11 takes for all instances."""

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            held = instance.__dict__
            if self.attrname not in held:
                held.setdefault(self.attrname, self.func(instance))
            return held[self.attrname]


def _others_import() -> bool:
    """Whether another thread is at an import that a child might need."""
    bootstrap: Any = importlib._bootstrap
    held: Mapping[str, Any] = getattr(bootstrap, "_module_locks", {})
    for name, reference in list(held.items()):
        lock = reference()
        owner = getattr(lock, "owner", None)
        is_ours = name.partition(".")[0] in _ROOTS
        if is_ours and owner is not None and owner != threading.get_ident():
            return True
    return False


def _before_fork() -> None:
    stop = time.monotonic() + MOST_WAITING_S
    while True:
        while _others_import() and time.monotonic() < stop:
            time.sleep(0.001)
        _imp.acquire_lock()  # no import begins while it is held, and none may have begun before
        if not _others_import() or time.monotonic() >= stop:
            return
        _imp.release_lock()


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()
    _imp.release_lock()


# The last registered is called first. These two take locks before a fork, without which imports
# that are waited for cannot end: they must come after us, and so be registered before.
assert logging and concurrent.futures.thread
os.register_at_fork(
    before=_before_fork, after_in_parent=_imp.release_lock, after_in_child=_in_child
)
