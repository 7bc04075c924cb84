"""Asks the vendor's library how it would serve a problem, where a model wants to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewise.core.arch import Arch
from tilewise.core.features import FeatureSet
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR
from tilewise.core.problem import Problem
from tilewise.engines import get_engine

Ask = Callable[[Problem], Mapping[str, float]]


def asker(features: FeatureSet, kernels: Sequence[Kernel], arch: Arch) -> Ask:
    """Asks on this machine's device; elsewhere, or where nothing depends on it, says nothing."""
    wanted = any(field.is_asked for field in features.fields)
    if not wanted or all(kernel.engine != VENDOR for kernel in kernels):
        return lambda problem: {}
    vendor = get_engine(VENDOR)
    return lambda problem: vendor.tactic(problem, arch)
