"""Strides of a convolution's tensors as GPU kernels take them: always in five dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.ops.conv.problem import ConvProblem, shapes

Strides = tuple[int, int, int, int, int]
"""In elements: of image (or filter), channel, depth, height and width; 0 where the size is one."""


def default_strides(problem: ConvProblem) -> tuple[Strides, Strides, Strides]:
    """Of the two operands and the result, dense in the problem's layout."""
    made = []
    for shape in shapes(problem):
        rank = len(shape)
        axes = (0, *range(2, rank), 1) if problem.layout == "nhwc" else tuple(range(rank))
        strides, step = [0] * rank, 1
        for axis in reversed(axes):
            strides[axis] = step
            step *= shape[axis]
        made.append(strides)
    return strides_of(problem, made)


def strides_of(problem: ConvProblem, given: Sequence[Any]) -> tuple[Strides, Strides, Strides]:
    """The same of tensors as they lie; where a size is one its stride means nothing."""
    found = []
    for strides, shape in zip(given, shapes(problem), strict=True):
        # Tensors may carry more dimensions of one behind the channels than the problem has.
        extra = len(strides) - len(shape)
        own = [*strides[:2], *strides[2 + extra :]]
        known = [0 if size == 1 else s for s, size in zip(own, shape, strict=True)]
        # A single channel is as good as packed, which lets kernels for packed ones serve.
        known[1] = 1 if shape[1] == 1 else known[1]
        found.append((*known[:2], *[0] * (5 - len(shape)), *known[2:]))
    return tuple(found)  # type: ignore[return-value]  # three tensors in, three out
