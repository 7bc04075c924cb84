"""Training: folds, determinism, quality on known rules, model folders, judging and search."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.core.arch import load_arch
from tilewise.core.forest import from_lightgbm
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.model import load_model
from tilewise.errors import InputError, ModelError, NoKernelError
from tilewise.learn.calibrate import calibrate, kernel_factors, total_us
from tilewise.learn.compare import compare, compare_evaluations
from tilewise.learn.dataset import Dataset, from_measurements
from tilewise.learn.evaluate import evaluate, leave_one_out
from tilewise.learn.fit import Params, Trainer
from tilewise.learn.objectives import compare_objectives
from tilewise.learn.score import judge, noise_ceiling, summary
from tilewise.learn.search import legal_kernels, model_score, search
from tilewise.learn.split import folds, held_out
from tilewise.learn.synthetic import synthetic
from tilewise.learn.train import check_schema, mined, save, train
from tilewise.ops.fields import kernel_values

QUICK = Params(trees=30, leaves=8)


def test_folds_hold_whole_problems_and_forget_the_order(small_data: Dataset) -> None:
    problems = [*small_data.problems, *small_data.problems[:5]]
    fold = folds(problems, 5, seed=3)
    assert fold[: len(small_data.problems)].max() == 4
    assert (fold[-5:] == fold[:5]).all()
    backwards = folds(problems[::-1], 5, seed=3)[::-1]
    assert (fold == backwards).all()
    assert (folds(problems, 5, seed=4) != fold).any()
    with pytest.raises(InputError, match="folds of"):
        folds(problems[:3], 5)


def test_the_third_split_is_apart(small_data: Dataset) -> None:
    among = np.arange(40)
    apart = held_out(small_data.problems, among)
    assert 0 < len(apart) < 12
    assert set(apart.tolist()) <= set(among.tolist())


def test_calibration_finds_known_factors(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    truth = 2.0 * trainer.terms[:, 0] + 0.5 * trainer.terms[:, 2]
    exact = replace_times(small_data, truth)
    calibration = calibrate(exact, trainer.terms, np.ones(len(exact), bool))
    found = total_us(trainer.terms, exact, kernel_factors(exact, calibration))
    assert np.allclose(found, truth, rtol=1e-6)


def replace_times(data: Dataset, times: Any) -> Dataset:
    return Dataset(
        data.op,
        data.arch,
        data.problems,
        data.kernels,
        data.labels,
        data.problem_index,
        data.kernel_index,
        times,
        data.spread_us,
        data.repeats,
        data.device,
    )


def test_training_beats_the_analytic_model_on_unseen_problems(small_trained: Any) -> None:
    metrics = small_trained.model.metrics
    assert metrics["efficiency"]["mean"] > 96
    assert metrics["efficiency"]["mean"] > metrics["analytic"]["mean"]
    assert metrics["time"]["r2"] > 0.9
    low, high = metrics["efficiency"]["mean_interval"]
    assert low < metrics["efficiency"]["mean"] < high


def test_equal_data_and_seed_give_equal_bytes(
    small_data: Dataset, small_trained: Any, small_model: Path, tmp_path: Path
) -> None:
    params = Params(trees=40, leaves=8, targets=("tflops", "latency", "bandwidth"))
    again = train(small_data, params, fold_count=3, name="small")
    save(again, small_data, tmp_path / "again")
    for file in sorted(small_model.iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_another_seed_gives_another_model(small_data: Dataset) -> None:
    everything = np.ones(len(small_data), bool)
    trainer = Trainer(small_data)
    a, b = (trainer.fit(everything, replace(QUICK, seed=s)) for s in (0, 1))
    assert a.text != b.text


def test_a_fit_never_reads_rows_outside_its_mask(small_data: Dataset) -> None:
    train_rows = folds(small_data.problems, 5)[small_data.problem_index] != 0
    spoiled = np.where(train_rows, small_data.time_us, small_data.time_us[::-1] * 7)
    a = Trainer(small_data).fit(train_rows, QUICK)
    b = Trainer(replace_times(small_data, spoiled)).fit(train_rows, QUICK)
    assert a.text == b.text
    assert a.calibration == b.calibration


def test_failures_become_a_validity_model(small_trained: Any, small_data: Dataset) -> None:
    assert "valid" in small_trained.model.forests
    assert small_trained.model.manifest["failed_rows"] == int((~small_data.is_ok).sum()) > 20


def test_hard_examples_are_weighted_up(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    everything = np.ones(len(small_data), bool)
    plain = mined(trainer, everything, QUICK)
    hard = mined(trainer, everything, replace(QUICK, hard_rounds=1))
    assert plain.text != hard.text


def test_warm_start_adds_trees(small_data: Dataset, small_model: Path) -> None:
    more = train(small_data, QUICK, fold_count=3, warm_start=small_model)
    before = load_model(small_model).forests["rank"].num_trees
    assert more.model.forests["rank"].num_trees > before
    assert more.model.manifest["warm_start_from"] == "small"


def test_warm_start_names_what_differs(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    with pytest.raises(ModelError, match=r"no longer there: made_up"):
        check_schema(("made_up",), trainer.names, trainer.features, trainer.features)


def test_objectives_are_compared_on_the_same_folds(small_data: Dataset) -> None:
    rows = compare_objectives(Trainer(small_data), QUICK, count=3)
    assert len(rows) == 4
    assert {row["problems"] for row in rows} == {len(small_data.problems)}
    assert rows[0]["mean"] >= rows[-1]["mean"]


def test_a_served_forest_equals_lightgbm(small_data: Dataset) -> None:
    import lightgbm

    trainer = Trainer(small_data)
    fitted = trainer.fit(np.ones(len(small_data), bool), QUICK)
    booster = lightgbm.Booster(model_str=fitted.text)
    times = total_us(trainer.terms, small_data, kernel_factors(small_data, fitted.calibration))
    matrix = trainer.matrix(times)[:, [trainer.names.index(n) for n in fitted.names]]
    used = [fitted.names.index(n) for n in fitted.forest.features]
    assert np.allclose(fitted.forest.predict(matrix[:, used]), booster.predict(matrix), atol=2e-7)


def test_a_forest_survives_json(small_trained: Any) -> None:
    forest = small_trained.model.forests["rank"]
    again = type(forest).from_dict(json.loads(json.dumps(forest.to_dict())))
    assert again.to_dict() == forest.to_dict()


def test_a_single_leaf_is_a_constant() -> None:
    text = "tree\n\nTree=0\nnum_leaves=1\nnum_cat=0\nleaf_value=0.25\n\n\nend of trees\n"
    forest = from_lightgbm(text, ["a"])
    assert forest.num_trees == 0
    assert forest.predict(np.zeros((2, 0))).tolist() == [0.25, 0.25]


# Model folders


def test_a_model_loads_without_lightgbm_or_dataframes(small_model: Path) -> None:
    code = (
        "import sys; from tilewise.core.model import load_model; "
        f"load_model({str(small_model)!r}); "
        "bad = {'lightgbm', 'sklearn', 'polars', 'pandas', 'pyarrow', 'torch'} & set(sys.modules); "
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_a_flipped_byte_is_refused(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    body = bytearray((folder / "model.json.gz").read_bytes())
    body[len(body) // 2] ^= 1
    (folder / "model.json.gz").write_bytes(body)
    with pytest.raises(ModelError, match=r"model\.json\.gz has sha256 .* the manifest says"):
        load_model(folder)


def test_a_newer_schema_is_refused(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    with pytest.raises(ModelError, match=r"schema 99; this version reads up to 1\. Update"):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [("[]", "foreign"), ("{}", "foreign"), ("nonsense", "not JSON"), (None, "no model")],
)
def test_what_is_no_model_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match=why):
        load_model(tmp_path)


def test_arrays_that_do_not_fit_are_refused(small_model: Path, tmp_path: Path) -> None:
    import hashlib

    folder = copied(small_model, tmp_path / "m")
    body = json.loads(gzip.decompress((folder / "model.json.gz").read_bytes()))
    body["forests"]["rank"]["left"][0] = 0  # a node that is its own child would never end
    packed = gzip.compress(json.dumps(body).encode())
    (folder / "model.json.gz").write_bytes(packed)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.json.gz"] = hashlib.sha256(packed).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="do not fit together"):
        load_model(folder)


# Judging


def test_efficiency_by_hand(small_data: Dataset) -> None:
    rows = small_data.problem_index < 2
    outcome = judge(small_data, np.where(small_data.is_ok, -small_data.time_us, -np.inf), rows)
    assert outcome.efficiency.tolist() == [1.0, 1.0]
    assert outcome.place.tolist() == [0, 0]
    assert outcome.ndcg == pytest.approx([1.0, 1.0])
    backwards = judge(small_data, np.where(small_data.is_ok, small_data.time_us, -np.inf), rows)
    for i in range(2):
        own = small_data.time_us[(small_data.problem_index == i) & small_data.is_ok]
        assert backwards.efficiency[i] == pytest.approx(own.min() / own.max())
    assert backwards.ndcg.max() < 1


def test_choosing_a_failure_scores_nothing() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=4, kernels=5)
    times = data.time_us.copy()
    times[data.kernel_index == 0] = np.nan
    spoiled = replace_times(data, times)
    outcome = judge(spoiled, (data.kernel_index == 0).astype(float))
    assert outcome.efficiency.tolist() == [0.0] * 4


def test_the_noise_ceiling_falls_with_noise() -> None:
    quiet = synthetic("gemm", arch=load_arch("gfx950"), problems=20, kernels=8, noise=0.001)
    loud = synthetic("gemm", arch=load_arch("gfx950"), problems=20, kernels=8, noise=0.3)
    a, b = noise_ceiling(quiet, draws=20), noise_ceiling(loud, draws=20)
    assert a is not None
    assert b is not None
    assert 100 >= a["mean"] > b["mean"]
    unknown = replace(quiet, spread_us=np.full(len(quiet), np.nan))
    assert noise_ceiling(unknown) is None


def test_trained_problems_are_judged_out_of_fold(small_data: Dataset, small_model: Path) -> None:
    seen = evaluate(small_model, small_data)
    assert seen.unseen == 0
    assert seen.out_of_fold == len(small_data.problems)
    expected = load_model(small_model).metrics["efficiency"]["mean"]
    report = seen.to_dict()
    assert report["efficiency"]["mean"] == pytest.approx(expected)
    assert len(report["worst"]) == 10
    assert "m" in report["slices"]
    fresh = synthetic("gemm", arch=load_arch("gfx950"), problems=12, kernels=20, seed=9)
    other = evaluate(small_model, fresh)
    assert other.unseen == 12


def test_leaving_one_family_out(small_data: Dataset) -> None:
    labels = tuple({"family": "even" if i % 2 else "odd"} for i in range(len(small_data.problems)))
    report = leave_one_out(replace(small_data, labels=labels), "family", QUICK)
    assert set(report) == {"all", "even", "odd"}
    with pytest.raises(InputError, match="nothing to leave out"):
        leave_one_out(small_data, "family", QUICK)


def test_comparison_follows_its_rules(small_data: Dataset, small_model: Path) -> None:
    same = compare(small_model, small_model, small_data)
    assert same["passed"]
    assert same["worse"] == 0
    good = evaluate(small_model, small_data)
    bad = replace(good, score=-good.score)
    verdict = compare_evaluations(good, bad)
    assert not verdict["passed"]
    assert verdict["fallen"]
    # A single problem that falls far is enough to fail, even where the averages hold.
    one = good.score.copy()
    one[small_data.problem_index == 0] *= -1
    verdict = compare_evaluations(good, replace(good, score=one))
    assert [c["passed"] for c in verdict["checks"]][-1] is False


def test_a_mix_of_ops_must_be_chosen_from(small_data: Dataset) -> None:
    setting = Setting(arch="gfx950", device="d", toolchain="t", policy=Policy())
    other = synthetic("conv_fwd", arch=load_arch("gfx950"), problems=2, kernels=2)
    rows = [
        Measurement.of(d.problems[0], d.kernels[0], setting, status="ok", time_us=3.0)
        for d in (small_data, other)
    ]
    with pytest.raises(InputError, match="mix op conv_fwd, gemm"):
        from_measurements(rows)
    assert len(from_measurements(rows, op="gemm")) == 1
    with pytest.raises(InputError, match="no measurements are left"):
        from_measurements(rows, op="conv_bwd_data")


# Search


def test_search_is_legal_deterministic_and_within_budget(small_model: Path) -> None:
    model, arch = load_model(small_model), load_arch("gfx950")
    data = synthetic("gemm", arch=arch, problems=1, kernels=400)
    problem = data.problems[0]
    space = legal_kernels(data.kernels, problem, arch)
    score = model_score(model, problem, space, arch)
    for strategy in ("random", "de"):
        first = search(space, score, strategy=strategy, budget=60, seed=5)
        assert first == search(space, score, strategy=strategy, budget=60, seed=5)
        assert len(first) == min(60, len(space))
        assert len({f.kernel for f in first}) == len(first)
        assert [f.score for f in first] == sorted((f.score for f in first), reverse=True)
        assert legal_kernels([f.kernel for f in first], problem, arch) == [f.kernel for f in first]
    with pytest.raises(InputError, match="strategy is 'annealing'"):
        search(space, score, strategy="annealing")
    with pytest.raises(InputError, match="budget is 0"):
        search(space, score, budget=0)
    with pytest.raises(NoKernelError):
        search([], score)


def test_evolution_beats_chance_on_recorded_times() -> None:
    arch = load_arch("gfx950")
    data = synthetic("gemm", arch=arch, problems=12, kernels=400, noise=0.0, seed=2)
    gains = []
    for p in range(len(data.problems)):
        own = np.flatnonzero(data.problem_index == p)
        speed = -data.time_us[own]
        for seed in range(4):
            found = {
                s: search(data.kernels, lambda i: speed[i], strategy=s, budget=60, seed=seed)[0]  # noqa: B023
                for s in ("de", "random")
            }
            gains.append(found["random"].score / found["de"].score)
    assert np.mean(gains) > 1.005


def test_summary_of_nothing() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=2, kernels=3)
    assert summary(judge(data, data.time_us, np.zeros(len(data), bool))) == {"problems": 0}


def test_parameters_that_cannot_be_served_are_refused() -> None:
    for wrong in ({"objective": "magic"}, {"leaves": 300}, {"targets": ("joy",)}):
        with pytest.raises(InputError):
            Params(**wrong)  # type: ignore[arg-type]


def test_every_kernel_has_a_tile(small_data: Dataset) -> None:
    assert all(kernel_values(k)["k_tile_m"] >= 1 for k in small_data.kernels)
