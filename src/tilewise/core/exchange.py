"""Two folders change places in one step: at no instant is either missing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_HERE = -100
"""AT_FDCWD: paths are taken from the working folder."""
_EXCHANGE = 2
"""RENAME_EXCHANGE."""


def exchanged(one: Path, other: Path) -> bool:
    """Whether the system put each in the other's place; False where it cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # no Linux, or an old one
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    result: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return result == 0
