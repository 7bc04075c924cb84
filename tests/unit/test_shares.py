"""Scores that start from nothing, from a share of an estimated time, or from all of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from resealing import copied, resealed
from synthetic import synthetic_kernels, synthetic_problems

from tilewise.core.arch import load_arch
from tilewise.core.compile_expr import log2
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model, load_model
from tilewise.engines.toolchain import why_no_compiler
from tilewise.errors import InputError, ModelError
from tilewise.learn.dataset import Dataset
from tilewise.learn.evaluate import model_scores
from tilewise.learn.fit import Trainer
from tilewise.learn.params import Params
from tilewise.ops.columns import pool_rows
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.explain import explain
from tilewise.selection.models import SHIPPED
from tilewise.selection.scorer import NumpyScorer, make_scorer
from tilewise.selection.selector import Selector

GFX950 = load_arch("gfx950")
needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason="no compiler")


def pool(count: int) -> list[Kernel]:
    return [
        *synthetic_kernels("gemm", GFX950, count),
        VendorKernel(op_name="gemm", library="torch"),
    ]


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_forest_learns_what_its_share_leaves_over(
    vendor_data: Dataset, share: float, calibrated: bool
) -> None:
    trainer, every = Trainer(vendor_data), np.ones(len(vendor_data), bool)
    params = Params(trees=150, patience=0, base=share, calibrated=calibrated)
    score = trainer.score(trainer.fit(every, params), every)
    error = trainer.centred(score + trainer.log_time, every, params.centre)
    assert np.abs(error).mean() < 0.1


def test_a_share_is_one() -> None:
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="use a share, 0 to 1"):
            Params(base=wrong)
    # Told as before it could be a part.
    assert Params().to_dict()["base"] is True and Params(base=0).to_dict()["base"] is False
    for share in (0.0, 0.5, 1.0):
        assert Params.from_dict(Params(base=share).to_dict()).share == share
    assert Params(objective="lambdarank").start == ""


def test_scores_are_the_forests_less_a_share_of_the_estimate(
    shared_model: Path, vendor_data: Dataset
) -> None:
    model = load_model(shared_model)
    assert (model.base, model.share) == ("analytic_us", 0.5)
    assert "calibrated_us" not in model.features.helpers
    problem, kernels = vendor_data.problems[0], pool(9)
    rows = pool_rows(model, kernels, GFX950, problem)
    times = model.features.evaluate(rows, ["analytic_us"])["analytic_us"]
    expected = model.predict("rank", rows) - 0.5 * log2(times)
    assert np.array_equal(model.scores(rows), expected)
    assert np.array_equal(NumpyScorer(model, kernels, GFX950)(problem).score, expected)
    # Times are told on the whole scale: the level is of the same scores.
    _, time_us = model_scores(model, vendor_data)
    assert abs(np.median(log2(time_us / vendor_data.time_us))) < 0.2


@needs_compiler
@pytest.mark.parametrize("count", [0, 1, 30, 150])
def test_c_and_numpy_agree_exactly(shared_model: Path, count: int) -> None:
    """Of the vendor's routine alone, too, whose estimate depends on nothing else."""
    model, kernels = load_model(shared_model), pool(count)
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    plain = NumpyScorer(model, kernels, GFX950)
    assert not compiled.can_lead
    for problem in synthetic_problems("gemm", "bf16", 20, seed=5):
        a, b = compiled(problem), plain(problem)
        assert np.array_equal(a.score, b.score) and np.array_equal(a.order, b.order)
        assert a.level == pytest.approx(b.level, abs=1e-12)


def test_a_choice_is_explained_by_the_share(shared_model: Path) -> None:
    selector = Selector(load_model(shared_model), pool(20), GFX950)
    report = explain(selector, synthetic_problems("gemm", "bf16", 1, seed=6)[0])
    assert "analytic_us" in {part["feature"] for part in report["moved_by"]}


def body_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(gzip.decompress((folder / "model.json.gz").read_bytes()))
    return found


def with_body(folder: Path, **changes: object) -> Path:
    body = {**body_of(folder), **changes}
    return resealed(folder, {"model.json.gz": gzip.compress(json.dumps(body).encode())})


def test_models_of_a_whole_estimate_are_written_as_before(
    small_model: Path, shared_model: Path
) -> None:
    """So that readers of schema 4 go on to read them, and refuse those that they would misread."""
    for folder, schema in ((small_model, 4), (shared_model, 5)):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["schema"] == body_of(folder)["schema"] == schema
    assert not {"base", "share"} & set(body_of(small_model))


def test_older_models_start_from_all_or_nothing(small_model: Path, tmp_path: Path) -> None:
    model = load_model(small_model)
    assert (model.base, model.share) == ("calibrated_us", 1.0)
    nothing = load_model(with_body(copied(small_model, tmp_path / "m"), has_base=False))
    assert (nothing.base, nothing.share) == ("", 0.0)
    problem = synthetic_problems("gemm", "bf16", 1, seed=7)[0]
    rows = pool_rows(model, pool(30), GFX950, problem)
    calibrated = model.features.evaluate(rows, ["calibrated_us"])["calibrated_us"]
    for read, start in ((model, log2(calibrated)), (nothing, 0.0)):
        assert np.array_equal(read.scores(rows), read.predict("rank", rows) - start)


def test_shipped_models_that_know_calibrated_times_start_from_all() -> None:
    shipped: dict[str, Model] = {f.name: load_model(f) for f in SHIPPED.iterdir() if f.is_dir()}
    for name in ("sm_90_gemm", "x86_avx512_gemm_fp32", "ck_tile_gfx950_conv_fwd_bf16"):
        assert (shipped[name].base, shipped[name].share) == ("calibrated_us", 1.0), name
    assert shipped["x86_avx512_conv_fwd_fp32"].base == ""


@pytest.mark.parametrize(
    "change", [{"share": 0}, {"share": 1.5}, {"share": "x"}, {"base": "roofline_us"}, {"base": []}]
)
def test_shares_of_nothing_sensible_are_refused(
    shared_model: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = with_body(copied(shared_model, tmp_path / "m"), **change)
    with pytest.raises(ModelError, match="is damaged"):
        load_model(folder)


def test_a_model_without_the_estimate_is_refused(shared_model: Path, tmp_path: Path) -> None:
    folder = with_body(copied(shared_model, tmp_path / "m"), base="calibrated_us")
    with pytest.raises(ModelError, match="does not define calibrated_us"):
        load_model(folder)
