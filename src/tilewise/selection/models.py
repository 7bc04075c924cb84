"""Finds models: those in TILEWISE_MODEL_DIR first, then the shipped ones."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from tilewise.core.arch import Arch
from tilewise.core.model import Model
from tilewise.core.sealed import MANIFEST, SealedFolder
from tilewise.errors import ModelError, printable
from tilewise.selection.opening import open_model
from tilewise.selection.ranker import CarefulRanker, ModelRanker
from tilewise.settings import settings

log = logging.getLogger("tilewise")
SHIPPED = Path(__file__).parent.parent / "models"


def model_folders() -> list[Path]:
    """Every folder with a manifest, a user's own before the shipped."""
    places = [p for p in (settings().model_dir, SHIPPED) if p is not None]
    found: list[Path] = []
    for place in places:
        try:
            if (place / MANIFEST).is_file():
                found.append(place)
            elif place.is_dir():
                found += sorted(p.parent for p in place.glob(f"*/{MANIFEST}"))
            else:
                _tell_missing(place)
        except (OSError, ValueError):  # names too long, of null bytes, in folders that are closed
            _tell_missing(place)
    return found


def _name(place: Path) -> str:
    return printable(str(place))


@cache
def _tell_missing(place: Path) -> None:
    log.warning("%s, where models should be, is no folder; the shipped ones choose", _name(place))


@cache
def _stamp(folder: Path) -> tuple[str, str, tuple[str, ...]] | None:
    try:
        manifest = SealedFolder(folder).manifest
        return manifest["op"], manifest["arch"], tuple(manifest["dtypes"])
    except (ModelError, KeyError) as error:
        log.warning("the model in %s is left out: %s", _name(folder), error)
        return None


def find_models(op: str, arch: Arch, dtype: str = "") -> list[Path]:
    """Folders of models for an op on an architecture."""
    return [
        folder
        for folder in model_folders()
        if (stamp := _stamp(folder)) is not None
        and stamp[:2] == (op, arch.name)
        and (not dtype or dtype in stamp[2])
    ]


@cache
def _load(folder: Path) -> Model | None:
    try:
        return open_model(folder)
    except ModelError as error:
        # A missing or broken model costs quality, never the call: one warning, then the others.
        log.warning("%s; it is left out of selection", error)
        return None


def load_models(op: str, arch: Arch) -> list[Model]:
    """The models for an op on an architecture that can be read; each read once."""
    found = (_load(folder) for folder in find_models(op, arch))
    return [model for model in found if model is not None]


def model_rankers(op: str, arch: Arch) -> list[CarefulRanker]:
    """Rankers for a dispatcher, one per model that fits; none where there is no model."""
    return [CarefulRanker(ModelRanker(model)) for model in load_models(op, arch)]
