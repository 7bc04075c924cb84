"""Published measurements and shipped models belong together."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise.data.check import check
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


STORES = sorted({shard.parent for shard in (ROOT / "datasets").glob("*/*/*.parquet")})
MINUTES = ("h200/gemm", "h200/gemm_top", "emerald/gemm", "emerald/gemm_top")
"""Stores of a million rows, which are checked when something is published."""


@pytest.mark.parametrize(
    "store",
    [s for s in STORES if not str(s).endswith(MINUTES)],
    ids=lambda s: "/".join(s.parts[-2:]),
)
def test_nothing_is_wrong_with_what_is_published(store: Path) -> None:
    assert check(store).findings == []


TABLES = {
    "## Convolution on an H200": {
        "forward": "sm_90_conv_fwd",
        "backward-data": "sm_90_conv_bwd_data",
        "backward-weight": "sm_90_conv_bwd_weight",
    },
    "## CPU models": {
        "GEMM": "x86_avx512_gemm_fp32",
        "convolution forward": "x86_avx512_conv_fwd_fp32",
        "convolution backward-data": "x86_avx512_conv_bwd_data_fp32",
        "convolution backward-weight": "x86_avx512_conv_bwd_weight_fp32",
    },
}
"""Sections of benchmarks/RESULTS.md, and the models whose choices they judge."""


@pytest.mark.parametrize("section", TABLES)
def test_the_figures_of_models_are_those_of_the_shipped_ones(section: str) -> None:
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text().partition(f"\n{section}")[2]
    table = text.partition("\n| op | problems | mean |")[2].partition("\n\n")[0]
    rows = {
        cells[1].strip(): cells[2:] for line in table.splitlines() if (cells := line.split("|"))
    }
    for op, name in TABLES[section].items():
        found = json.loads((SHIPPED / name / "metrics.json").read_text())
        own = (found["efficiency"][key] for key in ("problems", "mean", "median", "p10", "min"))
        others = (found[by][key] for by in ("noise_ceiling", "analytic") for key in ("mean", "p10"))
        shown = re.findall(r"[\d.]+", " ".join(rows[op]).replace(",", ""))
        for text, figure in zip(shown, (*own, *others), strict=True):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - figure) <= 0.501 * 10**-digits, (op, text, figure)


def test_a_clone_is_lean() -> None:
    """Measurements and models that a clone brings along; the GPU's machine and users carry them."""
    files = [
        p for folder in ("datasets", "src/tilewise/models") for p in (ROOT / folder).rglob("*")
    ]
    unshipped = (".txt.gz", "oof.parquet", "folds.json")  # what `make models` may have left here
    sizes = [p.stat().st_size for p in files if p.is_file() and not p.name.endswith(unshipped)]
    assert sum(sizes) < 34e6
