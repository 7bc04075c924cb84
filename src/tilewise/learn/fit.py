"""From rows to a ranking: calibrate, then learn what the calibrated times leave over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array, log2
from tilewise.core.features import ARCH, PROBLEM, FeatureSet, Rows
from tilewise.core.forest import Forest, from_lightgbm
from tilewise.core.model import ANALYTIC, Calibration
from tilewise.learn.calibrate import calibrate, kernel_factors, terms_matrix, total_us
from tilewise.learn.dataset import Dataset
from tilewise.learn.forests import Lesson, Mask, grow, grow_all, picked, text_names, tree_count
from tilewise.learn.params import Params
from tilewise.learn.split import folds, held_out
from tilewise.ops.contract import get_op
from tilewise.ops.tiling import CALIBRATED_FEATURES

_INNER_FOLDS = 5
_FIRST_LOOK = 60
"""Trees that decide which features are worth keeping."""
_MIN_PROBLEMS = 8
"""With fewer nothing is set apart to stop on."""


_UNTOLD = 0.3
"""What a row of the vendor's counts for once more, as if its library had said nothing: a model is
also asked where that library is not at hand."""


def _for_vendor(params: Params) -> Params:
    """Few rows a problem to learn from: slow trees that see few columns each."""
    return replace(params, leaves=63, learning_rate=0.03, column_share=0.2, min_rows=8)


@dataclass(frozen=True, slots=True)
class Start:
    """What a warm start continues from; scores of its problems are not out of fold any more."""

    text: str
    calibration: Calibration
    problems: frozenset[str]
    """Keys of the problems that the old model was trained on."""
    name: str = ""
    vendor_text: str = ""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A ranking learned from some rows: score = forest, minus what it starts from."""

    params: Params
    calibration: Calibration
    forest: Forest
    text: str
    rounds: int
    """Trees that every draw grew here, beside those of a warm start."""
    apart: NDArray[np.int64]
    """Problems that decided `rounds`; empty where none were set apart."""
    importances: Mapping[str, float] = field(default_factory=dict)
    vendor: Forest | None = None
    """What speaks of the vendor's routine in place of `forest`."""
    vendor_text: str = ""


class Trainer:
    """Everything about a data set that does not change between folds."""

    def __init__(self, data: Dataset, *, keep: Collection[str] = ()) -> None:
        self.data = data
        full = get_op(data.op).features
        apart = full.asked | set(CALIBRATED_FEATURES)
        static = [n for n in full.features if n not in apart]
        rows = data.rows(full)
        values = full.restricted(static).matrix(rows)
        # What is the same in every row teaches nothing.
        useful = (np.ptp(values, axis=0) > 0) | np.array([n in keep for n in static])
        self.static_names = tuple(n for n, v in zip(static, useful, strict=True) if v)
        self.static = values[:, useful]
        self.features: FeatureSet = full
        self.names = (*self.static_names, *CALIBRATED_FEATURES)
        self.terms = terms_matrix(data, full)
        self.log_time = log2(np.where(data.is_ok, data.time_us, 1.0))
        self.is_vendor = data.is_vendor
        self.asked_names, self.asked = self._asked(rows, keep)
        self._calibrated: dict[tuple[bytes, str], tuple[Calibration, Array]] = {}

    def _asked(self, rows: Rows, keep: Collection[str]) -> tuple[tuple[str, ...], Array]:
        """What the vendor's library said it would do, as columns; one row for each of its own."""
        asked, own = self.features.asked, rows.only(self.is_vendor)
        names = [n for n in self.features.features if n in asked]
        found = self.features.evaluate(own, names)
        useful = tuple(n for n in names if n in keep or (len(own) and np.ptp(found[n]) > 0))
        return useful, np.array([found[n] for n in useful]).reshape(len(useful), len(own)).T

    @property
    def problem_names(self) -> tuple[str, ...]:
        """Features that depend on the problem alone, and on where it was measured."""
        return tuple(n for n in self.static_names if self.features.scopes[n] in (ARCH, PROBLEM))

    def matrix(self, calibrated: Array, of: Mask | slice = slice(None)) -> Array:
        """All features of some rows, with the calibrated time of every row given."""
        rows = self.data.rows(self.features).only(of)
        known = {"calibrated_us": calibrated[of]}
        found = self.features.evaluate(rows, list(CALIBRATED_FEATURES), known)
        return np.column_stack([self.static[of], *found.values()])

    def centres(self, values: Array, rows: Mask, centre: float) -> Array:
        """Per problem, the mean of values over `rows`, fast ones counting more; else 0."""
        index, problems = self.data.problem_index, len(self.data.problems)
        weight = np.where(rows, np.exp2(centre * self.behind_best(rows)), 0.0)
        count = np.bincount(index, weight, problems)
        total = np.bincount(index, np.where(rows, weight * values, 0.0), problems)
        return total / np.where(count > 0, count, 1.0)

    def centred(self, values: Array, rows: Mask, centre: float = 0.0) -> Array:
        """Values minus their problem's centre; rows outside are not meaningful."""
        return values - self.centres(values, rows, centre)[self.data.problem_index]

    def calibrated(self, train: Mask, start: Start | None = None) -> tuple[Calibration, Array]:
        """The calibration of `train`, and times of all rows as if their problem was not in it.

        Forests must learn from calibrated times as wrong as they will be for new problems, so a
        training row gets its time from a calibration that left its problem out. After a warm start
        known kernels keep their factors: the old trees speak of what those leave over.
        """
        key = (train.tobytes(), start.name if start else "")
        if key not in self._calibrated:
            self._calibrated = {key: self._calibrate(train, start)}
        return self._calibrated[key]

    def base_octaves(self, params: Params, calibrated: Array) -> Array:
        """The octaves that the scores of all rows start from, given their calibrated times."""
        if not params.share:
            return np.zeros(len(self.data))
        return params.share * log2(calibrated if params.calibrated else self._analytic)

    @cached_property
    def _analytic(self) -> Array:
        rows = self.data.rows(self.features)
        return self.features.evaluate(rows, [ANALYTIC])[ANALYTIC]

    def _calibrate(self, train: Mask, start: Start | None) -> tuple[Calibration, Array]:
        data, kept = self.data, start.calibration if start else None
        whole = calibrate(data, self.terms, train, kept)
        times = total_us(self.terms, data, kernel_factors(data, whole))
        index = np.unique(data.problem_index[train])
        if len(index) >= 2 * _INNER_FOLDS:
            split = folds([data.problems[i] for i in index], _INNER_FOLDS, seed=101)
            for fold in range(_INNER_FOLDS):
                out = data.of_problems(index[split == fold]) & train
                part = calibrate(data, self.terms, train & ~out, kept)
                times[out] = total_us(self.terms, data, kernel_factors(data, part))[out]
        return whole, times

    def fit(
        self,
        train: Mask,
        params: Params,
        *,
        weight: Array | None = None,
        start: Start | None = None,
    ) -> Fitted:
        """A ranking learned from the rows in `train`."""
        ok = train & self.data.is_ok
        if params.calibrated:
            calibration, times = self.calibrated(ok, start)
        else:
            calibration = calibrate(self.data, self.terms, ok, least=np.inf)
            times = np.ones(len(ok))
        lesson = self._lesson(ok, times, params, weight)
        if start:
            lesson = lesson.columns(text_names(start.text))
        elif 0 < params.max_features < len(lesson.names):
            gains = grow(lesson, ok, params, _FIRST_LOOK).feature_importance("gain")
            kept = np.sort(np.argsort(-gains, kind="stable")[: params.max_features])
            lesson = lesson.columns(tuple(lesson.names[i] for i in kept))
        init = start.text if start else None
        vendor, vendor_text = self._fit_vendor(lesson, ok, params, start)
        if vendor is not None:
            ok = ok & ~self.is_vendor
        apart = self._apart(ok, params, start)
        rounds = params.trees
        if len(apart):
            stop = self.data.of_problems(apart) & ok
            booster = grow(lesson, ok & ~stop, params, rounds, init_text=init, stop=stop)
            before = tree_count(init)
            # The final forest sees more rows than the one that was stopped.
            rounds = min(rounds, max(1, round((booster.best_iteration - before) * 1.1)))
        text, gained = grow_all(lesson, ok, params, rounds, init)
        gains = dict(zip(lesson.names, gained, strict=True))
        return Fitted(
            params,
            calibration,
            from_lightgbm(text, lesson.names),
            text,
            rounds,
            apart,
            {name: float(gain) for name, gain in gains.items() if gain > 0},
            vendor,
            vendor_text,
        )

    def _fit_vendor(
        self, lesson: Lesson, ok: Mask, params: Params, start: Start | None
    ) -> tuple[Forest | None, str]:
        """A forest of the vendor's rows alone, where others say what they are held against."""
        data, others = self.data, ok & ~self.is_vendor
        rows = ok & self.is_vendor & data.of_problems(np.unique(data.problem_index[others]))
        text = start.vendor_text if start else ""
        if params.vendor_trees and rows.any():
            told = self._told(lesson, rows, text_names(text) if text else ())
            every = np.ones(len(told.target), bool)
            text, _ = grow_all(told, every, _for_vendor(params), params.vendor_trees, text or None)
        return (from_lightgbm(text, text_names(text)) if text else None), text

    def _told(self, lesson: Lesson, rows: Mask, names: tuple[str, ...]) -> Lesson:
        """The vendor's rows with what its library said and, counting less, without."""
        asked = self.asked[rows[self.is_vendor]]
        known = replace(
            lesson,
            matrix=np.column_stack([lesson.matrix[rows], asked]),
            names=(*lesson.names, *self.asked_names),
            target=lesson.target[rows],
            behind=lesson.behind[rows],
            weight=lesson.weight[rows],
            problem_index=lesson.problem_index[rows],
        )
        if names:
            known = known.columns(names)
        is_asked = [name in self.asked_names for name in known.names]
        if not any(is_asked):
            return known
        return replace(
            known,
            matrix=np.vstack([known.matrix, np.where(is_asked, 0.0, known.matrix)]),
            target=np.tile(known.target, 2),
            behind=np.tile(known.behind, 2),
            weight=np.concatenate([known.weight, known.weight * _UNTOLD]),
            problem_index=np.tile(known.problem_index, 2),
        )

    def _apart(self, rows: Mask, params: Params, start: Start | None) -> NDArray[np.int64]:
        """The third split: problems to stop on, which the old model must not have seen either."""
        index = np.unique(self.data.problem_index[rows])
        if start:
            fresh = [self.data.problems[i].key not in start.problems for i in index]
            index = index[np.array(fresh, bool)]
        if params.patience < 1 or len(index) < _MIN_PROBLEMS:
            return np.zeros(0, np.int64)
        return held_out(self.data.problems, index, seed=params.seed)

    def _lesson(self, ok: Mask, times: Array, params: Params, weight: Array | None) -> Lesson:
        gain = self.base_octaves(params, times) - self.log_time
        target = self.centred(gain, ok, params.centre)
        behind = self.behind_best(ok)
        counts = self._rarity(ok) ** params.balance
        counts = counts if weight is None else counts * weight
        if params.objective == "regression":
            counts = counts * np.exp2(params.focus * behind)
        index = self.data.problem_index
        lesson = Lesson(self.matrix(times), self.names, target, behind, counts, index)
        return lesson if params.calibrated else lesson.columns(self.static_names)

    def _rarity(self, rows: Mask) -> Array:
        """Rows of an average family over those of each row's own."""
        kinds = [(k.engine, getattr(k, "family", "")) for k in self.data.kernels]
        codes = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        own = np.array([codes[kind] for kind in kinds])[self.data.kernel_index]
        count = np.bincount(own, rows, len(codes))
        share = count[count > 0].mean() / np.maximum(count, 1)
        result: Array = share[own]
        return result

    def score(self, fitted: Fitted, of: Mask, *, is_told: bool = True) -> Array:
        """What a fitted ranking says about some rows, told what the vendor's would do or not."""
        times = total_us(self.terms, self.data, kernel_factors(self.data, fitted.calibration))
        matrix, names = self.matrix(times, of), (*self.names, *self.asked_names)
        score = fitted.forest.predict(picked(matrix, names, fitted.forest.features))
        if fitted.vendor is not None:
            own = self.is_vendor[of]
            asked = self.asked[of[self.is_vendor]]
            matrix = np.column_stack([matrix[own], asked if is_told else np.zeros_like(asked)])
            score[own] = fitted.vendor.predict(picked(matrix, names, fitted.vendor.features))
        return score - self.base_octaves(fitted.params, times)[of]

    def behind_best(self, rows: Mask) -> Array:
        """Octaves behind the fastest row of the same problem, at most 0 and at least -4."""
        best = np.full(len(self.data.problems), np.inf)
        np.minimum.at(best, self.data.problem_index[rows], self.log_time[rows])
        behind = best[self.data.problem_index] - self.log_time
        return np.where(rows & np.isfinite(behind), np.maximum(behind, -4.0), 0.0)
