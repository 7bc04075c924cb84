"""Measurements as arrays: problems, kernels, and one row per pair that was measured."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch, load_arch
from tilewise.core.compile_expr import Array
from tilewise.core.features import ARCH, KERNEL, PROBLEM, FeatureSet, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement
from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.ops.contract import get_op
from tilewise.ops.fields import arch_values, kernel_values, problem_values

_NEEDED = (
    *("problem_key", "kernel_key", "op", "dtype", "problem", "labels", "engine", "kernel_fields"),
    *("arch", "device", "policy", "status", "time_us", "spread_us", "repeats"),
)


def features_of(op: str) -> FeatureSet:
    """The feature set of an op."""
    features: FeatureSet = import_module(f"tilewise.ops.{get_op(op).folder.name}.features").FEATURES
    return features


@dataclass(frozen=True)
class Dataset:
    """Rows of one op on one architecture; times are NaN where a kernel failed."""

    op: str
    arch: Arch
    problems: tuple[Problem, ...]
    kernels: tuple[Kernel, ...]
    labels: tuple[Mapping[str, Any], ...]
    """What is known about each problem, for example its network."""
    problem_index: NDArray[np.int64]
    kernel_index: NDArray[np.int64]
    time_us: Array
    spread_us: Array
    repeats: NDArray[np.int64]
    device: str = ""

    def __len__(self) -> int:
        return len(self.time_us)

    @cached_property
    def is_ok(self) -> NDArray[np.bool_]:
        return np.isfinite(self.time_us)

    @cached_property
    def flops(self) -> Array:
        """Per problem."""
        return np.array([p.flops for p in self.problems], np.float64)

    @cached_property
    def bytes(self) -> Array:
        """Per problem."""
        return np.array([p.bytes for p in self.problems], np.float64)

    @cached_property
    def tflops(self) -> Array:
        """Per row."""
        return self.flops[self.problem_index] / self.time_us * 1e-6

    @cached_property
    def best_us(self) -> Array:
        """Per problem: the fastest measured time, NaN where nothing ran."""
        best = np.full(len(self.problems), np.inf)
        np.minimum.at(best, self.problem_index[self.is_ok], self.time_us[self.is_ok])
        return np.where(np.isfinite(best), best, np.nan)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({p.dtype for p in self.problems}))

    @cached_property
    def digest(self) -> str:
        """Identity of what is learned from: the problems, kernels and times."""
        seal = hashlib.sha256()
        for p, k, t in zip(self.problem_index, self.kernel_index, self.time_us, strict=True):
            seal.update(f"{self.problems[p].key} {self.kernels[k].key} {t!r}\n".encode())
        return seal.hexdigest()

    def rows(self, features: FeatureSet, factors: Mapping[str, Array] | None = None) -> Rows:
        """The field values behind every row; `factors` are the calibration's, per kernel."""
        fields = [f for f in features.fields_of(KERNEL) if not f.name.startswith("k_factor_")]
        kernels = columns(fields, [kernel_values(k) for k in self.kernels])
        empty = {
            f.name: np.zeros(len(self.kernels))
            for f in features.fields_of(KERNEL)
            if f.name.startswith("k_factor_")
        }
        arch = columns(features.fields_of(ARCH), [arch_values(self.arch)])
        return Rows(
            columns(features.fields_of(PROBLEM), [problem_values(p) for p in self.problems]),
            {**kernels, **empty, **(factors or {})},
            {name: float(value[0]) for name, value in arch.items()},
            self.problem_index,
            self.kernel_index,
        )

    def keep(self, mask: NDArray[np.bool_]) -> Dataset:
        """Some of the rows; problems and kernels keep their places."""
        return Dataset(
            self.op,
            self.arch,
            self.problems,
            self.kernels,
            self.labels,
            self.problem_index[mask],
            self.kernel_index[mask],
            self.time_us[mask],
            self.spread_us[mask],
            self.repeats[mask],
            self.device,
        )

    def of_problems(self, chosen: Iterable[int]) -> NDArray[np.bool_]:
        """Which rows belong to the chosen problems."""
        wanted = np.zeros(len(self.problems), bool)
        wanted[list(chosen)] = True
        result: NDArray[np.bool_] = wanted[self.problem_index]
        return result


def from_measurements(
    rows: Iterable[Measurement], *, op: str = "", arch: Arch | None = None, dtype: str = ""
) -> Dataset:
    """The rows of one op, arch and device; where several are mixed the options must say which."""
    return _build([{name: getattr(row, name) for name in _NEEDED} for row in rows], op, arch, dtype)


def from_stores(
    paths: Sequence[Path | str], *, op: str = "", arch: Arch | None = None, dtype: str = ""
) -> Dataset:
    """The latest rows of stores, taken together."""
    from tilewise.sweep.store import Store

    found: list[dict[str, Any]] = []
    for path in paths:
        found += Store(path).table(_NEEDED).to_pylist()
    return _build(found, op, arch, dtype)


def _build(rows: list[dict[str, Any]], op: str, arch: Arch | None, dtype: str) -> Dataset:
    rows = [r for r in rows if (not op or r["op"] == op) and (not dtype or r["dtype"] == dtype)]
    if arch is not None:
        rows = [r for r in rows if r["arch"] == arch.name]
    if not rows:
        raise InputError("no measurements are left to learn from; check --op, --dtype and --arch")
    only = {name: _single(rows, name) for name in ("op", "arch")}
    # Times of several devices or policies are different facts: the most common are learned from.
    for name in ("device", "policy"):
        common = Counter(r[name] for r in rows).most_common(1)[0][0]
        rows = [r for r in rows if r[name] == common]
    return _arrays(rows, only["op"], arch or load_arch(only["arch"]))


def _single(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = sorted({str(r[name]) for r in rows})
    if len(values) > 1:
        raise InputError(f"the rows mix {name} {', '.join(values)}; choose one with --{name}")
    return values[0]


def _arrays(rows: Sequence[Mapping[str, Any]], op: str, arch: Arch) -> Dataset:
    problems: dict[str, int] = {}
    kernels: dict[str, int] = {}
    problem_rows: list[Mapping[str, Any]] = []
    kernel_rows: list[Mapping[str, Any]] = []
    pairs: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        p = problems.setdefault(row["problem_key"], len(problems))
        k = kernels.setdefault(row["kernel_key"], len(kernels))
        if p == len(problem_rows):
            problem_rows.append(row)
        if k == len(kernel_rows):
            kernel_rows.append(row)
        pairs.setdefault((p, k), []).append(row)
    given = get_op(op)
    # Times of one pair that was measured repeatedly are joined by their median.
    times = [_median(found, "time_us") for found in pairs.values()]
    return Dataset(
        op,
        arch,
        tuple(given.problem.from_dict(json.loads(r["problem"])) for r in problem_rows),
        tuple(given.kernel_from_dict(json.loads(r["kernel_fields"])) for r in kernel_rows),
        tuple(json.loads(r["labels"] or "{}") for r in problem_rows),
        np.array([p for p, _ in pairs], np.int64),
        np.array([k for _, k in pairs], np.int64),
        np.array(times, np.float64),
        np.array([_median(found, "spread_us") for found in pairs.values()], np.float64),
        np.array([max(int(r["repeats"] or 0) for r in f) for f in pairs.values()], np.int64),
        str(rows[0]["device"]),
    )


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [float(r[name]) for r in rows if r["status"] == "ok" and r[name] is not None]
    return float(np.median(values)) if values else float("nan")
