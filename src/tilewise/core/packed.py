"""Many arrays and lines in one run of bytes, named by short texts that JSON can hold."""

from __future__ import annotations

import re
import zlib
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import ModelError
from tilewise.forks import cached_property

MOST_BYTES = 256 * 2**20
"""Nothing is unpacked to more."""
_WHOLE = ("u1", "i1", "i2", "i4", "i8")
"""Tried in this order: the first that holds all values."""
_KIND = rf"(?P<kind>{'|'.join((*_WHOLE, 'f8'))})(/(?P<unit>[1-9][0-9]*))?"
_PLACE = re.compile(_KIND + r"@(?P<at>[0-9]+)\+(?P<count>[0-9]+)")
_BASE64 = re.compile(_KIND + r":(?P<packed>.*)")
"""Before schema 4 of models."""


class Numbers:
    """Arrays one after another. `KIND@AT+COUNT` names one: its type, first byte and length;
    `KIND/UNIT@AT+COUNT` holds whole parts of a unit."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def put(self, values: NDArray[Any], *, unit: int = 1) -> str:
        """Adds an array, whole numbers in as few bytes as hold them all; its name."""
        kind, parts = "f8", ""
        if unit != 1:
            values, parts = np.rint(values * unit).astype(np.int64), f"/{unit}"
        if values.dtype.kind in "iu":
            low, high = int(values.min(initial=0)), int(values.max(initial=0))
            kind = next(k for k in _WHOLE if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
        at = len(self.data)
        self.data += values.astype("<" + kind).tobytes()
        return f"{kind}{parts}@{at}+{values.size}"

    def get(self, name: str | Sequence[float], dtype: type) -> NDArray[Any]:
        """The array that `put` named; a plain list, as in schema 1 of models, is one itself."""
        if not isinstance(name, str):
            return np.array(name, dtype)
        if found := _PLACE.fullmatch(name):
            at, size = int(found["at"]), int(found["count"]) * int(found["kind"][1])
            if at + size > len(self.data):
                raise ValueError(
                    f"{name[:24]} ends beyond the {len(self.data)} bytes that are there"
                )
            packed = bytes(self.data[at : at + size])
        elif found := _BASE64.fullmatch(name):
            packed = b64decode(found["packed"], validate=True)
        else:
            raise ValueError(f"{name[:24]!r} names no numbers; use KIND@AT+COUNT")
        values = np.frombuffer(packed, "<" + found["kind"])
        if found["unit"]:
            values = values / int(found["unit"])
        if not np.can_cast(values.dtype, dtype) and not np.array_equal(
            values, values.astype(dtype)
        ):
            raise ValueError(f"{name[:24]} does not fit {np.dtype(dtype).name}")
        return values.astype(dtype)

    def put_lines(self, lines: Sequence[str]) -> dict[str, Any]:
        """Adds lines without breaks in them; what `get_lines` takes."""
        packed = zlib.compress("\n".join(lines).encode(), 9)
        return {"packed": self.put(np.frombuffer(packed, np.uint8)), "count": len(lines)}

    def get_lines(self, packed: str, count: int) -> Lines:
        """The lines that `put_lines` described."""
        if type(count) is not int or count < 0:
            raise ValueError(f"{count!r:.24} is no number of lines")
        if _PLACE.fullmatch(packed):
            return Lines(self.get(packed, np.uint8).tobytes(), count)
        return Lines(b64decode(packed, validate=True), count)


def inflated(data: bytes, wbits: int) -> bytes:
    """What zlib packed, whole and of a bearable size."""
    unpacked = zlib.decompressobj(wbits)
    found = unpacked.decompress(data, MOST_BYTES)
    if unpacked.unconsumed_tail:
        raise ValueError(f"more than {MOST_BYTES} bytes are packed")
    if not unpacked.eof:
        raise ValueError("what is packed ends too early")
    return found


class Lines(Sequence[str]):
    """Many lines, of which few are ever looked at: unpacked when the first is."""

    def __init__(self, packed: bytes, count: int) -> None:
        self._packed, self._count = packed, count

    @cached_property
    def _lines(self) -> list[str]:
        try:
            text = inflated(self._packed, zlib.MAX_WBITS).decode()
        except (ValueError, zlib.error) as error:
            raise ModelError(f"the model's problems are damaged: {error}") from None
        lines = text.split("\n") if self._count else []
        if len(lines) != self._count:
            raise ModelError(f"{len(lines)} lines are packed, {self._count} were promised")
        return lines

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        return self._lines[at]
