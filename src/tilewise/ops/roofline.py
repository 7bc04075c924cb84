"""The analytic model: a kernel's time from its tiles and the architecture's figures alone.

Tiles are dealt to compute units in waves; a wave takes as long as its slowest part, products at
the rate the tile can sustain or bytes at the rate they stream in. The formula is written once, as
the helper `analytic_us` of the ops' features; here it is asked directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.features import ARCH, KERNEL, PROBLEM, FeatureSet, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.contract import get_op
from tilewise.ops.fields import arch_values, kernel_values, problem_values


def estimate_us(kernel: Kernel, problem: Problem, arch: Arch) -> float:
    """Predicted time in microseconds. Comparable between kernels of one problem, not exact."""
    return float(estimates_us([kernel], problem, arch)[0])


def estimates_us(kernels: Sequence[Kernel], problem: Problem, arch: Arch) -> Array:
    """The same for several kernels at once."""
    if problem.is_empty or not kernels:
        return np.full(len(kernels), arch.launch_us)
    features = _analytic(problem.op)
    figures = columns(features.fields_of(ARCH), [arch_values(arch)])
    rows = Rows(
        columns(features.fields_of(PROBLEM), [problem_values(problem)]),
        columns(features.fields_of(KERNEL), [kernel_values(k) for k in kernels]),
        {name: float(value[0]) for name, value in figures.items()},
        np.zeros(len(kernels), np.int64),
        np.arange(len(kernels)),
    )
    return features.evaluate(rows, ["analytic_us"])["analytic_us"]


@lru_cache
def _analytic(op: str) -> FeatureSet:
    """What the estimate needs of an op's features."""
    folder = get_op(op).folder.name
    features: FeatureSet = import_module(f"tilewise.ops.{folder}.features").FEATURES
    return features.restricted([], ["analytic_us"])
