"""Numbers and lines in one run of bytes."""

from __future__ import annotations

import zlib
from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from tilewise.core import packed as module
from tilewise.core.packed import Lines, Numbers, inflated
from tilewise.errors import ModelError

KINDS = [
    (np.array([0, 255]), "u1"),
    (np.array([-128, 127]), "i1"),
    (np.array([-1, 255]), "i2"),
    (np.array([-(2**15) - 1, 3]), "i4"),
    (np.array([2**31]), "i8"),
    (np.array([], np.int32), "u1"),
    (np.array([0.1, np.nan, -0.0, np.inf]), "f8"),
]


@pytest.mark.parametrize(("values", "kind"), KINDS)
def test_numbers_come_back_in_few_bytes(values: Any, kind: str) -> None:
    numbers = Numbers(b"odd")
    name = numbers.put(values)
    assert name == f"{kind}@3+{values.size}"
    assert len(numbers.data) == 3 + values.size * int(kind[1])
    again = Numbers(bytes(numbers.data))
    assert again.get(name, values.dtype.type).tobytes() == values.tobytes()


@pytest.mark.parametrize(("values", "kind"), KINDS)
def test_base64_of_older_models_is_read(values: Any, kind: str) -> None:
    name = f"{kind}:{b64encode(values.astype('<' + kind).tobytes()).decode()}"
    assert Numbers().get(name, values.dtype.type).tobytes() == values.tobytes()


def test_numbers_with_a_unit_are_rounded_to_it() -> None:
    values, numbers = np.array([0.0, 1.5, -2.25, 11.0001]), Numbers()
    name = numbers.put(values, unit=1024)
    assert name == "i2/1024@0+4"
    found = numbers.get(name, np.float64)
    assert np.array_equal(found[:3], values[:3])
    assert abs(found[3] - values[3]) <= 0.5 / 1024
    old = f"i2/1024:{b64encode(numbers.data).decode()}"
    assert np.array_equal(numbers.get(old, np.float64), found)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("f4@0+2", "names no numbers"),
        ("u1@-1+2", "names no numbers"),
        ("u1/0@0+2", "names no numbers"),
        ("", "names no numbers"),
        ("u1@0+17", "ends beyond the 16 bytes"),
        ("i8@9+1", "ends beyond the 16 bytes"),
        ("i8@0+1", "does not fit int32"),
        ("f8@8+1", "does not fit int32"),
        ("u1:A", "base64"),
        ("u1:!!!!", "base64"),
    ],
)
def test_what_names_no_numbers_is_refused(name: str, why: str) -> None:
    numbers = Numbers()
    numbers.put(np.array([2**40]))
    numbers.put(np.array([0.5]))
    with pytest.raises(ValueError, match=why):
        numbers.get(name, np.int32)


@pytest.mark.parametrize("lines", [[], ["one"], ["a", "", "ü"]])
def test_lines_are_unpacked_when_looked_at(lines: list[str]) -> None:
    numbers = Numbers()
    found = numbers.get_lines(**numbers.put_lines(lines))
    assert len(found) == len(lines)
    assert list(found) == lines
    packed = zlib.compress("\n".join(lines).encode())
    old = numbers.get_lines(b64encode(packed).decode(), len(lines))
    assert list(old) == lines
    if lines:
        with pytest.raises(ModelError, match="were promised"):
            Lines(packed, len(lines) + 1)[0]
        with pytest.raises(ModelError, match="ends too early"):
            Lines(packed[:-1], len(lines))[0]
        with pytest.raises(ModelError, match="problems are damaged"):
            Lines(b"?" + packed, len(lines))[0]
        with pytest.raises(ValueError, match="base64"):
            numbers.get_lines("!!!!", 1)


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zlib.compress(bytes(1000))
    assert inflated(packed, zlib.MAX_WBITS) == bytes(1000)
    monkeypatch.setattr(module, "MOST_BYTES", 999)
    with pytest.raises(ValueError, match="more than 999 bytes"):
        inflated(packed, zlib.MAX_WBITS)
