"""What problems and choices are alike in, to see where a ranking is good and where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.learn.dataset import Dataset
from tilewise.learn.score import Judgement
from tilewise.ops.contract import get_op

Slice = Callable[[Any, Kernel, Mapping[str, Any]], str]


def shape_family(problem: Problem) -> str:
    """The kind of shape: of the first kind that fits, from the most peculiar to the plainest."""
    return get_op(problem.op).problems.shape(problem)


def slices(data: Dataset, outcome: Judgement) -> dict[str, dict[str, dict[str, Any]]]:
    """Count, mean, P10 and minimum by each of `slices_of` the op, then by value."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, key in slices_of(data.op).items():
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


def _own(key: Callable[[Any], str]) -> Slice:
    return lambda p, k, labels: key(p)


def slices_of(op: str) -> dict[str, Slice]:
    """What choices for an op's problems are cut by: what all ops have, then the op's own.

    `pipeline` and `engine` are those of the chosen kernel, `family` the label of a problem file.
    """
    own = get_op(op).problems.slices
    return {**_COMMON, **{name: _own(key) for name, key in own.items()}}


_COMMON: dict[str, Slice] = {
    "shape": lambda p, k, labels: shape_family(p),
    "m": lambda p, k, labels: _band(p.gemm.m, (32, 256, 4096)),
    "n": lambda p, k, labels: _band(p.gemm.n, (32, 256, 4096)),
    "k": lambda p, k, labels: _band(p.gemm.k, (64, 512, 4096)),
    "groups": lambda p, k, labels: _band(p.gemm.groups, (2, 16, 128)),
    "layout": lambda p, k, labels: str(getattr(p, "layout", "-")),
    "dtype": lambda p, k, labels: str(p.dtype),
    "engine": lambda p, k, labels: k.engine,
    "pipeline": lambda p, k, labels: str(getattr(k, "pipeline", getattr(k, "family", "-"))),
    "network": lambda p, k, labels: str(labels.get("network", "-")),
    "source": lambda p, k, labels: str(labels.get("source", "-")),
    "family": lambda p, k, labels: str(labels.get("family", "-")),
}
