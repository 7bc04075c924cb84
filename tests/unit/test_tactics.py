"""What the vendor's library says it would do: kept with measurements, learned from, asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_kernels, synthetic_problems

from tilewise.core.arch import load_arch
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.model import VENDOR, Model, forest_text, load_model
from tilewise.core.problem import Problem
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import why_no_compiler
from tilewise.errors import InputError
from tilewise.learn.dataset import Dataset, from_measurements
from tilewise.learn.fit import Trainer
from tilewise.learn.lightgbm_text import checked_text
from tilewise.learn.params import Params
from tilewise.learn.train import save, train
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.gemm.tactics import tiles
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.explain import explain
from tilewise.selection.predictor import Predictor
from tilewise.selection.scorer import NumpyScorer, make_scorer
from tilewise.selection.selector import Selector

GFX950 = load_arch("gfx950")
PARAMS = Params(trees=30, leaves=8, vendor_trees=120)
LIBRARY = VendorKernel(op_name="gemm", library="torch")
Told = Callable[[Problem], dict[str, float]]


@pytest.fixture(scope="module")
def model(told_model: Path) -> Model:
    return load_model(told_model)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, told: Told) -> Iterator[list[Problem]]:
    """A library at hand, and what it was asked."""
    asked: list[Problem] = []

    def answer(problem: Problem, arch: object) -> dict[str, float]:
        asked.append(problem)
        return told(problem)

    monkeypatch.setattr(get_engine("vendor"), "tactic", answer)
    yield asked


def test_tiles_have_the_numbers_of_the_header() -> None:
    known = {1: (8, 8), 10: (64, 8), 24: (256, 128), 35: (256, 32), 36: (8, 128), 248: (320, 128)}
    known |= {311: (768, 64), 312: (64, 16), 393: (128, 8), 513: (256, 256), 630: (768, 80)}
    known |= {634: (512, 1024), 645: (256, 1)}
    found = tiles()
    assert len(found) == 645
    assert {number: found[number] for number in known} == known


def test_nobody_is_asked_about_another_device() -> None:
    problem = GemmProblem(m=64, n=64, k=64, dtype="bf16")
    for arch in (GFX950, load_arch("sm_90"), detect("cpu")):
        assert get_engine("vendor").tactic(problem, arch) == {}


def test_only_the_vendors_forest_knows_of_it(model: Model) -> None:
    forests = model.forests
    assert any(n.startswith("tactic_") for n in forests[VENDOR].features)
    for name, forest in forests.items():
        if name != VENDOR:
            assert not any(n.startswith("tactic_") for n in forest.features), name


def test_it_is_learned_from(model: Model) -> None:
    metrics = model.metrics
    assert metrics["efficiency"]["mean"] > 95
    assert metrics["untold"]["mean"] < metrics["efficiency"]["mean"] - 5


def test_data_without_it_gives_what_it_gave(vendor_data: Dataset) -> None:
    trainer = Trainer(vendor_data)
    assert trainer.asked_names == ()
    every = np.ones(len(vendor_data), bool)
    fitted = trainer.fit(every, PARAMS)
    assert fitted.vendor is not None
    assert set(fitted.vendor.features) <= set(trainer.names)
    told, untold = (trainer.score(fitted, every, is_told=told) for told in (True, False))
    assert np.array_equal(told, untold)


@pytest.mark.parametrize("is_told", [True, False])
def test_some_rows_score_as_they_do_among_all(told_data: Dataset, is_told: bool) -> None:
    trainer, every = Trainer(told_data), np.ones(len(told_data), bool)
    fitted = trainer.fit(every, PARAMS)
    score = trainer.score(fitted, every, is_told=is_told)
    for some in (np.arange(len(every)) % 3 == 1, trainer.is_vendor, ~every):
        assert np.array_equal(trainer.score(fitted, some, is_told=is_told), score[some])


def test_its_identity_is_the_datas(told_data: Dataset) -> None:
    assert replace(told_data, tactics={}).digest != told_data.digest


@pytest.mark.skipif(bool(why_no_compiler()), reason="no compiler")
def test_c_and_numpy_are_told_the_same(model: Model, library: list[Problem]) -> None:
    kernels = [*synthetic_kernels("gemm", GFX950, 70), LIBRARY]
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    plain = NumpyScorer(model, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 12, seed=4):
        assert np.array_equal(compiled(problem).score, plain(problem).score)
    assert len(library) >= 24


def test_choices_follow_what_the_library_says(
    model: Model, library: list[Problem], told: Told
) -> None:
    selector = Selector(model, [*synthetic_kernels("gemm", GFX950, 12), LIBRARY], GFX950)
    right = []
    for problem in synthetic_problems("gemm", "bf16", 40, seed=9):
        is_vendor = selector.ranking(problem)[0].engine == VENDOR
        right.append(is_vendor is (told(problem)["tile_m"] > 64))
        report = explain(selector, problem)
        assert (report["kernel"] == LIBRARY.name) is is_vendor
        times = Predictor(model, GFX950).predict_latency(problem, selector.kernels)
        assert (int(np.argmin(times)) == len(times) - 1) is is_vendor
    assert np.mean(right) > 0.9


def test_a_pool_without_the_library_asks_nothing(model: Model, library: list[Problem]) -> None:
    selector = Selector(model, synthetic_kernels("gemm", GFX950, 12), GFX950)
    selector.ranking(GemmProblem(m=64, n=512, k=256, dtype="bf16"))
    assert not library


def test_a_model_that_never_heard_of_it_asks_nothing(
    vendor_model: Path, library: list[Problem]
) -> None:
    selector = Selector(load_model(vendor_model), [LIBRARY], GFX950)
    selector.ranking(GemmProblem(m=64, n=512, k=256, dtype="bf16"))
    assert not library


def test_a_warm_start_keeps_its_columns(told_data: Dataset, tmp_path: Path) -> None:
    kept = told_data.keep(told_data.problem_index < 90)
    cut = {name: getattr(kept, name)[:90] for name in ("problems", "labels")}
    before = replace(kept, **cut)
    save(train(before, PARAMS, fold_count=3), before, tmp_path)
    silent = replace(told_data, tactics={p.key: told_data.tactics[p.key] for p in before.problems})
    more = train(silent, PARAMS, fold_count=3, continue_from=tmp_path)
    old = load_model(tmp_path).forests[VENDOR]
    assert set(old.features) <= set(more.model.features.features)
    assert more.model.forests[VENDOR].num_trees > old.num_trees


def test_a_warm_start_without_the_vendors_rows_keeps_its_forest(
    told_data: Dataset, told_model: Path
) -> None:
    own = np.array([k.engine != VENDOR for k in told_data.kernels])
    fresh = [replace(p, m=p.m + 3) for p in told_data.problems]  # type: ignore[type-var]
    others = replace(told_data.keep(own[told_data.kernel_index]), problems=tuple(fresh), tactics={})
    again = train(others, PARAMS, fold_count=3, continue_from=told_model)
    assert again.texts[VENDOR] == checked_text(forest_text(told_model, VENDOR))


def test_measurements_carry_it(tmp_path: Path) -> None:
    problem = GemmProblem(m=64, n=64, k=64, dtype="bf16")
    setting = Setting(arch="gfx950", device="some", toolchain="t", policy=Policy())
    own = synthetic_kernels("gemm", GFX950, 1)[0]
    rows = [
        Measurement.of(
            problem, LIBRARY, setting, status="ok", time_us=9.0, tactic='{"tile_m": 64}'
        ),
        Measurement.of(problem, own, setting, status="ok", time_us=7.0),
    ]
    data = from_measurements(rows, op="gemm")
    assert data.tactics == {problem.key: {"tile_m": 64}}
    features = get_op("gemm").features
    found = features.evaluate(data.rows(features), ["v_tile_m", "tactic_tile_m"])
    assert found["v_tile_m"].tolist() == [64.0, 64.0]
    assert found["tactic_tile_m"].tolist() == [0.0, 0.0]  # no algorithm: the library said nothing


@pytest.mark.parametrize(
    ("problem", "lines_a", "lines_b"),
    [
        (GemmProblem(m=1024, n=4096, k=3200, dtype="fp16"), 1.0, 1.0),  # rcr: both lie along k
        (GemmProblem(m=1024, n=4096, k=3232, dtype="fp16"), 1.5, 1.5),
        (GemmProblem(m=1024, n=4096, k=3224, dtype="fp16"), 1.875, 1.875),
        (GemmProblem(m=1024, n=4096, k=3232, dtype="fp8"), 1.75, 1.75),
        (GemmProblem(m=1024, n=4112, k=3200, dtype="fp16", layout="rrr"), 1.0, 1.75),
        (GemmProblem(m=1032, n=4096, k=3200, dtype="fp16", layout="crr"), 1.875, 1.0),
    ],
)
def test_rows_off_cache_lines_are_read_twice(
    problem: GemmProblem, lines_a: float, lines_b: float, told: Told
) -> None:
    setting = Setting(arch="gfx950", device="some", toolchain="t", policy=Policy())
    tile = {"tile_m": 128.0, "tile_n": 64.0, "cluster_m": 2.0, "cluster_n": 4.0}
    features = get_op("gemm").features
    found = []
    for said in (told(problem) | tile, told(problem) | tile | {"algorithm": 0.0}):
        row = Measurement.of(
            problem, LIBRARY, setting, status="ok", time_us=9.0, tactic=json.dumps(said)
        )
        rows = from_measurements([row], op="gemm").rows(features)
        found += features.evaluate(rows, ["tactic_lines"])["tactic_lines"].tolist()
    # Clusters share tiles of A along n and of B along m.
    read = lines_a * 128 / 4 + lines_b * 64 / 2
    assert found == [read * (1 if problem.dtype == "fp8" else 2) / (128 * 64), 0.0]


@pytest.mark.parametrize("said", ["tile", "[64]", '{"tile_m": "wide"}', "64"])
def test_a_damaged_one_is_told_in_a_line(said: str) -> None:
    problem = GemmProblem(m=64, n=64, k=64, dtype="bf16")
    setting = Setting(arch="gfx950", device="some", toolchain="t", policy=Policy())
    row = Measurement.of(problem, LIBRARY, setting, status="ok", time_us=9.0, tactic=said)
    with pytest.raises(InputError, match="must be a JSON object of numbers, or empty") as caught:
        from_measurements([row], op="gemm")
    assert "\n" not in str(caught.value)


def test_where_tactics_do_not_vary_nothing_is_untold(told_data: Dataset) -> None:
    same = next(iter(told_data.tactics.values())) | {"algorithm": 0.0}
    flat = replace(told_data, tactics=dict.fromkeys(told_data.tactics, same))
    metrics = train(flat, PARAMS, fold_count=3).model.metrics
    assert metrics["untold"] == metrics["efficiency"]
