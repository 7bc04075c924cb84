"""Forests of several draws: one text and one forest that predict their mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.core.forest import from_lightgbm
from tilewise.core.model import VENDOR, load_model
from tilewise.errors import InputError
from tilewise.learn.dataset import Dataset
from tilewise.learn.fit import Trainer
from tilewise.learn.forests import Lesson, grow, grow_all, tree_count
from tilewise.learn.params import Params
from tilewise.learn.train import save, train

PARAMS = Params(trees=20, leaves=6, min_rows=5, draws=3, patience=0)


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    draw = np.random.default_rng(7)
    matrix = draw.normal(size=(600, 4))
    target = 3 + matrix[:, 0] + np.sin(2 * matrix[:, 1]) + draw.normal(size=600) / 4
    flat = np.zeros(600)
    return Lesson(matrix, ("a", "b", "c", "d"), target, flat, flat + 1, np.arange(600))


def read(text: str) -> Any:
    import lightgbm

    return lightgbm.Booster(model_str=text)


def test_the_text_predicts_the_mean(lesson: Lesson) -> None:
    rows = np.ones(600, bool)
    boosters = [grow(lesson, rows, PARAMS, 20, draw=i) for i in range(3)]
    alone = [b.predict(lesson.matrix) for b in boosters]
    assert not np.allclose(alone[0], alone[1])
    text, gains = grow_all(lesson, rows, PARAMS, 20)
    assert tree_count(text) == 60
    assert np.allclose(read(text).predict(lesson.matrix), np.mean(alone, axis=0))
    assert np.allclose(gains, np.mean([b.feature_importance("gain") for b in boosters], axis=0))
    forest = from_lightgbm(text, lesson.names)
    columns = lesson.matrix[:, [lesson.names.index(n) for n in forest.features]]
    assert np.allclose(forest.predict(columns), np.mean(alone, axis=0), atol=2e-6)


def test_what_was_there_before_counts_once(lesson: Lesson) -> None:
    rows = np.ones(600, bool)
    before, first = grow_all(lesson, rows, PARAMS, 20)
    assert np.allclose(read(before).feature_importance("gain"), first, rtol=1e-4)
    alone = [
        grow(lesson, rows, PARAMS, 10, init_text=before, draw=i).predict(lesson.matrix)
        for i in range(3)
    ]
    text, gains = grow_all(lesson, rows, PARAMS, 10, before)
    assert tree_count(text) == 90
    assert np.allclose(read(text).predict(lesson.matrix), np.mean(alone, axis=0))
    assert np.allclose(read(text).feature_importance("gain"), gains, rtol=1e-4)
    assert np.all(gains >= first * (1 - 1e-4))


def test_seeds_share_no_draws(lesson: Lesson) -> None:
    rows = np.ones(600, bool)
    texts = {
        grow(lesson, rows, replace(PARAMS, seed=seed), 3, draw=draw).model_to_string()
        for seed in range(3)
        for draw in range(3)
    }
    trees = {text.partition("Tree=0")[2].partition("end of trees")[0] for text in texts}
    assert len(trees) == 9


@pytest.mark.parametrize("objective", ["lambdarank", "top_decile"])
def test_other_objectives_have_draws_too(small_data: Dataset, objective: str) -> None:
    every = np.ones(len(small_data), bool)
    fitted = Trainer(small_data).fit(every, replace(PARAMS, objective=objective, trees=5))
    assert fitted.forest.num_trees == 15


def test_draws_are_as_long_as_the_one_that_was_stopped(small_data: Dataset) -> None:
    every = np.ones(len(small_data), bool)
    fitted = Trainer(small_data).fit(every, replace(PARAMS, trees=60, patience=3))
    assert len(fitted.apart)
    assert fitted.forest.num_trees == 3 * fitted.rounds


def test_the_first_draw_is_the_plain_forest(small_data: Dataset) -> None:
    every = np.ones(len(small_data), bool)
    trainer = Trainer(small_data)
    plain = replace(PARAMS, draws=1)
    fitted = trainer.fit(every, plain)
    three = trainer.fit(every, PARAMS)
    splits = [f.text.split("\nthreshold=")[1].split("leaf_value")[0] for f in (fitted, three)]
    assert splits[0] == splits[1]
    assert three.forest.num_trees == 3 * fitted.forest.num_trees


def test_a_model_of_several_draws_is_saved_and_continued(
    vendor_data: Dataset, tmp_path: Path
) -> None:
    params = replace(PARAMS, trees=8, vendor_trees=8)
    kept = vendor_data.keep(vendor_data.problem_index < 90)
    before = replace(kept, problems=kept.problems[:90], labels=kept.labels[:90])
    save(train(before, params, fold_count=3), before, tmp_path / "old")
    old = load_model(tmp_path / "old")
    assert old.manifest["params"]["draws"] == 3
    more = train(vendor_data, params, fold_count=3, continue_from=tmp_path / "old")
    for name in ("rank", VENDOR):
        assert old.forests[name].num_trees == 24
        assert more.model.forests[name].num_trees == 48


def test_draws_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="draws is 0; use 1 to 64"):
        Params(draws=0)
    with pytest.raises(InputError, match="every draw would be the same"):
        Params(draws=2, row_share=1.0, column_share=1.0)
