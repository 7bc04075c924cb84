"""Models as values and as folders.

    model.json.gz       forests, calibration factors, the measured problems
    numbers.gz          their arrays, at the places that model.json.gz names
    rank.txt.gz ...     the LightGBM text of each forest, of several draws their mean
    feature_spec.json   the definitions of the features it uses
    manifest.json       what it is for, where it comes from, sha256 of every other file
    metrics.json        cross-validation
    importances.json    what each feature contributes to the ranking
    oof.parquet         out-of-fold predictions
    folds.json          which problem was in which fold

Nothing is pickled; loading needs neither LightGBM nor a dataframe library.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tilewise.core.arch import FIGURES, Arch, load_arch, wrong_type
from tilewise.core.compile_expr import Array, log2
from tilewise.core.dtypes import DTYPES
from tilewise.core.exchange import exchanged
from tilewise.core.features import ARCH, MIXED, PROBLEM, FeatureSet, Rows
from tilewise.core.forest import Forest
from tilewise.core.kernel import Kernel
from tilewise.core.packed import Numbers
from tilewise.core.plain_files import resolved
from tilewise.core.sealed import MANIFEST, MODEL_SCHEMA, SERVED, SealedFolder, as_json, seal
from tilewise.core.strict_json import loads
from tilewise.errors import FileError, ModelError

_BODY, _NUMBERS, _SPEC, _METRICS = SERVED
_DAMAGES = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError)


def family_prefix(kernel: Kernel) -> str:
    """How the names of a kernel's family begin; empty where they do not tell it."""
    prefix = f"{kernel.op}_{kernel.engine}_{getattr(kernel, 'family', '')}_"
    return prefix if kernel.name.startswith(prefix) else ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors of the analytic terms, per kernel; kernels never measured take the next best."""

    terms: tuple[str, ...]
    kernels: Mapping[str, tuple[float, ...]]
    tiles: Mapping[str, tuple[float, ...]]
    engines: Mapping[str, tuple[float, ...]]

    def factors(self, name: str, engine: str, tile: tuple[int, ...]) -> tuple[float, ...]:
        """The kernel's own, else its tile's, else its engine's, else those of all kernels."""
        for table, key in (
            (self.kernels, name),
            (self.tiles, tile_key(engine, tile)),
            (self.engines, engine),
            (self.engines, ANY_ENGINE),
        ):
            if key in table:
                return table[key]
        return (0.0,) * len(self.terms)

    def to_dict(self) -> dict[str, Any]:
        tables = {n: {k: list(v) for k, v in getattr(self, n).items()} for n in _TABLES}
        return {"terms": list(self.terms), **tables}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        tables = {n: {k: tuple(map(float, v)) for k, v in values[n].items()} for n in _TABLES}
        found = cls(terms=tuple(map(str, values["terms"])), **tables)
        factors = [f for table in tables.values() for f in table.values()]
        if any(len(f) != len(found.terms) or not np.isfinite(f).all() for f in factors):
            raise ValueError("a calibration has other factors than terms, or infinite ones")
        return found


CALIBRATED, ANALYTIC = BASES = ("calibrated_us", "analytic_us")
"""Helpers that estimate times; scores may start from one."""
VENDOR = "vendor"
"""The engine of a vendor's routines, and the forest that speaks of them alone."""
VENDOR_TIE = 0.0225
"""Predicted within this of the best, the vendor's routine is taken: a wrong guess then loses
nothing against it, and it need not be compiled. The H200's model is off by about 3 % on gaps
between it and the best of ours that it predicts below 10 %; wider bands lose more."""
_TABLES = ("kernels", "tiles", "engines")
ANY_ENGINE = "any"
UNKNOWN_HANDICAP = 100.0
"""Octaves taken from kernels of an engine or family that was never measured: they come last."""


def tile_key(engine: str, tile: tuple[int, ...]) -> str:
    return f"{engine}:{'x'.join(map(str, tile))}"


@dataclass(frozen=True, slots=True)
class Measured:
    """The problems behind a model: where they lie, and how well it chose for them unseen."""

    axes: tuple[str, ...]
    """Helpers that give a problem's coordinates, in octaves."""
    points: Array
    efficiency: Array
    """Out of fold, chosen over best; NaN where it was not scored."""
    reach: float
    """How far from its nearest measured problem a problem may lie."""
    problems: Sequence[str]
    """Canonical JSON, in the order of `points`."""

    def to_dict(self, numbers: Numbers) -> dict[str, Any]:
        return {
            "axes": list(self.axes),
            "points": numbers.put(self.points.ravel(), unit=1024),
            "efficiency": numbers.put(np.nan_to_num(self.efficiency, nan=-1.0), unit=10_000),
            "reach": self.reach,
            "problems": numbers.put_lines(self.problems),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], numbers: Numbers) -> Measured:
        problems = values["problems"]
        if isinstance(problems, str):
            problems = problems.split("\n") if problems else ()
        is_packed = isinstance(problems, Mapping)
        problems = numbers.get_lines(**problems) if is_packed else tuple(problems)
        efficiency = numbers.get(values["efficiency"], np.float64)
        found = cls(
            axes=tuple(values["axes"]),
            points=numbers.get(values["points"], np.float64).reshape(-1, len(values["axes"])),
            efficiency=np.where(efficiency < 0, np.nan, efficiency),
            reach=float(values["reach"]),
            problems=problems,
        )
        if not len(found.points) == len(found.efficiency) == len(found.problems):
            raise ValueError(
                "the measured problems, their places and efficiencies differ in number"
            )
        if not len(found.points) or not np.isfinite(found.points).all():
            raise ValueError("no problem was measured, or one at no place")
        if not 0 <= found.reach < np.inf:
            raise ValueError(f"the reach is {found.reach}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What training leaves behind.

    The score of a kernel is the forest `rank`, or `vendor` where that is there and the kernel is
    the vendor's, minus `share` of the logarithm of an estimate of its time. `level` then turns
    scores into times: 2 ** (level - score) microseconds.
    """

    op: str
    arch: str
    device: str = ""
    dtypes: tuple[str, ...]
    base: str
    """The helper that estimates times, one of `BASES`; empty where scores start from nothing."""
    share: float
    features: FeatureSet
    forests: Mapping[str, Forest]
    calibration: Calibration
    measured: Measured
    manifest: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.manifest.get("name", f"{self.op} {self.arch}"))

    @property
    def trained_on(self) -> Arch:
        """The architecture with the figures of the device that was measured."""
        arch = load_arch(self.arch, self.device)
        return arch.with_figures(**self.manifest.get("figures", {}))

    @property
    def stands(self) -> tuple[Arch, ...]:
        """Every device that was measured, or number of its cores; `trained_on` is the first."""
        arch = load_arch(self.arch, self.device)
        rest = [arch.with_figures(**f) for f in self.manifest.get("stands", ())]
        return (self.trained_on, *rest[1:])

    def figures_for(self, arch: Arch | None) -> Arch:
        """`arch`; where it only names what has no product (a CPU), with the measured figures."""
        if arch is None or (not arch.device and arch == load_arch(self.arch)):
            return self.trained_on
        return arch

    def forest_of(self, engine: str) -> str:
        """The forest that speaks of an engine's kernels."""
        return VENDOR if engine == VENDOR and VENDOR in self.forests else "rank"

    def handicaps(self, kernels: Sequence[Kernel]) -> Array:
        """What is taken from the scores of kernels, where none like them were measured."""
        kinds = [(k.engine, family_prefix(k)) for k in kernels]
        taken = {kind: 0.0 if self._knows(*kind) else UNKNOWN_HANDICAP for kind in set(kinds)}
        return np.array([taken[kind] for kind in kinds])

    def _knows(self, engine: str, family: str) -> bool:
        """Whether kernels of an engine, and of a family where names tell one, were measured."""
        measured = (*self.calibration.kernels, *self.manifest.get("kernels", ()))
        return engine in self.calibration.engines and (
            not family or any(name.startswith(family) for name in measured)
        )

    def forest_matrix(self, forest: str, rows: Rows) -> Array:
        """The columns that a forest splits on."""
        names = self.forests[forest].features
        columns = self.features.evaluate(rows, names)
        if not names:
            return np.zeros((len(rows), 0))
        return np.column_stack([columns[name] for name in names])

    def predict(self, forest: str, rows: Rows) -> Array:
        """What one forest says about every row."""
        return self.forests[forest].predict(self.forest_matrix(forest, rows))

    def scores(self, rows: Rows) -> Array:
        """Higher is faster; comparable between kernels of one problem, in octaves."""
        score = self.predict("rank", rows)
        if VENDOR in self.forests:
            is_vendor = self.features.evaluate(rows, ["is_vendor"])["is_vendor"] > 0
            if is_vendor.any():
                score[is_vendor] = self.predict(VENDOR, rows.only(is_vendor))
        return score - self.base_octaves(rows) if self.base else score

    def base_octaves(self, rows: Rows) -> Array:
        """The octaves that scores start from: a share of each estimated time."""
        result: Array = self.share * log2(self.features.evaluate(rows, [self.base])[self.base])
        return result


def check_place(folder: Path) -> None:
    """Raises where a model may not be written: a file is there, or what is no model's."""
    try:
        place = resolved(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent):
            there = {path.name for path in place.iterdir()} if place.exists() else set()
    except OSError as error:
        raise FileError(
            f"{folder} cannot be a model's folder: {error.strerror}; name another"
        ) from None
    if Path.cwd().is_relative_to(place):
        raise FileError(f"{folder} is the folder that this runs in; name one below it")
    others = there
    if MANIFEST in there:
        others = there - {MANIFEST, *SealedFolder(folder).manifest["files"]}
    if others:
        raise FileError(
            f"{folder} holds what is no model's ({', '.join(sorted(others)[:3])}); "
            "name a new folder, or one that holds a model and nothing else"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder to write a model into; whole, it takes the place of `folder`.

    Whatever goes wrong before, the model that was there stays as it was. The two change places in
    one step where the system can, so that even a kill leaves one of them there.
    """
    check_place(folder)
    try:
        place = resolved(folder)
        with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
            fresh, old = Path(scratch, "new"), Path(scratch, "old")
            fresh.mkdir()
            yield fresh
            if place.exists():
                fresh.chmod(place.stat().st_mode)
                if exchanged(fresh, place):
                    return
                place.rename(old)
            try:
                fresh.rename(place)
            except BaseException:
                if old.exists():
                    old.rename(place)
                raise
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error.strerror or error}") from error


def save_model(model: Model, folder: Path, texts: Mapping[str, str], **extra: Any) -> None:
    """Writes a model into a fresh folder, which may hold its tables (Parquet) already.

    `extra` holds further JSON files by name without suffix.
    """
    numbers = Numbers()
    body = {
        "schema": _schema(model),
        **_base_to_dict(model),
        "forests": {name: f.to_dict(numbers) for name, f in model.forests.items()},
        "calibration": model.calibration.to_dict(),
        "measured": model.measured.to_dict(numbers),
    }
    files: dict[str, bytes] = {
        _BODY: _packed(json.dumps(body, separators=(",", ":")).encode()),
        _NUMBERS: _packed(numbers.data),
        _SPEC: as_json(model.features.to_dict()),
    }
    files |= {f"{name}.txt.gz": _packed(text.encode()) for name, text in texts.items()}
    files |= {f"{name}.json": as_json(value) for name, value in extra.items()}
    files[_METRICS] = as_json(dict(model.metrics))
    own = {"op": model.op, "arch": model.arch, "device": model.device}
    manifest = {**model.manifest, **own, "dtypes": list(model.dtypes)}
    seal(folder, files, manifest, _schema(model))


def _schema(model: Model) -> int:
    """The oldest that says all of a model: what need not be written anew stays as it is."""
    return MODEL_SCHEMA if _has_own_base(model) else 4


def _has_own_base(model: Model) -> bool:
    """Whether scores start from other than nothing or calibrated times."""
    return bool(model.base) and (model.base, model.share) != (CALIBRATED, 1.0)


def _base_to_dict(model: Model) -> dict[str, Any]:
    if _has_own_base(model):
        return {"has_base": True, "base": model.base, "share": model.share}
    return {"has_base": bool(model.base)}


def _base_from_dict(body: Mapping[str, Any]) -> dict[str, Any]:
    if not body["has_base"]:
        return {"base": "", "share": 0.0}
    base, share = body.get("base", CALIBRATED), float(body.get("share", 1.0))
    if base not in BASES or not 0 < share <= 1:
        raise ValueError(f"scores start from {share} of {str(base)[:60]!r}")
    return {"base": base, "share": share}


def _packed(data: bytes | bytearray) -> bytes:
    """Without a time stamp: equal models are equal bytes."""
    return gzip.compress(data, 9, mtime=0)


def forest_text(folder: Path, name: str) -> str:
    """The LightGBM text of a forest in a model's folder."""
    sealed = SealedFolder(folder)
    plain = f"{name}.txt"  # before schema 3
    data = sealed.read(plain) if plain in sealed else sealed.unpacked(f"{name}.txt.gz")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{folder} is damaged: the text of {name}: {error}") from None


def load_model(folder: Path | str) -> Model:
    """The model in `folder`; damaged, foreign or newer ones are refused with the reason."""
    sealed = SealedFolder(folder)
    manifest = sealed.manifest
    try:
        body = loads(sealed.unpacked(_BODY))
        numbers = Numbers(sealed.unpacked(_NUMBERS) if manifest["schema"] >= 4 else b"")
        model = Model(
            op=manifest["op"],
            arch=manifest["arch"],
            device=manifest.get("device", ""),
            dtypes=tuple(manifest["dtypes"]),
            **_base_from_dict(body),
            features=FeatureSet.from_dict(sealed.json(_SPEC)),
            forests={name: Forest.from_dict(f, numbers) for name, f in body["forests"].items()},
            calibration=Calibration.from_dict(body["calibration"]),
            measured=Measured.from_dict(body["measured"], numbers),
            manifest=manifest,
            metrics=dict(sealed.json(_METRICS)) if _METRICS in sealed else {},
        )
        _check_parts(model)
        _check_scopes(model)
        _check_figures(model)
    except _DAMAGES as error:
        raise ModelError(f"{folder} is damaged: {type(error).__name__}: {error}") from None
    return model


def _check_parts(model: Model) -> None:
    """Raises where files are sound but of different models."""
    known = {*model.features.features, *model.features.helpers}
    used = {name for forest in model.forests.values() for name in forest.features}
    used |= {model.base} if model.base else set()
    used |= {"is_vendor"} if VENDOR in model.forests else set()
    foreign = sorted({*used, *model.measured.axes} - known)
    if foreign:
        raise ValueError(f"{_SPEC} does not define {foreign[0]}, which {_BODY} uses")
    missing = [name for name in ("rank", "level") if name not in model.forests]
    if missing:
        raise ValueError(f"{_BODY} has no forest {missing[0]}")
    if not model.dtypes or not set(model.dtypes) <= set(DTYPES):
        raise ValueError(f"{MANIFEST}: dtypes are {list(model.dtypes)[:8]}")


def _check_scopes(model: Model) -> None:
    """Raises where what must be known of a problem alone depends on kernels, or the other way."""
    scopes = model.features.scopes
    for name in (*model.forests["level"].features, *model.measured.axes):
        if scopes[name] not in (ARCH, PROBLEM):
            raise ValueError(f"{name} depends on the kernel; a level and an axis may not")
    if model.base and scopes[model.base] != MIXED:
        raise ValueError(f"{model.base} does not depend on both problem and kernel")


def _check_figures(model: Model) -> None:
    """Raises where the measured device is no device of the architecture."""
    manifest = model.manifest
    for figures in (manifest.get("figures", {}), *manifest.get("stands", ())):
        for name, value in figures.items():
            if name not in FIGURES:
                raise ValueError(f"{MANIFEST}: {name[:60]!r} is no figure of an architecture")
            wrong = wrong_type(name, value)
            numbers = value.values() if isinstance(value, dict) else [value]
            if wrong or not all(0 <= number < 1e18 for number in numbers):
                raise ValueError(
                    f"{MANIFEST}: {name} is {str(value)[:60]}; it must be {wrong or 'below 1e18'}"
                )
    for a in model.stands:
        if min(a.compute_units, a.clock_mhz, a.memory_gb_s, *a.peak_tflops.values()) <= 0:
            raise ValueError(f"{MANIFEST}: a figure is 0")
