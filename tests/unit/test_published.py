"""Published measurements and shipped models belong together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise.selection.models import SHIPPED

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import train_models  # noqa: E402  # a script, found where it stands

SLOW = {"sm_90_gemm"}
"""A minute for a million readings."""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=[pytest.mark.slow] * (recipe.name in SLOW))
        for recipe in train_models.RECIPES
    ],
)
def test_models_were_trained_on_what_is_published(recipe: Any) -> None:
    """The same problems, kernels and times in the same order: training gives the same bytes."""
    data = train_models.measurements(recipe)
    manifest = json.loads((SHIPPED / recipe.name / "manifest.json").read_text())
    assert data.digest == manifest["data_sha256"]
    assert len(data) == manifest["rows"]


def test_a_clone_is_lean() -> None:
    """Measurements and models that a clone brings along; the GPU's machine and users carry them."""
    files = [
        p for folder in ("datasets", "src/tilewise/models") for p in (ROOT / folder).rglob("*")
    ]
    unshipped = (".txt.gz", "oof.parquet", "folds.json")  # what `make models` may have left here
    sizes = [p.stat().st_size for p in files if p.is_file() and not p.name.endswith(unshipped)]
    assert sum(sizes) < 34e6
