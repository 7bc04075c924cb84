"""Faults of the machine, by what the system and compilers say of them: no facts about kernels."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

ATTEMPTS = 3
"""How often something is begun that a fault of the machine may have ended."""

_SIGNS = (
    # The file system.
    *("No space left on device", "Disk quota exceeded", "Read-only file system"),
    *("Input/output error", "Stale file handle", "Too many open files", "Text file busy"),
    *("Permission denied", "File too large", "File size limit exceeded"),
    r"cache folder .* cannot be used",
    # Libraries that are there and cannot be loaded: `noexec`, or not what a compiler writes.
    *("failed to map segment", "invalid ELF header", "file too short", "not a 64-bit ELF object"),
    # Compilers that are not whole, or were stopped.
    *("wrote no library", "was damaged while it was written", "error trying to exec"),
    *("unable to execute command", "cannot find -l", "cannot find crt", "virtual memory exhausted"),
    r"(Killed|Terminated|Hangup) signal terminated program",
    *(
        r"internal compiler error: (Killed|Terminated|Hangup)",
        r"failed with error code -(9|15|1)\b",
    ),
    *("error while loading shared libraries", "cannot execute '", "Cannot create temporary file"),
    # What a compiler, not a kernel, had no memory or processes for.
    *(r"(cc1plus|lto1|ld|as): out of memory", "Resource temporarily unavailable"),
    # Processes that somebody else ended.
    r"killed by SIG(KILL|TERM|HUP|QUIT)",
    # How versions before 0.2 recorded any worker that was killed.
    "the system killed the worker, as it does when memory runs out",
)
SIGNS = "|".join(_SIGNS)
"""A regular expression, for Python and Arrow alike, that finds a fault in a row's message."""

DOUBTFUL = ("compile_error", "launch_error", "crash", "out_of_memory")
"""Statuses under which a fault of the machine may have been recorded."""

_KNOWN = re.compile(SIGNS)


def fault_in(text: str) -> str | None:
    """The line of a message that tells of a fault of the machine, or None."""
    return next((line.strip() for line in text.splitlines() if _KNOWN.search(line)), None)


def fault_of(status: str, message: str) -> str | None:
    """What a failure tells of the machine in place of the kernel, or None."""
    return fault_in(message) if status in DOUBTFUL else None


def first_line(texts: Sequence[str]) -> str:
    """The first line that says something."""
    lines = (line.strip() for text in texts for line in text.splitlines())
    return next((line for line in lines if line), "it says nothing")


def signal_name(number: int) -> str:
    """What ended a process; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
