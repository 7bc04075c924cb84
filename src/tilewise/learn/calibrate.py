"""Fits the analytic model to measurements: what each of its terms costs, kernel by kernel.

A kernel's time is a sum of few terms (steps in a row, waves, bytes, ...) with factors that cannot
be negative. Sums extrapolate where trees cannot, so trees are left to learn what remains.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.features import FeatureSet
from tilewise.core.model import ANY_ENGINE, Calibration, tile_key
from tilewise.learn.dataset import Dataset
from tilewise.ops.tiling import CALIBRATION_TERMS

TERMS = tuple(CALIBRATION_TERMS)
MIN_ROWS = 24
"""A kernel with fewer measurements shares the factors of its tile."""
_ROUNDS = 6
_NOISE = 0.03
"""Relative errors below this count as noise and are not weighted up further."""
_MOST = 16.0
"""The most that a row weighs: a few must not outweigh hundreds."""


def terms_matrix(data: Dataset, features: FeatureSet) -> Array:
    """The terms of every row."""
    names = [f"term_{t}" for t in TERMS]
    values = features.evaluate(data.rows(features), names)
    return np.column_stack([values[n] for n in names])


def calibrate(
    data: Dataset,
    terms: Array,
    train: NDArray[np.bool_],
    kept: Calibration | None = None,
    least: float = MIN_ROWS,
) -> Calibration:
    """Factors from the rows in `train`; kernels, tiles and engines in `kept` keep theirs.

    Kernels and tiles of fewer than `least` rows have none of their own.
    """
    usable, is_whole = train & data.is_ok, data.is_whole[data.problem_index]
    tiles = [tile_key(k.engine, k.tile) for k in data.kernels]
    engines = [k.engine for k in data.kernels]

    def fit(groups: list[str], least: float) -> dict[str, tuple[float, ...]]:
        found: dict[str, tuple[float, ...]] = {}
        for group in dict.fromkeys(groups) if least <= len(data) else ():
            members = np.array([g == group for g in groups])
            rows = usable & members[data.kernel_index]
            if rows.sum() >= least:
                found[group] = _factors(terms[rows], data.time_us[rows], _counts(is_whole[rows]))
        return found

    found = Calibration(
        TERMS,
        kernels=fit([k.name for k in data.kernels], least),
        tiles=fit(tiles, least),
        engines={**fit(engines, 1), **fit([ANY_ENGINE] * len(engines), 1)},
    )
    if kept is None:
        return found
    return Calibration(
        TERMS,
        kernels={**found.kernels, **kept.kernels},
        tiles={**found.tiles, **kept.tiles},
        engines={**found.engines, **kept.engines},
    )


def _counts(is_whole: NDArray[np.bool_]) -> Array:
    """The weight of each row. Problems measured as a whole show a kernel everywhere, others only
    where it was expected to be fast: where these are more, those weigh as much together, up to
    `_MOST` each.
    """
    whole = int(is_whole.sum())
    share = (len(is_whole) - whole) / max(1, whole)
    result: Array = np.where(is_whole, min(max(share, 1.0), _MOST), 1.0)
    return result


def _factors(terms: Array, time_us: Array, counts: Array) -> tuple[float, ...]:
    """Non-negative factors of least absolute relative error, by reweighted least squares."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    relative = terms / time_us[:, None]
    size = np.maximum(relative.max(axis=0), 1e-30)
    weight = np.sqrt(counts)
    factors = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        factors, _ = nnls(relative / size * weight[:, None], weight, maxiter=3000)
        error = np.abs(relative / size @ factors - 1)
        weight = np.sqrt(counts) / np.sqrt(np.maximum(error, _NOISE))
    return tuple(float(f) for f in factors / size)


def kernel_factors(data: Dataset, calibration: Calibration) -> dict[str, Array]:
    """`k_factor_*` per kernel of the data set."""
    factors = [calibration.factors(k.name, k.engine, k.tile) for k in data.kernels]
    table = np.array(factors).reshape(len(factors), len(TERMS))
    return {f"k_factor_{t}": table[:, i] for i, t in enumerate(TERMS)}


def total_us(terms: Array, data: Dataset, factors: Mapping[str, Array]) -> Array:
    """The calibrated time of every row, in the order of the expression `calibrated_us`."""
    total = np.zeros(len(data))
    for i, t in enumerate(TERMS):
        part = factors[f"k_factor_{t}"][data.kernel_index] * terms[:, i]
        total = part if i == 0 else total + part
    return np.where(total > 0.01, total, 0.01)
