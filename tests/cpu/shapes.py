"""Named lists of shapes that break careless code, as problem fields, by the folder of the op."""

from __future__ import annotations

from typing import Any

from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.contract import Op

SAME = {"y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
STEP = {"stride_h": 2, "stride_w": 2}
DOWN = {**SAME, **STEP}


def _products(*sizes: tuple[int, int, int, int]) -> tuple[dict[str, int], ...]:
    return tuple(dict(zip(("m", "n", "k", "batch"), each, strict=True)) for each in sizes)


GEMM: dict[str, tuple[dict[str, int], ...]] = {
    "one": _products((1, 1, 1, 1), (1, 1, 70, 1), (1, 33, 1, 1), (35, 1, 1, 1), (1, 130, 65, 2)),
    "prime": _products((31, 37, 41, 1), (13, 97, 29, 3), (67, 53, 131, 1)),
    "square": _products((16, 16, 16, 1), (64, 64, 64, 2), (96, 96, 96, 1)),
    "skinny": _products(
        *((1, 257, 100, 1), (4, 203, 67, 1), (211, 3, 90, 2), (300, 1, 129, 1), (9, 150, 33, 1))
    ),
    "deep": _products((5, 7, 1100, 1), (30, 34, 1031, 1), (17, 15, 2050, 1), (2, 90, 700, 1)),
    "tall": _products((260, 18, 20, 1), (18, 530, 12, 1), (129, 70, 300, 1)),
    "empty": _products((0, 5, 5, 1), (5, 0, 5, 1), (1, 5, 0, 2), (5, 5, 5, 0)),
}
CONV: dict[str, tuple[dict[str, int], ...]] = {
    "square": ({"n": 2, "c": 16, "k": 32, "h": 8, "w": 8, **SAME},),
    "odd": (
        {"n": 2, "c": 7, "k": 5, "h": 9, "w": 11, **SAME},
        {"n": 1, "c": 70, "k": 40, "h": 6, "w": 7, **SAME},
    ),
    "one": ({"n": 1, "c": 1, "k": 1, "w": 1, "x": 1}, {"n": 1, "c": 3, "k": 2, "w": 2, "x": 2}),
    "pointwise": (
        {"n": 3, "c": 19, "k": 67, "h": 7, "w": 7, "y": 1, "x": 1},
        # As many pixels come out as go in, but not the same ones.
        {"n": 2, "c": 16, "k": 24, "h": 3, "w": 3, "y": 1, "x": 1, **STEP, "pad_h": 1, "pad_w": 1},
        {"n": 2, "c": 12, "k": 14, "g": 2, "h": 12, "w": 2, "y": 1, "x": 1, "pad_h": 2, "pad_w": 3}
        | {"stride_h": 2, "stride_w": 3},
        {"n": 1, "c": 8, "k": 8, "w": 4, "x": 1, "stride_w": 2, "pad_w": 2},
        {"n": 1, "c": 8, "k": 8, "h": 5, "w": 1, "y": 1, "x": 1, "stride_w": 2},
    ),
    "prime": ({"n": 1, "c": 13, "k": 17, "h": 11, "w": 19, **SAME},),
    "strided": (
        {"n": 2, "c": 5, "k": 9, "h": 11, "w": 13, **DOWN},
        {**DOWN, "n": 1, "c": 3, "k": 20, "h": 23, "w": 21, "y": 7, "x": 7, "pad_h": 3, "pad_w": 3},
        {"n": 1, "c": 6, "k": 4, "h": 9, "w": 9, "y": 1, "x": 1, "stride_h": 2, "stride_w": 2},
        {**SAME, "n": 2, "c": 3, "k": 4, "h": 4, "w": 4, "stride_h": 4, "stride_w": 5, "pad_h": 2},
    ),
    "dilated": (
        {**SAME, "n": 2, "c": 6, "k": 9, "h": 13, "w": 12, "dilation_h": 2, "dilation_w": 3},
    ),
    "asymmetric": (
        {"n": 1, "c": 5, "k": 7, "h": 10, "w": 14, "y": 2, "x": 5, "stride_h": 3, "pad_w": 3}
        | {"dilation_h": 2},
        {"n": 1, "c": 5, "k": 7, "h": 10, "w": 14, "y": 1, "x": 7, "pad_w": 3},
    ),
    "grouped": (
        {"n": 2, "c": 16, "k": 24, "g": 4, "h": 9, "w": 9, **SAME},
        {"n": 1, "c": 40, "k": 40, "g": 5, "h": 8, "w": 9, **DOWN},
        {"n": 1, "c": 18, "k": 36, "g": 9, "h": 5, "w": 6, **SAME},
    ),
    "depthwise": (
        {"n": 2, "c": 18, "k": 18, "g": 18, "h": 9, "w": 20, **SAME},
        {"n": 1, "c": 33, "k": 33, "g": 33, "h": 12, "w": 19, **DOWN},
        {**SAME, "n": 1, "c": 5, "k": 5, "g": 5, "h": 9, "w": 9, "y": 5, "x": 5, "pad_h": 2},
        {**SAME, "n": 1, "c": 4, "k": 4, "g": 4, "h": 18, "w": 9, "y": 7, "x": 7, "pad_h": 3},
    ),
    "multiplier": ({"n": 1, "c": 6, "k": 18, "g": 6, "h": 8, "w": 9, **SAME},),
    "one dimension": (
        {"n": 2, "c": 10, "k": 12, "w": 50, "x": 5, "pad_w": 2, "stride_w": 2},
        {"n": 1, "c": 4, "k": 4, "g": 4, "w": 37, "x": 3, "dilation_w": 3},
    ),
    "three dimensions": (
        {"n": 2, "c": 5, "k": 6, "d": 4, "h": 6, "w": 7, "z": 3, "pad_d": 1, **SAME},
        {"n": 1, "c": 4, "k": 4, "g": 4, "d": 5, "h": 5, "w": 5, "z": 2, "stride_d": 2, **SAME},
    ),
    "empty": (
        {"n": 0, "c": 4, "k": 4, "h": 6, "w": 6, **SAME},
        {"n": 1, "c": 0, "k": 4, "h": 6, "w": 6, **SAME},
        {"n": 1, "c": 4, "k": 0, "h": 6, "w": 6, **SAME},
    ),
}


def problems(op: Op, kernel: Kernel, dtype: str = "") -> list[Problem]:
    """The problems of the lists, of a kernel's types, in layouts dealt out in turn."""
    lists = {"gemm": GEMM, "conv": CONV}[op.folder.name]
    found = []
    for at, sizes in enumerate(s for listed in lists.values() for s in listed):
        layouts = op.features.words["p_layout"]
        count = len(layouts) if at % 3 == 0 else 2
        for turn in range(count):
            layout = layouts[(at + turn) % len(layouts)]
            found.append(problem_for(op, kernel, dtype, layout=layout, **sizes))
    return found


def problem_for(op: Op, kernel: Kernel, dtype: str = "", **fields: Any) -> Problem:
    """A problem of a kernel's own types, or of `dtype` for one that has none."""
    own = {n: getattr(kernel, n) for n in ("dtype", "out_dtype") if hasattr(kernel, n)}
    implied = {op.problem.KEYS[key]: value for key, value in op.implied.items()}
    return op.problem(**implied, **(own or {"dtype": dtype}), **fields)
