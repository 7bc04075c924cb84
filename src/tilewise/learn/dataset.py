"""Measurements as arrays: problems, kernels, and one row per pair that was measured.

Times of several devices, or of several numbers of threads, stand side by side: a problem that was
measured on two is two problems of the data, each with its device's figures among its features.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch, device_named, load_arch
from tilewise.core.compile_expr import Array
from tilewise.core.features import ARCH, KERNEL, PROBLEM, FeatureSet, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import (
    Measurement,
    check_time,
    json_object,
    way_of_timing,
    what_is_timed,
)
from tilewise.core.model import VENDOR
from tilewise.core.problem import Problem
from tilewise.engines.device import CORE_GB_S, detect
from tilewise.errors import InputError, TilewiseError
from tilewise.learn.readings import (
    column,
    comparable,
    in_turn_us,
    of_newest_sources,
    read_twice,
    reading,
    right_readings,
    usable,
)
from tilewise.ops.contract import get_op
from tilewise.ops.fields import arch_values, kernel_values, problem_values, recorded_arch

log = logging.getLogger("tilewise")

_NEEDED = (
    *("key", "run_id", "attempt", "problem_key", "kernel_key"),
    *("op", "dtype", "problem", "labels"),
    *("engine", "kernel_fields", "arch", "device", "policy", "stage", "status"),
    "toolchain",
    *("time_us", "min_us", "spread_us", "repeats", "tactic", "message"),
    "figures",
)


@dataclass(frozen=True)
class Dataset:
    """Rows of one op on one architecture, and of ops beside it that only teach.

    Times are NaN where a kernel failed.
    """

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
    first_us: Array | None = None
    again_us: Array | None = None
    """The first reading of rows that were read again, and the one that counts; else NaN. Where
    enough problems were read in turn twice, only those count, by both of these readings."""
    tactics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """How the vendor's library said it would serve a problem, by the problem's key."""
    stands: tuple[Arch, ...] = ()
    """The device of each problem where they were measured on several, else none."""

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
        return self._fastest_us(self.is_ok)

    @cached_property
    def vendor_us(self) -> Array:
        """Per problem: the fastest time of a vendor's routine, NaN where none ran."""
        return self._fastest_us(self.is_ok & self.is_vendor)

    def _fastest_us(self, rows: NDArray[np.bool_]) -> Array:
        best = np.full(len(self.problems), np.inf)
        np.minimum.at(best, self.problem_index[rows], self.time_us[rows])
        return np.where(np.isfinite(best), best, np.nan)

    @cached_property
    def is_vendor(self) -> NDArray[np.bool_]:
        """Per row: whether the kernel is a vendor's routine."""
        return np.array([k.engine == VENDOR for k in self.kernels])[self.kernel_index]

    @cached_property
    def is_whole(self) -> NDArray[np.bool_]:
        """Per problem: whether it is the op's own and all that can serve was measured. Others
        teach, but judge nothing: their fastest kernel may not be among those that were tried.
        """
        whole = np.array(["top" not in labels for labels in self.labels], bool)
        return whole & self.is_own

    @cached_property
    def is_own(self) -> NDArray[np.bool_]:
        """Per problem: whether it is of the op itself, not of one beside it."""
        return np.array([p.op == self.op for p in self.problems], bool)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the op's own problems."""
        return tuple(sorted({p.dtype for p in self.problems if p.op == self.op}))

    @cached_property
    def devices(self) -> tuple[Arch, ...]:
        """Each device that problems were measured on, once."""
        return tuple({id(stand): stand for stand in self.stands or (self.arch,)}.values())

    @cached_property
    def digest(self) -> str:
        """Identity of what is learned from: the problems, kernels, times and tactics."""
        seal = hashlib.sha256()
        for p, k, t in zip(self.problem_index, self.kernel_index, self.time_us, strict=True):
            where = f"{self.stand_of(p)} " if self.stands else ""
            seal.update(f"{where}{self.problems[p].key} {self.kernels[k].key} {t!r}\n".encode())
        for key in sorted({self.problems[p].key for p in self.problem_index} & set(self.tactics)):
            seal.update(f"{key} {json.dumps(self.tactics[key], sort_keys=True)}\n".encode())
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
        problems = columns(
            features.fields_of(PROBLEM),
            [problem_values(p, self.tactics.get(p.key)) for p in self.problems],
        )
        known = {id(stand): arch_values(stand) for stand in self.devices}
        stands = [known[id(stand)] for stand in self.stands] or list(known.values())
        arch = columns(features.fields_of(ARCH), stands)
        return Rows(
            problems,
            {**kernels, **empty, **(factors or {})},
            arch if self.stands else {name: float(value[0]) for name, value in arch.items()},
            self.problem_index,
            self.kernel_index,
        )

    def stand_of(self, problem: int) -> str:
        """Where a problem was measured, in words: the device and how many of its cores."""
        stand = self.stands[problem] if self.stands else self.arch
        return f"{stand.label} x{stand.compute_units}"

    def keep(self, mask: NDArray[np.bool_]) -> Dataset:
        """Some of the rows; problems and kernels keep their places."""
        return replace(
            self,
            problem_index=self.problem_index[mask],
            kernel_index=self.kernel_index[mask],
            time_us=self.time_us[mask],
            spread_us=self.spread_us[mask],
            repeats=self.repeats[mask],
            first_us=None if self.first_us is None else self.first_us[mask],
            again_us=None if self.again_us is None else self.again_us[mask],
        )

    def of_problems(self, chosen: Iterable[int]) -> NDArray[np.bool_]:
        """Which rows belong to the chosen problems."""
        wanted = np.zeros(len(self.problems), bool)
        wanted[list(chosen)] = True
        result: NDArray[np.bool_] = wanted[self.problem_index]
        return result


def from_measurements(
    rows: Iterable[Measurement], *, op: str = "", arch: Arch | str = ""
) -> Dataset:
    """The rows of one op and arch; where several are mixed the options must say which.

    An `Arch` gives the figures of the device that was measured, of several those of rows that carry
    none; a name leaves them to be found.
    """
    from tilewise.data.schema import to_table

    return _build(_rows(to_table(list(rows))), op, arch)


def from_stores(
    paths: Sequence[Path | str],
    *,
    op: str = "",
    arch: Arch | str = "",
    dtype: str = "",
    beside: Sequence[str] = (),
) -> Dataset:
    """The rows of stores, taken together; ops `beside` must have the features of `op`."""
    from tilewise.data.store import Store

    found: list[dict[str, Any]] = []
    for path in paths:
        found += _rows(Store(path).table(_NEEDED, latest=False))
    return _build(found, op, arch, dtype, beside)


def _rows(table: Any) -> list[dict[str, Any]]:
    """Rows that tell of kernels; those that tell of the machine teach nothing."""
    from tilewise.data.schema import faults, verdicts

    table = table.filter(~faults(table))
    rows: list[dict[str, Any]] = table.select(_NEEDED).to_pylist()
    for row, is_verdict in zip(rows, verdicts(table).tolist(), strict=True):
        row["is_verdict"] = is_verdict
    return rows


def _build(
    rows: list[dict[str, Any]],
    op: str,
    arch: Arch | str,
    dtype: str = "",
    beside: Sequence[str] = (),
) -> Dataset:
    if op in beside:
        raise InputError(f"{op} is what is learned; name other ops to learn beside it")
    name = arch.name if isinstance(arch, Arch) else arch
    for column_name, wanted in (("dtype", dtype), ("arch", name)):
        rows = [r for r in rows if not wanted or r[column_name] == wanted]
    own = [r for r in rows if (not op or r["op"] == op) and r["op"] not in beside]
    if not own:
        raise InputError("no measurements are left to learn from; check --op, --dtype and --arch")
    op = _single(own, "op")
    _check_features(op, beside)
    rows = [*own, *(r for r in rows if r["op"] in beside)]
    kind = load_arch(_single(rows, "arch")).kind
    timed = {text: what_is_timed(text) for text in {r["policy"] for r in rows}}
    for row in rows:
        row["policy"] = timed[row["policy"]]
    _check_times(rows)
    parts = _stands(rows)
    given = arch if isinstance(arch, Arch) else None
    stands = [_stand(part, given, is_alone=len(parts) == 1) for part in parts]
    made = [_arrays(usable(p, kind), op, a) for p, a in zip(parts, stands, strict=True)]
    return together(made)


def _stand(rows: Sequence[Mapping[str, Any]], given: Arch | None, *, is_alone: bool) -> Arch:
    """The device of rows: by the figures that they carry, else the one given, else looked up."""
    if given is None:
        return arch_of(rows)
    if not any(r["figures"] for r in rows):
        return given
    carried = arch_of(rows)
    return replace(carried, device=given.device) if is_alone else carried


def _stands(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each device and number of threads, most first; what else is timed must be one."""
    way_of = cache(way_of_timing)
    ways = Counter(way_of(r["policy"]) for r in rows).most_common()
    if len(ways) > 1:
        left = sum(count for _, count in ways[1:])
        log.warning("%d rows of another policy than %s are left out", left, ways[0][0])
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if way_of(row["policy"]) == ways[0][0]:
            parts.setdefault((row["device"], row["policy"]), []).append(row)
    return sorted(parts.values(), key=len, reverse=True)


def together(parts: Sequence[Dataset]) -> Dataset:
    """One data set of several, each of a device or a number of threads; figures tell them apart."""
    if len(parts) == 1:
        return parts[0]
    first, kernels = parts[0], {k.key: k for part in parts for k in part.kernels}
    place = {key: at for at, key in enumerate(kernels)}
    starts = np.cumsum([0, *(len(part.problems) for part in parts)])
    joined: dict[str, Any] = {
        name: sum((getattr(part, name) for part in parts), ()) for name in ("problems", "labels")
    }
    for name in ("time_us", "spread_us", "repeats", "first_us", "again_us"):
        joined[name] = np.concatenate([getattr(part, name) for part in parts])
    at = [part.problem_index + start for part, start in zip(parts, starts, strict=False)]
    return replace(
        first,
        **joined,
        kernels=tuple(kernels.values()),
        problem_index=np.concatenate(at),
        kernel_index=np.concatenate(
            [np.array([place[k.key] for k in p.kernels], np.int64)[p.kernel_index] for p in parts]
        ),
        tactics={key: of for part in parts for key, of in part.tactics.items()},
        stands=tuple(part.arch for part in parts for _ in part.problems),
    )


def _check_features(op: str, beside: Sequence[str]) -> None:
    """Raises where the rows of an op beside another would mean something else."""
    for other in beside:
        if get_op(other).features != get_op(op).features:
            raise InputError(
                f"{other} is described by other features than {op}; only ops of one family, like "
                "the directions of a convolution, are learned side by side"
            )


def arch_of(rows: Sequence[Mapping[str, Any]]) -> Arch:
    """The device that rows were measured on, with the figures that most of them carry.

    Waves and peaks follow from them, so a model must be trained with those it will be served with.
    """
    name, device = str(rows[0]["arch"]), str(rows[0]["device"])
    carried = Counter(r["figures"] for r in rows if r["figures"]).most_common(1)
    if carried:
        return recorded_arch(name, device, carried[0][0])
    return measured_arch(name, device, int(json_object(rows[0]["policy"], "").get("threads") or 0))


def measured_arch(name: str, device: str, threads: int = 0) -> Arch:
    """The figures of a device whose rows carry none: live if it is this one, else the file's.

    Files describe whole processors; of one that is not here, the threads that were timed count.
    """
    file = load_arch(name)
    live = detect(file.kind) if file.kind == "cpu" else None
    if live is not None and (live.name, live.device) == (name, device):
        return live
    named = device_named(name, device)
    if file.kind != "cpu" or named or not 0 < threads < file.compute_units:
        return load_arch(name, named)
    log.warning(
        "the rows do not carry the figures of %s; those of %d of the %d cores in the file of %s "
        "stand in, so predicted times may be off",
        *(device, threads, file.compute_units, name),
    )
    memory = min(file.memory_gb_s, threads * CORE_GB_S)
    return file.with_figures(
        compute_units=threads, max_threads_per_block=threads, memory_gb_s=memory
    )


def _single(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = sorted({str(r[name]) for r in rows})
    if len(values) > 1:
        raise InputError(f"the rows mix {name} {', '.join(values)}; choose one with --{name}")
    return values[0]


def _check_times(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        for name in ("time_us", "min_us"):
            if row["status"] == "ok" and row[name] is not None:
                check_time(f"row {row['key'][:16]}", name, row[name])


def _object(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    may_be_empty = name in ("labels", "tactic")
    text = row[name] or ("{}" if may_be_empty else "")
    return json_object(text, f"row {row['key'][:16]}: {name}")


def _made(make: Callable[[dict[str, Any]], Any], row: Mapping[str, Any], name: str) -> Any:
    """A problem or kernel from a row."""
    try:
        return make(_object(row, name))
    except (TilewiseError, TypeError) as error:
        raise InputError(f"row {row['key'][:16]}: {error}") from None


def _tactic(row: Mapping[str, Any]) -> Mapping[str, float]:
    try:
        return {str(name): float(value) for name, value in _object(row, "tactic").items()}
    except (ValueError, TypeError):
        raise InputError(
            f"row {row['key'][:16]} has the tactic {row['tactic'][:60]!r}; it must be a JSON "
            "object of numbers, or empty"
        ) from None


def _arrays(rows: Sequence[Mapping[str, Any]], op: str, arch: Arch) -> Dataset:
    problems: dict[str, int] = {}
    kernels: dict[str, int] = {}
    problem_rows: list[Mapping[str, Any]] = []
    kernel_rows: list[Mapping[str, Any]] = []
    pairs: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    tactics: dict[str, Mapping[str, float]] = {}
    for row in rows:
        p = problems.setdefault(row["problem_key"], len(problems))
        k = kernels.setdefault(row["kernel_key"], len(kernels))
        if p == len(problem_rows):
            problem_rows.append(row)
        if k == len(kernel_rows):
            kernel_rows.append(row)
        pairs.setdefault((p, k), []).append(row)
        if row["tactic"]:
            tactics[row["problem_key"]] = _tactic(row)
    right = [right_readings(of_newest_sources(found)) for found in pairs.values()]
    read = [reading(good) for good in right]
    index = np.array(list(pairs), np.int64).reshape(-1, 2)
    alone_us = column(first.get("time_us") for first, _ in read)
    return Dataset(
        op,
        arch,
        tuple(_made(get_op(r["op"]).problem.from_dict, r, "problem") for r in problem_rows),
        tuple(_made(get_op(r["op"]).kernel_from_dict, r, "kernel_fields") for r in kernel_rows),
        tuple(_object(r, "labels") for r in problem_rows),
        index[:, 0],
        index[:, 1],
        comparable(read, in_turn_us(right, index[:, 0]), index[:, 0], alone_us),
        column(r.get("spread_us") for _, r in read),
        np.array([int(r.get("repeats") or 0) for _, r in read], np.int64),
        str(rows[0]["device"]),
        *read_twice(right, read, index[:, 0]),
        tactics,
    )
