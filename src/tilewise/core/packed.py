"""Numbers and lines as text: base64 of bytes, which loads many times faster than a list."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 256 * 2**20
"""Nothing is unpacked to more."""
_WHOLE = ("u1", "i2", "i4", "i8")
"""Tried in this order: the first that holds all values."""


def pack(values: NDArray[Any], *, unit: int = 1) -> str:
    """`TYPE:BASE64`; whole numbers in as few bytes as hold them all.

    With a unit, `TYPE/UNIT:BASE64`: rounded to whole parts of it.
    """
    kind, parts = "f8", ""
    if unit != 1:
        values, parts = np.rint(values * unit).astype(np.int64), f"/{unit}"
    if values.dtype.kind in "iu":
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        kind = next(k for k in _WHOLE if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return f"{kind}{parts}:{b64encode(values.astype('<' + kind).tobytes()).decode()}"


def unpack(text: str | Sequence[float], dtype: type) -> NDArray[Any]:
    """What `pack` was given; a plain list is taken as it is."""
    if not isinstance(text, str):
        return np.array(text, dtype)
    kind, _, packed = text.partition(":")
    kind, _, parts = kind.partition("/")
    if kind not in (*_WHOLE, "f8"):
        raise ValueError(f"numbers are packed as {kind[:8]!r}; use {', '.join(_WHOLE)} or f8")
    values = np.frombuffer(b64decode(packed, validate=True), "<" + kind)
    if parts:
        if int(parts) < 1:
            raise ValueError(f"numbers are packed in parts of {parts[:8]}")
        values = values / int(parts)
    if not np.can_cast(values.dtype, dtype) and not np.array_equal(values, values.astype(dtype)):
        raise ValueError(f"numbers packed as {kind} do not fit {np.dtype(dtype).name}")
    return values.astype(dtype)


class Lines(Sequence[str]):
    """Many lines, of which few are ever looked at: unpacked when the first is."""

    def __init__(self, packed: str, count: int) -> None:
        self._packed, self._count = packed, count

    @cached_property
    def _lines(self) -> list[str]:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(b64decode(self._packed, validate=True), MOST_BYTES).decode()
        if unpacked.unconsumed_tail:
            raise ValueError(f"lines unpack to more than {MOST_BYTES} bytes")
        lines = text.split("\n") if self._count else []
        if len(lines) != self._count:
            raise ValueError(f"{len(lines)} lines are packed, {self._count} were promised")
        return lines

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        return self._lines[at]


def pack_lines(lines: Sequence[str]) -> dict[str, Any]:
    """Lines without breaks in them, as `Lines` takes them."""
    packed = zlib.compress("\n".join(lines).encode(), 9)
    return {"packed": b64encode(packed).decode(), "count": len(lines)}
