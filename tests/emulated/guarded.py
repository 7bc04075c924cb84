"""Arrays that end at a page nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
ALIGNMENT = 128
"""Of the first element. PyTorch aligns more, but views begin anywhere; TMA wants 16 at least."""
FILL = 0xA5


class GuardedArray:
    """A copy of `source` with its end at a forbidden page, as close as its alignment allows."""

    def __init__(self, source: np.ndarray[Any, Any]) -> None:
        page, size = mmap.PAGESIZE, max(1, source.nbytes)
        room = -(-size // ALIGNMENT) * ALIGNMENT
        inner = -(-room // page) * page
        total = inner + 2 * page
        start = _LIBC.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, 0x22, -1, 0)
        _LIBC.mprotect(start, page, 0)
        _LIBC.mprotect(start + page + inner, page, 0)
        weakref.finalize(self, _LIBC.munmap, start, total)
        ctypes.memset(start + page, FILL, inner)
        self.address = start + page + inner - room
        self._before = (start + page, inner - room)
        self._behind = (self.address + size, room - size)
        buffer = (ctypes.c_char * size).from_address(self.address)
        flat = np.frombuffer(buffer, np.uint8, source.nbytes).view(source.dtype)
        self.array = flat.reshape(source.shape)
        self.array[...] = source

    def is_torn(self) -> bool:
        """Whether something was written between the array and the forbidden pages."""
        return any(
            ctypes.string_at(at, size) != bytes([FILL]) * size
            for at, size in (self._before, self._behind)
        )
