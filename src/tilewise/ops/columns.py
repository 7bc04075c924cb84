"""Field values of kernels, of an architecture and of problems, in the columns a model wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.features import ARCH, KERNEL, PROBLEM, FeatureSet, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.ops.fields import arch_values, kernel_values, problem_values


def kernel_columns(model: Model, kernels: Sequence[Kernel]) -> dict[str, Array]:
    """Kernel fields as columns, calibration factors among them."""
    values = []
    for kernel in kernels:
        own = kernel_values(kernel)
        tile = (own["k_tile_m"], own["k_tile_n"], own["k_tile_k"])
        factors = model.calibration.factors(kernel.name, kernel.engine, tile)
        own |= {f"k_factor_{t}": v for t, v in zip(model.calibration.terms, factors, strict=True)}
        values.append(own)
    return columns(model.features.fields_of(KERNEL), values)


def arch_columns(features: FeatureSet, arch: Arch) -> dict[str, float]:
    """The figures of an architecture."""
    found = columns(features.fields_of(ARCH), [arch_values(arch)])
    return {name: float(value[0]) for name, value in found.items()}


def pool_rows(
    model: Model,
    kernels: Sequence[Kernel],
    arch: Arch,
    problem: Problem,
    tactic: Mapping[str, float] | None = None,
) -> Rows:
    """One problem against every kernel; `tactic` is what the vendor's library would do."""
    return Rows(
        columns(model.features.fields_of(PROBLEM), [problem_values(problem, tactic)]),
        kernel_columns(model, kernels),
        arch_columns(model.features, arch),
        np.zeros(len(kernels), np.int64),
        np.arange(len(kernels)),
    )
