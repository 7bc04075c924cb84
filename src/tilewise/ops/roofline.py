"""The analytic model: a kernel's time from its tiles and the architecture's figures alone.

Tiles are dealt to compute units in waves; a wave takes as long as its slowest part, products at
the rate the tile can sustain or bytes at the rate they stream in. The formula is written once, as
the helper `analytic_us` of the ops' features; here it is asked directly. Where an op has a helper
`estimate_us` that one counts: its kernels' times on the scale of the vendor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.features import KERNEL, PROBLEM, FeatureSet, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.simplify import simplified
from tilewise.ops.columns import arch_columns
from tilewise.ops.contract import get_op
from tilewise.ops.fields import kernel_values, problem_values


class Estimates:
    """Predicted times of some kernels: comparable for one problem, not exact."""

    def __init__(self, op: str, kernels: Sequence[Kernel]) -> None:
        self._op = op
        self._engines = frozenset(kernel.engine for kernel in kernels)
        fields = get_op(op).features.fields_of(KERNEL)
        self._kernels = columns(fields, [kernel_values(k) for k in kernels])
        self._count = len(kernels)

    def __call__(self, problem: Problem, arch: Arch) -> Array:
        """Microseconds, in the order of the kernels."""
        if problem.is_empty or not self._count:
            return np.full(self._count, arch.launch_us)
        features = _analytic(self._op, self._engines, arch.kind)
        used = {field.name for field in features.fields_of(KERNEL)}
        rows = Rows(
            columns(features.fields_of(PROBLEM), [problem_values(problem)]),
            {name: column for name, column in self._kernels.items() if name in used},
            arch_columns(features, arch),
            np.zeros(self._count, np.int64),
            np.arange(self._count),
        )
        return features.evaluate(rows, [_asked(self._op)])[_asked(self._op)]


@lru_cache
def _analytic(op: str, engines: frozenset[str], device: str) -> FeatureSet:
    """What the estimate needs of an op's features, for such kernels and devices."""
    whole = get_op(op).features.restricted([], [_asked(op)])
    short = simplified(whole, {"k_engine": engines, "a_kind": frozenset({device})})
    return short.restricted([], [_asked(op)])


def _asked(op: str) -> str:
    """The helper that estimates times."""
    return "estimate_us" if "estimate_us" in get_op(op).features.helpers else "analytic_us"


def judges_vendor(op: str, arch: Arch) -> bool:
    """Whether estimates of the vendor's routine can be compared with those of kernels.

    An op that knows how its vendor does on a GPU says so by a helper `vendor_us`.
    """
    return arch.kind == "gpu" and "vendor_us" in get_op(op).features.helpers
