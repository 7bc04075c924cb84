"""A forest that speaks of the vendor's routine alone: learned apart, served beside the ranking."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_kernels, synthetic_problems

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, forest_text, load_model
from tilewise.engines.toolchain import why_no_compiler
from tilewise.errors import InputError, ModelError
from tilewise.learn.dataset import Dataset
from tilewise.learn.fit import Trainer
from tilewise.learn.lightgbm_text import checked_text
from tilewise.learn.params import Params
from tilewise.learn.train import save, train
from tilewise.ops.vendor import VendorKernel
from tilewise.selection import scorer as scorers
from tilewise.selection.explain import explain
from tilewise.selection.scorer import NumpyScorer, make_scorer
from tilewise.selection.selector import Selector

GFX950 = load_arch("gfx950")
PARAMS = Params(trees=30, leaves=8, vendor_trees=120)
LIBRARY = VendorKernel(op_name="gemm", library="torch")
needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason="no compiler")


def pool(count: int, at: int) -> list[Kernel]:
    """Kernels with the vendor's routine among them."""
    kernels = synthetic_kernels("gemm", GFX950, count - 1)
    return [*kernels[:at], LIBRARY, *kernels[at:]]


def test_scores_of_both_forests_compare(vendor_data: Dataset, vendor_model: Path) -> None:
    model = load_model(vendor_model)
    assert model.metrics["efficiency"]["mean"] > 95
    scorer = NumpyScorer(model, vendor_data.kernels, GFX950)
    right = []
    for problem in synthetic_problems("gemm", "bf16", 60, seed=77):
        chosen = vendor_data.kernels[int(scorer(problem).order[0])]
        right.append((chosen.engine == VENDOR) is (problem.gemm.n > 500))
    assert np.mean(right) > 0.9


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-mavx2", "-mfma")])
def test_every_instruction_set_gives_the_same(
    vendor_model: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags and not scorers._isa_flags():
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(scorers, "_isa_flags", lambda: flags)
    model, kernels = load_model(vendor_model), pool(70, 66)
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    plain = NumpyScorer(model, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 10, seed=12):
        assert np.array_equal(compiled(problem).score, plain(problem).score)


@needs_compiler
@pytest.mark.parametrize(("count", "at"), [(1, 0), (20, 3), (64, 63), (65, 64), (130, 70)])
def test_c_and_numpy_agree_exactly(vendor_model: Path, count: int, at: int) -> None:
    model, kernels = load_model(vendor_model), pool(count, at)
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    plain = NumpyScorer(model, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 20, seed=5):
        a, b = compiled(problem), plain(problem)
        assert np.array_equal(a.score, b.score)
        assert np.array_equal(a.order, b.order)
        assert a.level == pytest.approx(b.level, abs=1e-12)


def test_a_choice_of_the_vendor_is_explained(vendor_model: Path) -> None:
    selector = Selector(load_model(vendor_model), pool(20, 5))
    problems = synthetic_problems("gemm", "bf16", 40, seed=6)
    wide = next(p for p in problems if p.gemm.n > 1000)
    report = explain(selector, wide)
    assert report["kernel"] == LIBRARY.name
    # No other kernel is of its forest: what the two say is one ground, beside calibrated times.
    grounds = {part["feature"]: part for part in report["reasons"]}
    assert set(grounds) == {"kernel_engine", "calibrated_us"}
    assert (grounds["kernel_engine"]["chosen"], grounds["kernel_engine"]["others"]) == (
        *(VENDOR, "ck_tile"),
    )
    product = np.prod([1 + part["percent"] / 100 for part in grounds.values()])
    assert product == pytest.approx(1 + report["expected_gap"])


def test_a_choice_of_another_is_held_against_its_like(vendor_model: Path) -> None:
    selector = Selector(load_model(vendor_model), pool(20, 5))
    narrow = next(p for p in synthetic_problems("gemm", "bf16", 40, seed=6) if 8 < p.gemm.n < 200)
    report = explain(selector, narrow)
    assert report["kernel"] != LIBRARY.name
    assert "kernel_engine" not in {part["feature"] for part in report["moved_by"]}


def test_it_is_learned_only_where_others_were_measured(vendor_data: Dataset) -> None:
    engines = np.array([k.engine for k in vendor_data.kernels])
    alone = vendor_data.keep((engines == VENDOR)[vendor_data.kernel_index])
    fitted = Trainer(alone).fit(np.ones(len(alone), bool), PARAMS)
    assert fitted.vendor is None


@pytest.mark.parametrize("objective", ["lambdarank", "top_decile"])
def test_only_regressions_have_one(objective: str) -> None:
    with pytest.raises(InputError, match="use objective=regression"):
        Params(objective=objective, vendor_trees=10)


def test_a_warm_start_continues_both(vendor_data: Dataset, tmp_path: Path) -> None:
    kept = vendor_data.keep(vendor_data.problem_index < 90)
    before = replace(kept, problems=kept.problems[:90], labels=kept.labels[:90])
    save(train(before, PARAMS, fold_count=3), before, tmp_path)
    more = train(vendor_data, PARAMS, fold_count=3, continue_from=tmp_path)
    old = load_model(tmp_path).forests
    for name in ("rank", VENDOR):
        assert more.model.forests[name].num_trees > old[name].num_trees
    # Where the new measurements have none of the vendor's, its forest stays as it was.
    others = np.array([k.engine != VENDOR for k in vendor_data.kernels])
    kept = vendor_data.keep(others[vendor_data.kernel_index])
    again = train(kept, PARAMS, fold_count=3, continue_from=tmp_path)
    assert again.texts[VENDOR] == checked_text(forest_text(tmp_path, VENDOR))
    with pytest.raises(ModelError, match=r"vendor_trees\) is True, here it is False"):
        train(vendor_data, replace(PARAMS, vendor_trees=0), continue_from=tmp_path)
