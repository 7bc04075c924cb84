"""Warm starts: what an old model must have in common with new data to be continued."""

from __future__ import annotations

from pathlib import Path

from tilewise.core.features import FeatureSet
from tilewise.core.model import VENDOR, Model, forest_text, load_model
from tilewise.errors import ModelError
from tilewise.learn.fit import Start, Trainer
from tilewise.learn.forests import text_names
from tilewise.learn.lightgbm_text import checked_text
from tilewise.learn.params import Params
from tilewise.learn.split import saved_folds


def warm_names(folder: Path) -> tuple[str, ...]:
    """The features of the old ranking, which stay even where new data does not vary in them."""
    forests = [n for n in ("rank", VENDOR) if n in load_model(folder).forests]
    return tuple(dict.fromkeys(n for f in forests for n in text_names(_text(folder, f))))


def warm_start(folder: Path, trainer: Trainer, params: Params) -> Start:
    """What to continue from, after checking that it speaks of the same things."""
    old = load_model(folder)
    text = _text(folder, "rank")
    vendor = _text(folder, VENDOR) if VENDOR in old.forests else ""
    seen = frozenset(saved_folds(folder))
    found = [
        *_foreign(old, trainer, params),
        *schema_differences(
            (*text_names(text), *(text_names(vendor) if vendor else ())),
            (*trainer.names, *trainer.asked_names),
            old.features,
            trainer.features,
        ),
    ]
    if found:
        raise ModelError(f"{folder} cannot be continued: " + "; ".join(found))
    return Start(text, old.calibration, seen, old.name, vendor)


def _text(folder: Path, forest: str) -> str:
    """A forest's text, fit for LightGBM to read."""
    return checked_text(forest_text(folder, forest))


def _foreign(old: Model, trainer: Trainer, params: Params) -> list[str]:
    """What the old model is for or was grown by that differs."""
    data = trainer.data
    settings = old.manifest.get("params", {})
    objective = settings.get("objective", params.objective)
    has_own = settings.get("vendor_trees", 0) > 0
    pairs = (
        ("op", old.op, data.op),
        ("arch", old.arch, data.arch.name),
        ("dtypes", old.dtypes, data.dtypes),
        ("objective", objective, params.objective),
        ("base", (old.base, old.share), (params.start, params.share)),
        ("knowing calibrated times", settings.get("calibrated", True), params.calibrated),
        ("forest of the vendor's (vendor_trees)", has_own, params.vendor_trees > 0),
    )
    return [f"its {what} is {a}, here it is {b}" for what, a, b in pairs if a != b]


def schema_differences(
    before: tuple[str, ...], now: tuple[str, ...], old: FeatureSet, new: FeatureSet
) -> list[str]:
    """Every way in which the old features do not exist here with the same meaning."""
    changed = [
        n
        for n in (*old.features, *old.helpers)
        if n in new.expressions and old.expressions[n].source != new.expressions[n].source
    ]
    words = [f.name for f in old.fields if f.words and new.words.get(f.name, f.words) != f.words]
    found = {
        "features that are no longer there": [n for n in before if n not in now],
        "redefined": changed,
        "other words in": words,
    }
    return [
        f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
        for what, names in found.items()
        if names
    ]
