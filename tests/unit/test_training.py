"""Training: folds, determinism, quality on known rules, model folders, judging and search."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import synthetic

from tilewise.core.arch import load_arch
from tilewise.core.features import FeatureSet
from tilewise.core.forest import from_lightgbm
from tilewise.core.model import forest_text, load_model
from tilewise.core.packed import Numbers
from tilewise.errors import InputError, ModelError, NoKernelError
from tilewise.learn.calibrate import calibrate, kernel_factors, total_us
from tilewise.learn.cross import cross_validate, hard_weight, mined
from tilewise.learn.dataset import Dataset
from tilewise.learn.evaluate import evaluate
from tilewise.learn.fit import Trainer
from tilewise.learn.forests import Lesson, labels
from tilewise.learn.objectives import SPACE, compare_objectives, tune
from tilewise.learn.params import Params
from tilewise.learn.score import judge
from tilewise.learn.search import legal_kernels, model_score, search
from tilewise.learn.split import folds
from tilewise.learn.train import save, train
from tilewise.learn.warm import schema_differences, warm_start
from tilewise.ops.fields import kernel_values

QUICK = Params(trees=30, leaves=8)


def test_levels_follow_the_fast_kernels(small_data: Dataset) -> None:
    """What is measured of a problem beside its fast kernels hardly moves its centre."""
    trainer = Trainer(small_data)
    near = small_data.is_ok & (trainer.behind_best(small_data.is_ok) > -1)
    moved = [
        abs(
            trainer.centres(trainer.log_time, small_data.is_ok, centre)
            - trainer.centres(trainer.log_time, near, centre)
        ).mean()
        for centre in (0.0, 4.0)
    ]
    assert moved[1] < 0.3 * moved[0]


def test_calibration_finds_known_factors(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    truth = 2.0 * trainer.terms[:, 0] + 0.5 * trainer.terms[:, 2]
    exact = replace(small_data, time_us=truth)
    calibration = calibrate(exact, trainer.terms, np.ones(len(exact), bool))
    found = total_us(trainer.terms, exact, kernel_factors(exact, calibration))
    assert np.allclose(found, truth, rtol=1e-6)


def test_problems_measured_as_a_whole_count_as_much_as_all_others(small_data: Dataset) -> None:
    """Where only promising kernels were measured, they were faster than they are elsewhere."""
    trainer = Trainer(small_data)
    terms, is_part = trainer.terms, np.arange(len(small_data.problems)) % 5 > 0
    truth = 2.0 * terms[:, 0] + 0.5 * terms[:, 2]
    draw = np.random.default_rng(0).uniform(0.6, 1.05, len(truth))
    times = np.where(is_part[small_data.problem_index], truth * draw, truth)
    marks = tuple({"top": 8} if part else {} for part in is_part)
    off = []
    for given in (small_data.labels, marks):
        data = replace(small_data, time_us=times, labels=given)
        calibration = calibrate(data, terms, np.ones(len(data), bool))
        off.append(np.abs(total_us(terms, data, kernel_factors(data, calibration)) / truth - 1))
    assert off[1].mean() < 0.7 * off[0].mean()


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
    b = Trainer(replace(small_data, time_us=spoiled)).fit(train_rows, QUICK)
    assert a.text == b.text
    assert a.calibration == b.calibration


def test_failures_become_a_validity_model(small_trained: Any, small_data: Dataset) -> None:
    assert "valid" in small_trained.model.forests
    assert small_trained.model.manifest["failed_rows"] == int((~small_data.is_ok).sum()) > 20


def test_hard_problems_are_weighted_up(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    everything = np.ones(len(small_data), bool)
    fold = folds(small_data.problems, 4, seed=QUICK.seed + 7)
    score = cross_validate(trainer, replace(QUICK, patience=0), fold=fold).score
    outcome = judge(small_data, score)
    weight = hard_weight(trainer, everything, QUICK)
    loss = 1 - outcome.efficiency
    assert (weight[outcome.problems][loss == 0] == 1).all()
    assert weight[outcome.problems[np.argmax(loss)]] == weight.max() > 1.5


def test_mining_brings_rare_problems_nearer(small_data: Dataset) -> None:
    # Few long products like other kernels best; a small forest has no leaves to spare for them.
    rare = np.array([p.gemm.k > 3000 for p in small_data.problems])
    assert 2 <= rare.sum() <= 8
    behind = Trainer(small_data).behind_best(small_data.is_ok)
    usual = np.bincount(small_data.kernel_index, behind)
    odd = usual >= np.median(usual)
    turned = rare[small_data.problem_index] & odd[small_data.kernel_index]
    data = replace(small_data, time_us=small_data.time_us * np.where(turned, 4.0, 1.0))
    trainer, everything = Trainer(data), np.ones(len(data), bool)
    params = Params(trees=12, leaves=4, base=0, patience=0)
    truth = trainer.centred(-trainer.log_time, data.is_ok)
    own = rare[data.problem_index] & data.is_ok
    misses = []
    for rounds in (0, 2):
        fitted = mined(trainer, everything, replace(params, hard_rounds=rounds))
        error = trainer.centred(trainer.score(fitted, everything), data.is_ok) - truth
        misses.append(np.mean(error[own] ** 2))
    assert misses[1] < 0.8 * misses[0]


def test_mining_reads_training_rows_alone(small_data: Dataset) -> None:
    train_rows = folds(small_data.problems, 5)[small_data.problem_index] != 0
    spoiled = np.where(train_rows, small_data.time_us, small_data.time_us[::-1] * 7)
    a = hard_weight(Trainer(small_data), train_rows, QUICK)
    b = hard_weight(Trainer(replace(small_data, time_us=spoiled)), train_rows, QUICK)
    assert (a == b).all()


def test_noise_stops_the_growth_early() -> None:
    arch = load_arch("gfx950")
    loud = synthetic("gemm", arch=arch, problems=40, kernels=12, noise=0.5, seed=3)
    everything = np.ones(len(loud), bool)
    params = Params(trees=120, leaves=16, patience=10, base=0)
    stopped = Trainer(loud).fit(everything, params)
    assert stopped.rounds < 120
    assert stopped.forest.num_trees == stopped.rounds
    assert len(stopped.apart) == round(0.15 * 40)
    unasked = Trainer(loud).fit(everything, replace(params, patience=0))
    assert unasked.rounds == 120
    assert len(unasked.apart) == 0


def test_what_is_scored_never_decides_when_to_stop(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    fold = folds(small_data.problems, 5)
    for number in range(5):
        train_rows = (fold != number)[small_data.problem_index]
        fitted = trainer.fit(train_rows, replace(QUICK, patience=5))
        assert len(fitted.apart) > 0
        assert not set(fitted.apart.tolist()) & set(np.flatnonzero(fold == number).tolist())


def first_problems(data: Dataset, count: int) -> Dataset:
    """The rows of the first problems, without the others."""
    kept = data.keep(data.problem_index < count)
    return replace(kept, problems=data.problems[:count], labels=data.labels[:count])


def test_a_warm_start_learns_on_and_is_judged_on_new_problems_alone(
    small_data: Dataset, tmp_path: Path
) -> None:
    old_data = first_problems(small_data, 30)
    save(train(old_data, QUICK, fold_count=3, name="old"), old_data, tmp_path / "old")
    old = load_model(tmp_path / "old")
    more = train(small_data, QUICK, fold_count=3, continue_from=tmp_path / "old")
    text = forest_text(tmp_path / "old", "rank")
    assert (
        more.texts["rank"].split("Tree=1\n")[0].split("Tree=0\n")[1]
        == (text.split("Tree=1\n")[0].split("Tree=0\n")[1])
    )
    assert more.model.forests["rank"].num_trees > old.forests["rank"].num_trees
    assert more.model.manifest["warm_start_from"] == "old"
    # The old trees speak of what the old factors left over.
    for name, factors in old.calibration.kernels.items():
        assert more.model.calibration.kernels[name] == factors
    # Problems that the old model learned from are not scored, neither here nor later.
    assert (more.cross.fold[:30] == -1).all()
    assert (more.cross.fold[30:] >= 0).all()
    assert more.model.metrics["efficiency"]["problems"] == 20
    save(more, small_data, tmp_path / "new")
    judged = evaluate(tmp_path / "new", small_data)
    assert (judged.out_of_fold, judged.unseen, judged.skipped) == (20, 0, 30)


def test_cross_validation_starts_from_the_old_trees(small_data: Dataset, tmp_path: Path) -> None:
    old_data = first_problems(small_data, 30)
    save(train(old_data, QUICK, fold_count=3), old_data, tmp_path / "old")
    one = replace(QUICK, trees=1, patience=0)
    warm = train(small_data, one, fold_count=3, continue_from=tmp_path / "old")
    cold = train(small_data, one, fold_count=3)
    fresh = cold.cross.fold[small_data.problem_index] >= 0
    fresh &= small_data.problem_index >= 30
    # One more tree on top of thirty is worth more than one tree.
    means = [judge(small_data, t.cross.score, fresh).efficiency.mean() for t in (warm, cold)]
    assert means[0] > means[1]


def test_a_warm_start_needs_something_new(small_data: Dataset, small_model: Path) -> None:
    with pytest.raises(InputError, match=r"problems that small never saw, and the data has 0"):
        train(small_data, QUICK, fold_count=3, continue_from=small_model)


def test_a_warm_start_names_what_differs(small_data: Dataset, small_model: Path) -> None:
    trainer = Trainer(small_data)
    old = load_model(small_model)
    now = trainer.features
    assert schema_differences(("made_up",), trainer.names, old.features, now) == [
        "features that are no longer there: made_up"
    ]
    tm = next(n for n in old.features.helpers if n == "tm")
    changed = FeatureSet(now.fields, {**now.helpers, tm: "k_tile_m + 1"}, now.features)
    assert schema_differences((), trainer.names, old.features, changed) == ["redefined: tm"]
    with pytest.raises(ModelError, match=r"its objective is regression, here it is lambdarank"):
        warm_start(small_model, trainer, replace(QUICK, objective="lambdarank"))
    fp16 = synthetic("gemm", arch=load_arch("gfx950"), dtype="fp16", problems=20, kernels=10)
    with pytest.raises(ModelError, match=r"its dtypes is \('bf16',\), here it is \('fp16',\)"):
        warm_start(small_model, Trainer(fp16), QUICK)


def test_the_top_decile_is_a_tenth_of_each_problem(small_data: Dataset) -> None:
    trainer = Trainer(small_data)
    rows = small_data.is_ok
    flat = np.zeros(len(rows))
    index = small_data.problem_index
    behind = trainer.behind_best(rows)
    lesson = Lesson(trainer.static, trainer.static_names, flat, behind, flat, index)
    top = labels(lesson, rows, "top_decile")
    for p in range(len(small_data.problems)):
        own = (index == p) & rows
        count = int(np.ceil(own.sum() / 10))
        bound = np.sort(small_data.time_us[own])[count - 1]
        assert (top[own] == (small_data.time_us[own] <= bound)).all()
        assert top[own].sum() == count


def test_tuning_is_deterministic_and_never_ends_below_its_start(small_data: Dataset) -> None:
    pytest.importorskip("optuna")
    data = first_problems(small_data, 24)
    start = replace(QUICK, trees=10, patience=0)
    first, value = tune(Trainer(data), start, trials=4)
    again, same = tune(Trainer(data), start, trials=4)
    assert (first, value) == (again, same)
    alone, least = tune(Trainer(data), start, trials=1)
    assert alone == start
    assert value >= least
    assert replace(first, **{name: getattr(start, name) for name in SPACE}) == start


def test_tuning_without_optuna_says_what_to_do(
    small_data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'tilewise\[tune\]'"):
        tune(Trainer(small_data), QUICK)


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
    names = booster.feature_name()
    times = total_us(trainer.terms, small_data, kernel_factors(small_data, fitted.calibration))
    matrix = trainer.matrix(times)[:, [trainer.names.index(n) for n in names]]
    used = [names.index(n) for n in fitted.forest.features]
    assert np.allclose(fitted.forest.predict(matrix[:, used]), booster.predict(matrix), atol=2e-7)


def test_a_forest_survives_json(small_trained: Any) -> None:
    forest, first, second = small_trained.model.forests["rank"], Numbers(), Numbers()
    again = type(forest).from_dict(json.loads(json.dumps(forest.to_dict(first))), first)
    assert again.to_dict(second) == forest.to_dict(Numbers())
    assert first.data == second.data


def test_a_forest_of_plain_lists_is_read(small_trained: Any) -> None:
    forest, first, second = small_trained.model.forests["rank"], Numbers(), Numbers()
    named = forest.to_dict(first)
    lists = named | {"thresholds": [t.tolist() for t in forest.thresholds]}
    lists |= {n: getattr(forest, n).tolist() for n, value in named.items() if type(value) is str}
    assert type(forest).from_dict(lists, Numbers()).to_dict(second) == named
    assert first.data == second.data


def test_a_single_leaf_is_a_constant() -> None:
    text = "tree\n\nTree=0\nnum_leaves=1\nnum_cat=0\nleaf_value=0.25\n\n\nend of trees\n"
    forest = from_lightgbm(text, ["a"])
    assert forest.num_trees == 0
    assert forest.predict(np.zeros((2, 0))).tolist() == [0.25, 0.25]


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


def test_parameters_that_cannot_be_served_are_refused() -> None:
    for wrong in ({"objective": "magic"}, {"leaves": 300}, {"targets": ("joy",)}):
        with pytest.raises(InputError):
            Params(**wrong)  # type: ignore[arg-type]


def test_every_kernel_has_a_tile(small_data: Dataset) -> None:
    assert all(kernel_values(k)["k_tile_m"] >= 1 for k in small_data.kernels)
