"""Kernels of every family on drawn layers: sizes of one, long pads, gaps between images."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from drawn import cases, pool

from tilewise.ops.conv.kernels.directed import OPS


@pytest.mark.parametrize("op", OPS)
def test_drawn_layers(op: str) -> None:
    for family in pool(op, "bf16"):
        for case in islice(cases(Random(3), [family], [op]), 3):
            case.run()
