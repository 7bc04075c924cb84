"""How forests are grown: every setting, its default and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tilewise.core.model import ANALYTIC, CALIBRATED
from tilewise.errors import InputError

OBJECTIVES = ("regression", "lambdarank", "top_decile")
TARGETS = ("tflops", "latency", "bandwidth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """How forests are grown. `trees` is the most; fewer where the third split says so."""

    objective: str = "regression"
    base: float = 1.0
    """The share of the estimated time that scores start from, in octaves: 1 regresses what the
    calibrated analytic model leaves over, 0 everything."""
    calibrated: bool = True
    """Calibrate the analytic model, tell forests its time and start from that, else from the
    analytic model as it is. Of few problems it says little, and takes most of the time to find."""
    trees: int = 200
    leaves: int = 16
    learning_rate: float = 0.09
    vendor_trees: int = 0
    """Trees of a forest that speaks of the vendor's routine alone; with 0 the ranking does. A
    vendor's library chooses among kernels of its own, so its times follow other rules."""
    min_rows: int = 20
    row_share: float = 0.8
    column_share: float = 0.5
    l2: float = 5.0
    max_bin: int = 127
    max_features: int = 64
    """The most features a ranking may use, those with the largest gains; 0 stands for all."""
    focus: float = 2.0
    """How much more the fast kernels of a problem count than the slow ones."""
    centre: float = 4.0
    """How much more the fast kernels of a problem count when its level is taken out of its times.
    The slow ones differ from problem to problem, and are missing where few were measured."""
    balance: float = 0.0
    """How far rare families of kernels count as much as common ones: 0 not at all, 1 wholly."""
    hard_rounds: int = 0
    """How often problems that were chosen badly for are weighted up and learned again."""
    patience: int = 50
    """Trees in a row that may bring the third split nothing; 0 grows all of them unasked."""
    targets: tuple[str, ...] = ()
    """Absolute quantities to learn beside the ranking."""
    draws: int = 1
    """Forests whose mean ranks, each grown with other draws of rows and columns: between kernels
    that are almost equally fast, the errors of one are mostly chance."""
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.objective not in OBJECTIVES:
            raise InputError(f"objective is {self.objective!r}; use {', '.join(OBJECTIVES)}")
        for target in self.targets:
            if target not in TARGETS:
                raise InputError(f"target {target!r} is unknown; use {', '.join(TARGETS)}")
        if self.vendor_trees and self.objective != "regression":
            raise InputError(
                f"vendor_trees is {self.vendor_trees} and objective {self.objective}; only the "
                "scores of regressions compare between forests; use objective=regression, or "
                "vendor_trees=0"
            )
        for name, most in (("draws", 64), ("threads", 256)):
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"{name} is {getattr(self, name)}; use 1 to {most}")
        if not 0 <= self.base <= 1:
            raise InputError(f"base is {self.base}; use a share, 0 to 1")
        if self.draws > 1 and self.row_share == self.column_share == 1:
            raise InputError(
                f"draws is {self.draws}, but row_share and column_share are 1: every draw would be "
                "the same; use draws=1, or a smaller share"
            )
        if not 2 <= self.leaves <= 255 or not 1 <= self.max_bin <= 255:
            raise InputError("leaves must be 2 to 255 and max_bin 1 to 255, to be served as bytes")

    @property
    def share(self) -> float:
        """The share of an estimate that scores start from; only a regression can."""
        return self.base if self.objective == "regression" else 0.0

    @property
    def start(self) -> str:
        """The estimate that scores start from; empty for none."""
        return (CALIBRATED if self.calibrated else ANALYTIC) if self.share else ""

    def light(self, trees: int) -> Params:
        """The same with no more than so many trees, all of them grown once."""
        fewer = {n: min(getattr(self, n), trees) for n in ("trees", "vendor_trees")}
        return replace(self, patience=0, hard_rounds=0, draws=1, **fewer)

    def to_dict(self) -> dict[str, Any]:
        found = {**asdict(self), "targets": list(self.targets)}
        if self.calibrated:
            del found["calibrated"]  # models from before it was a setting say the same
        if self.base in (0, 1):
            found["base"] = bool(self.base)  # as when it was one or the other
        return found

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
