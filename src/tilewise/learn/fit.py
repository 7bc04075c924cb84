"""From a data set to a model: calibrate, learn what remains, learn the level, learn what fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.features import PROBLEM, FeatureSet
from tilewise.core.forest import Forest, from_lightgbm
from tilewise.core.model import Calibration
from tilewise.errors import InputError
from tilewise.learn.calibrate import calibrate, kernel_factors, terms_matrix, total_us
from tilewise.learn.dataset import Dataset, features_of
from tilewise.learn.split import folds, held_out
from tilewise.ops.tiling import CALIBRATED_FEATURES

Mask = NDArray[np.bool_]
OBJECTIVES = ("regression", "lambdarank", "top_decile")
TARGETS = ("tflops", "latency", "bandwidth")
_INNER_FOLDS = 5
_FIRST_LOOK = 60
"""Trees that decide which features are worth keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """How forests are grown. `trees` is the most; fewer where the third split says so."""

    objective: str = "regression"
    base: bool = True
    """Learn what the calibrated analytic model leaves over, instead of everything."""
    trees: int = 200
    leaves: int = 16
    learning_rate: float = 0.09
    min_rows: int = 20
    row_share: float = 0.8
    column_share: float = 0.5
    l2: float = 5.0
    max_bin: int = 127
    max_features: int = 64
    """The most features a ranking may use, those with the largest gains; 0 stands for all."""
    focus: float = 2.0
    """How much more the fast kernels of a problem count than the slow ones."""
    hard_rounds: int = 0
    """How often problems that were chosen badly for are weighted up and learned again."""
    early_stop: bool = True
    targets: tuple[str, ...] = ()
    """Absolute quantities to learn beside the ranking."""
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(f"objective is {self.objective!r}; use {', '.join(OBJECTIVES)}")
        for target in self.targets:
            if target not in TARGETS:
                raise InputError(f"target {target!r} is unknown; use {', '.join(TARGETS)}")
        if not 2 <= self.leaves <= 255 or not 1 <= self.max_bin <= 255:
            raise InputError("leaves must be 2 to 255 and max_bin 1 to 255, to be served as bytes")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Params:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})

    def lightgbm(self, **changes: Any) -> dict[str, Any]:
        """The same under LightGBM's names; nothing in it depends on the machine."""
        return {
            "objective": "l2",
            "num_leaves": self.leaves,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": self.min_rows,
            "bagging_fraction": self.row_share,
            "bagging_freq": 1,
            "feature_fraction": self.column_share,
            "lambda_l2": self.l2,
            "max_bin": self.max_bin,
            "use_missing": False,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": self.threads,
            "seed": self.seed,
            "verbosity": -1,
            **changes,
        }


@dataclass(frozen=True, slots=True)
class Fitted:
    """A ranking learned from some rows: score = forest, minus log2 of the calibrated time."""

    params: Params
    calibration: Calibration
    forest: Forest
    text: str
    rounds: int
    names: tuple[str, ...]
    importances: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """Everything about a data set that does not change between folds."""

    def __init__(self, data: Dataset, *, drop: tuple[str, ...] = ()) -> None:
        self.data = data
        full = features_of(data.op)
        static = [n for n in full.features if n not in CALIBRATED_FEATURES and n not in drop]
        values = full.restricted(static).matrix(data.rows(full))
        varies = np.ptp(values, axis=0) > 0 if len(values) else np.zeros(values.shape[1], bool)
        self.static_names = tuple(n for n, v in zip(static, varies, strict=True) if v)
        self.static = values[:, varies]
        self.features: FeatureSet = full
        self.names = (*self.static_names, *(n for n in CALIBRATED_FEATURES if n not in drop))
        self.terms = terms_matrix(data, full)
        self.log_time = np.log2(np.where(data.is_ok, data.time_us, 1.0))

    def matrix(self, calibrated: Array) -> Array:
        """All features, with the calibrated time of every row given."""
        extra = [n for n in self.names if n in CALIBRATED_FEATURES]
        if not extra:
            return self.static
        found = self.features.evaluate(
            self.data.rows(self.features), extra, {"calibrated_us": calibrated}
        )
        return np.column_stack([self.static, *(found[n] for n in extra)])

    def centred(self, values: Array, rows: Mask) -> Array:
        """Values minus their problem's mean over `rows`; rows outside are not meaningful."""
        index = self.data.problem_index
        count = np.bincount(index, rows, len(self.data.problems))
        total = np.bincount(index, np.where(rows, values, 0.0), len(self.data.problems))
        return values - (total / np.maximum(count, 1))[index]

    def calibrated(self, train: Mask) -> tuple[Calibration, Array, Array]:
        """The calibration of `train`, the times it gives, and the same with training rows unseen.

        Forests must learn from calibrated times as wrong as they will be for new problems, so a
        training row gets its time from a calibration that left its problem out.
        """
        data = self.data
        whole = calibrate(data, self.terms, train)
        seen = total_us(self.terms, data, kernel_factors(data, whole))
        unseen = seen.copy()
        index = np.unique(data.problem_index[train])
        if len(index) >= 2 * _INNER_FOLDS:
            split = folds([data.problems[i] for i in index], _INNER_FOLDS, seed=101)
            for fold in range(_INNER_FOLDS):
                out = data.of_problems(index[split == fold]) & train
                part = calibrate(data, self.terms, train & ~out)
                unseen[out] = total_us(self.terms, data, kernel_factors(data, part))[out]
        return whole, seen, unseen

    def fit(
        self,
        train: Mask,
        params: Params,
        *,
        weight: Array | None = None,
        init_text: str | None = None,
    ) -> Fitted:
        """A ranking learned from the rows in `train`."""
        ok = train & self.data.is_ok
        calibration, _, unseen = self.calibrated(ok)
        matrix = self.matrix(unseen)
        speed = self.centred(-self.log_time, ok)
        target = speed - self.centred(-np.log2(unseen), ok) if params.base else speed
        importance = np.exp2(params.focus * self._behind_best(ok))
        if weight is not None:
            importance = importance * weight
        names = self.names
        if init_text:
            names = lightgbm_names(init_text)
            matrix = matrix[:, [self.names.index(n) for n in names]]
        elif 0 < params.max_features < len(names):
            first = self._grow(ok, matrix, target, importance, params, _FIRST_LOOK, names)
            kept = np.sort(np.argsort(-first.feature_importance("gain"))[: params.max_features])
            matrix, names = matrix[:, kept], tuple(names[i] for i in kept)
        rounds = params.trees
        if params.early_stop:
            rounds = self._rounds(ok, matrix, target, importance, params, names)
        booster = self._grow(ok, matrix, target, importance, params, rounds, names, init_text)
        text = booster.model_to_string(importance_type="gain")
        gains = booster.feature_importance("gain")
        return Fitted(
            params,
            calibration,
            from_lightgbm(text, names),
            text,
            rounds,
            names,
            {n: float(g) for n, g in zip(names, gains, strict=True) if g > 0},
        )

    def score(self, fitted: Fitted) -> Array:
        """What a fitted ranking says about every row."""
        times = total_us(self.terms, self.data, kernel_factors(self.data, fitted.calibration))
        matrix = self.matrix(times)
        place = {name: i for i, name in enumerate(self.names)}
        columns = matrix[:, [place[n] for n in fitted.forest.features]]
        score = fitted.forest.predict(columns)
        return score - np.log2(times) if fitted.params.base else score

    def _behind_best(self, rows: Mask) -> Array:
        """Octaves behind the fastest row of the same problem, at most 0."""
        best = np.full(len(self.data.problems), np.inf)
        np.minimum.at(best, self.data.problem_index[rows], self.log_time[rows])
        behind = best[self.data.problem_index] - self.log_time
        return np.where(rows & np.isfinite(behind), np.maximum(behind, -4.0), 0.0)

    def _rounds(
        self,
        rows: Mask,
        matrix: Array,
        target: Array,
        weight: Array,
        params: Params,
        names: tuple[str, ...],
    ) -> int:
        """How many trees are worth it, by problems that are set apart for this alone."""
        index = np.unique(self.data.problem_index[rows])
        if len(index) < 8:
            return params.trees
        apart = self.data.of_problems(held_out(self.data.problems, index, seed=params.seed))
        booster = self._grow(
            rows & ~apart, matrix, target, weight, params, params.trees, names, None, rows & apart
        )
        best = booster.best_iteration or params.trees
        # The final forest sees more rows than the one that was stopped.
        return int(min(params.trees, max(10, round(best * 1.1))))

    def _grow(
        self,
        rows: Mask,
        matrix: Array,
        target: Array,
        weight: Array,
        params: Params,
        rounds: int,
        names: tuple[str, ...],
        init_text: str | None = None,
        stop: Mask | None = None,
    ) -> Any:
        import lightgbm

        changes, labels = _objective(params, target, self._behind_best(rows | _none(stop, rows)))
        order, sizes = self._by_problem(rows)
        made = lightgbm.Dataset(
            matrix[order],
            labels[order],
            weight=None if params.objective == "lambdarank" else weight[order],
            group=sizes if params.objective == "lambdarank" else None,
            feature_name=list(names),
            free_raw_data=False,
        )
        settings = params.lightgbm(**changes)
        if stop is None:
            init = lightgbm.Booster(model_str=init_text) if init_text else None
            return lightgbm.train(settings, made, rounds, init_model=init)
        order, sizes = self._by_problem(stop)
        held = made.create_valid(
            matrix[order],
            labels[order],
            weight=None if params.objective == "lambdarank" else weight[order],
            group=sizes if params.objective == "lambdarank" else None,
        )
        callbacks: list[Any] = [lightgbm.early_stopping(50, verbose=False)]
        return lightgbm.train(settings, made, rounds, valid_sets=[held], callbacks=callbacks)

    def _by_problem(self, rows: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows in the order of their problems, and how many each has."""
        chosen = np.flatnonzero(rows)
        order = chosen[np.argsort(self.data.problem_index[chosen], kind="stable")]
        _, sizes = np.unique(self.data.problem_index[order], return_counts=True)
        return order, sizes

    def level(self, fitted: Fitted, train: Mask, params: Params) -> tuple[Forest, str]:
        """What turns scores into times: per problem, the mean of log2 time plus score."""
        import lightgbm

        ok = train & self.data.is_ok
        _, _, unseen = self.calibrated(ok) if params.base else (None, None, np.ones(len(ok)))
        index, names = self.data.problem_index, self.problem_names
        count = np.bincount(index, ok, len(self.data.problems))
        gap = self.log_time - np.log2(unseen)
        mean = np.bincount(index, np.where(ok, gap, 0.0), len(count)) / np.maximum(count, 1)
        first = np.unique(index, return_index=True)[1]
        place = {name: i for i, name in enumerate(self.static_names)}
        matrix = self.static[first][:, [place[n] for n in names]]
        known = count[index[first]] > 0
        small = replace(params, leaves=min(15, params.leaves), min_rows=5, column_share=0.7)
        made = lightgbm.Dataset(
            matrix[known], mean[index[first]][known], feature_name=list(names), free_raw_data=False
        )
        booster = lightgbm.train(small.lightgbm(), made, 100)
        text = booster.model_to_string()
        return from_lightgbm(text, names), text

    @property
    def problem_names(self) -> tuple[str, ...]:
        """Features that depend on the problem alone."""
        return tuple(n for n in self.static_names if self.features.scopes[n] == PROBLEM)

    def absolute(self, target: str, train: Mask, params: Params) -> tuple[Forest, str]:
        """A forest for log2 of TFLOPS, of microseconds or of GB/s."""
        data = self.data
        ok = train & data.is_ok
        work = {
            "tflops": np.log2(np.maximum(data.flops, 1.0) * 1e-6),
            "bandwidth": np.log2(np.maximum(data.bytes, 1.0) * 1e-3),
        }
        wanted = (
            self.log_time
            if target == "latency"
            else work[target][data.problem_index] - self.log_time
        )
        _, _, unseen = self.calibrated(ok)
        booster = self._grow(
            ok,
            self.matrix(unseen),
            wanted,
            np.ones(len(data)),
            replace(params, objective="regression"),
            params.trees,
            self.names,
        )
        text = booster.model_to_string()
        return from_lightgbm(text, self.names), text

    def validity(self, train: Mask, params: Params) -> tuple[Forest, str] | None:
        """A forest whose positive scores mean that a kernel will run; None where few failed."""
        import lightgbm

        failed = train & ~self.data.is_ok
        if failed.sum() < 20 or (train & self.data.is_ok).sum() < 20:
            return None
        made = lightgbm.Dataset(
            self.static[train],
            self.data.is_ok[train].astype(float),
            feature_name=list(self.static_names),
            free_raw_data=False,
        )
        small = replace(params, leaves=15, min_rows=5)
        booster = lightgbm.train(small.lightgbm(objective="binary"), made, 60)
        text = booster.model_to_string()
        return from_lightgbm(text, self.static_names), text


def lightgbm_names(text: str) -> tuple[str, ...]:
    """The columns that a LightGBM model file was trained on."""
    line = next(t for t in text.splitlines() if t.startswith("feature_names="))
    return tuple(line.removeprefix("feature_names=").split())


def _none(mask: Mask | None, like: Mask) -> Mask:
    return mask if mask is not None else np.zeros_like(like)


def _objective(params: Params, target: Array, behind: Array) -> tuple[dict[str, Any], Array]:
    """LightGBM's settings and labels for an objective."""
    if params.objective == "lambdarank":
        # Grades 0 to 31: half a percent behind the best is the finest that counts.
        grade = np.clip(31 + np.round(behind * 16), 0, 31)
        gains = [2.0 ** (i / 2) for i in range(32)]
        return {
            "objective": "lambdarank",
            "label_gain": gains,
            "lambdarank_truncation_level": 10,
        }, (grade)
    if params.objective == "top_decile":
        return {"objective": "binary"}, (behind > np.log2(0.97)).astype(float)
    return {}, target
