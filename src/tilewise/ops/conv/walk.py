"""How an implicit product walks a convolution: its pixels, windows and taps, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from tilewise.ops.conv.problem import ConvProblem

DIMS = ("d", "h", "w")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension of a walk; see `cuda/walk.cuh`."""

    size: int
    """Pixels of the result that are walked."""
    stride: int
    corner: int
    """Of the first window: minus the padding."""
    taps: int
    reach: int
    """From one tap to the next, in the image that is read."""
    tap_first: int
    tap_step: int
    """Taps in the filter: which comes first, and how far the next one is."""
    first: int = 0
    every: int = 1
    """Pixels in the result: where the first lies, and how far apart they are."""

    @property
    def rim(self) -> int:
        """How far the last tap lies from the first."""
        return (self.taps - 1) * self.reach

    def upper(self, extent: int) -> int:
        """Where the last window's corner lies, counted from the end of an image that is read."""
        return self.corner + (self.size - 1) * self.stride + 1 - extent


Walk = tuple[Axis, Axis, Axis]
"""Of depth, height and width."""


def forward(problem: ConvProblem) -> Walk:
    """Windows over the input, all pixels of the output."""
    d, h, w = (_forward(problem, dim, taps) for dim, taps in zip(DIMS, "zyx", strict=True))
    return d, h, w


def _forward(problem: ConvProblem, dim: str, filter_dim: str) -> Axis:
    return Axis(
        size=getattr(problem, f"out_{dim}"),
        stride=getattr(problem, f"stride_{dim}"),
        corner=-getattr(problem, f"pad_{dim}"),
        taps=getattr(problem, filter_dim),
        reach=getattr(problem, f"dilation_{dim}"),
        tap_first=0,
        tap_step=1,
    )


def backward(problem: ConvProblem) -> list[Walk]:
    """Windows over the gradient, one walk for each parity of the input's pixels.

    Pixels whose remainder by the stride is the same are reached by the same taps, so a parity is a
    dense convolution of its own; one that no tap reaches has zero taps.
    """
    axes = [list(_parities(problem, dim, t)) for dim, t in zip(DIMS, "zyx", strict=True)]
    return [(d, h, w) for d, h, w in product(*axes)]


def _parities(problem: ConvProblem, dim: str, filter_dim: str) -> Iterator[Axis]:
    extent, stride = getattr(problem, dim), getattr(problem, f"stride_{dim}")
    pad, dilation = getattr(problem, f"pad_{dim}"), getattr(problem, f"dilation_{dim}")
    for parity in range(stride):
        if parity >= extent:
            break
        distances = {
            tap: (parity + pad - tap * dilation) // stride
            for tap in reversed(range(getattr(problem, filter_dim)))
            if (parity + pad - tap * dilation) % stride == 0
        }
        taps, reached = list(distances), list(distances.values())
        yield Axis(
            size=-(-(extent - parity) // stride),
            stride=1,
            corner=reached[0] if taps else 0,
            taps=len(taps),
            reach=reached[1] - reached[0] if len(taps) > 1 else 0,
            tap_first=taps[0] if taps else 0,
            tap_step=taps[1] - taps[0] if len(taps) > 1 else 0,
            first=parity,
            every=stride,
        )


def axes_of(problem: ConvProblem) -> Iterator[tuple[str, Iterator[Axis]]]:
    """Every dimension, with the axes that walks have along it."""
    for dim, taps in zip(DIMS, "zyx", strict=True):
        if problem.direction == "bwd_data":
            yield dim, _parities(problem, dim, taps)
        else:
            yield dim, iter((_forward(problem, dim, taps),))


def walks(problem: ConvProblem) -> list[Walk]:
    """What a product over pixels computes, one after the other."""
    return backward(problem) if problem.direction == "bwd_data" else [forward(problem)]


def pixels(walk: Walk) -> int:
    """Of one image."""
    return prod(axis.size for axis in walk)


def taps(walk: Walk) -> int:
    return prod(axis.taps for axis in walk)


def source_sizes(problem: ConvProblem) -> tuple[int, int, int]:
    """Depth, height and width of the image that is read; of a filter's gradient, the input."""
    p = problem
    return (p.out_d, p.out_h, p.out_w) if p.direction == "bwd_data" else (p.d, p.h, p.w)


def channels(problem: ConvProblem) -> tuple[int, int]:
    """Channels of a group that are read, and that are written; c and k of a filter's gradient."""
    c, k = problem.c // problem.g, problem.k // problem.g
    return (k, c) if problem.direction == "bwd_data" else (c, k)
