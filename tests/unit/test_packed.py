"""Numbers and lines packed as text."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.core.packed import Lines, pack, pack_lines, unpack


def test_numbers_with_a_unit_are_rounded_to_it() -> None:
    values = np.array([0.0, 1.5, -2.25, 11.0001])
    packed = pack(values, unit=1024)
    assert packed.startswith("i2/1024:")
    found = unpack(packed, np.float64)
    assert np.array_equal(found[:3], values[:3])
    assert abs(found[3] - values[3]) <= 0.5 / 1024


@pytest.mark.parametrize("lines", [[], ["one"], ["a", "", "ü"]])
def test_lines_are_unpacked_when_looked_at(lines: list[str]) -> None:
    packed = pack_lines(lines)
    found = Lines(**packed)
    assert len(found) == len(lines)
    assert list(found) == lines
    if lines:
        with pytest.raises(ValueError, match="were promised"):
            Lines(packed["packed"], len(lines) + 1)[0]
