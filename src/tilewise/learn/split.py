"""Problems into folds: a problem is wholly in one, by its complete key, whatever the order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewise.core.identity import digest
from tilewise.core.problem import Problem
from tilewise.core.sealed import SealedFolder
from tilewise.errors import InputError, ModelError

_HELD_OUT = 0.15
"""The share of problems that training stops on."""


def folds(problems: Sequence[Problem], count: int = 5, *, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each problem; equal problems share one, whatever their order.

    So do problems that differ in their dtypes or ops alone: one would give the other away.
    """
    own = group_keys(problems)
    keys = sorted(set(own), key=lambda key: _shuffled(key, seed))
    if not 2 <= count <= len(keys):
        raise InputError(f"{count} folds of {len(keys)} problems; use 2 to {len(keys)}")
    fold = {key: index % count for index, key in enumerate(keys)}
    return np.array([fold[key] for key in own], np.int64)


def held_out(
    problems: Sequence[Problem], among: NDArray[np.int64], *, seed: int = 0
) -> NDArray[np.int64]:
    """Some of the problems `among`, set apart to stop training on; scoring never sees them."""
    own = group_keys([problems[i] for i in among])
    keys = sorted(set(own), key=lambda key: _shuffled(key, seed + 1))
    chosen = set(keys[: max(1, round(len(keys) * _HELD_OUT))])
    return np.array([i for i, key in zip(among, own, strict=True) if key in chosen], np.int64)


def group_keys(problems: Sequence[Problem]) -> list[str]:
    """What must not be torn apart: the complete key, less what tells dtypes or ops apart where
    there are several."""
    alone = [
        *(("dtype", "out_dtype") if len({p.dtype for p in problems}) > 1 else ()),
        *(("op", "direction") if len({p.op for p in problems}) > 1 else ()),
    ]
    if not alone:
        return [p.key for p in problems]
    return [digest({k: v for k, v in p.to_dict().items() if k not in alone}) for p in problems]


def _shuffled(key: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()


def saved_folds(folder: Path) -> dict[str, int]:
    """Problem -> fold, as a model's folder has it."""
    found = SealedFolder(folder).json("folds.json")
    if not isinstance(found, dict) or not all(type(fold) is int for fold in found.values()):
        raise ModelError(f"{folder}: folds.json, which names what it has seen, names no folds")
    return found
