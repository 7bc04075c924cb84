"""Layers of which every output reads padding alone in some dimension."""

from __future__ import annotations

import random

import pytest

from tilewise.ops.conv.infer import misses_input


def counted(size: int, taps: int, step: int, pad: int, gap: int) -> bool:
    outputs = (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
    places = (o * step - pad + t * gap for o in range(outputs) for t in range(taps))
    return not any(0 <= place < size for place in places)


def test_as_counted_output_by_output() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(4000):
        size, taps, step = draw.randint(0, 9), draw.randint(1, 4), draw.randint(1, 5)
        pad, gap = draw.randint(0, 6), draw.randint(1, 4)
        if not pad or size + 2 * pad < gap * (taps - 1) + 1:
            continue
        wanted = counted(size, taps, step, pad, gap)
        assert misses_input([size], [taps], [step], [pad], [gap]) == wanted
        seen.add(wanted)
    assert seen == {True, False}


@pytest.mark.parametrize("strides", [(0, 1), (1, -1)])
def test_what_is_no_layer_is_for_others_to_refuse(strides: tuple[int, ...]) -> None:
    assert not misses_input((4, 4), (1, 1), strides, (1, 1), (1, 1))
