"""What problems and choices are alike in, to see where a ranking is good and where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.core.compile_expr import Array
from tilewise.learn.dataset import Dataset
from tilewise.learn.score import Judgement

_SKINNY = 32
_DEEP = 8
"""A reduction this many times longer than the longer side of the result."""
_SMALL = 2**27
"""Operations below which launching and filling a device cost more than computing."""


def shape_family(problem: Any) -> str:
    """The kind of shape: of the first kind that fits, from the most peculiar to the plainest."""
    return _conv_family(problem) if hasattr(problem, "taps") else _gemm_family(problem)


def _gemm_family(p: Any) -> str:
    kinds = {
        "batched": p.batch > 1,
        "vector": min(p.m, p.n) == 1,
        "skinny": min(p.m, p.n) <= _SKINNY,
        "deep": p.k >= _DEEP * max(p.m, p.n),
        "odd": any(size % 8 for size in (p.m, p.n, p.k)),
        "small": p.flops < _SMALL,
    }
    return next((name for name, fits in kinds.items() if fits), "large")


def _conv_family(p: Any) -> str:
    kinds = {
        "depthwise": p.is_depthwise,
        "grouped": p.g > 1,
        "3-D": p.d > 1 or p.z > 1,
        "1-D": p.h == 1 and p.y == 1,
        "dilated": max(p.dilation_d, p.dilation_h, p.dilation_w) > 1,
        "strided": max(p.stride_d, p.stride_h, p.stride_w) > 1,
        "pointwise": p.taps == 1,
    }
    return next((name for name, fits in kinds.items() if fits), "dense")


def slices(data: Dataset, outcome: Judgement) -> dict[str, dict[str, dict[str, Any]]]:
    """Count, mean, P10 and minimum by each of `SLICES`, then by value."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, key in SLICES.items():
        values = np.array(
            [
                key(data.problems[p], data.kernels[data.kernel_index[row]], data.labels[p])
                for p, row in zip(outcome.problems, outcome.chosen, strict=True)
            ]
        )
        result[name] = {
            str(group): _brief(100 * outcome.efficiency[values == group])
            for group in np.unique(values)
        }
    return result


def _brief(e: Array) -> dict[str, Any]:
    return {
        "problems": len(e),
        "mean": round(float(e.mean()), 2),
        "p10": round(float(np.percentile(e, 10)), 2),
        "min": round(float(e.min()), 2),
    }


def _band(value: float, bounds: Sequence[int]) -> str:
    below = 0
    for bound in bounds:
        if value < bound:
            return f"{below:>6}-{bound - 1}"
        below = bound
    return f"{below:>6}+"


def _conv(key: Callable[[Any], str]) -> Callable[[Any, Any, Mapping[str, Any]], str]:
    return lambda p, k, labels: key(p) if hasattr(p, "taps") else "-"


SLICES: dict[str, Callable[[Any, Any, Mapping[str, Any]], str]] = {
    "shape": lambda p, k, labels: shape_family(p),
    "m": lambda p, k, labels: _band(p.gemm.m, (32, 256, 4096)),
    "n": lambda p, k, labels: _band(p.gemm.n, (32, 256, 4096)),
    "k": lambda p, k, labels: _band(p.gemm.k, (64, 512, 4096)),
    "groups": lambda p, k, labels: _band(p.gemm.groups, (2, 16, 128)),
    "layout": lambda p, k, labels: p.layout,
    "dtype": lambda p, k, labels: p.dtype,
    "direction": _conv(lambda p: str(p.direction)),
    "filter": _conv(lambda p: f"{p.z}x{p.y}x{p.x}"),
    "stride": _conv(lambda p: str(max(p.stride_d, p.stride_h, p.stride_w))),
    "engine": lambda p, k, labels: k.engine,
    "pipeline": lambda p, k, labels: str(getattr(k, "pipeline", getattr(k, "family", "-"))),
    "network": lambda p, k, labels: str(labels.get("network", "-")),
    "source": lambda p, k, labels: str(labels.get("source", "-")),
    "family": lambda p, k, labels: str(labels.get("family", "-")),
}
"""`pipeline` and `engine` are those of the chosen kernel, `family` the label of a problem file."""
