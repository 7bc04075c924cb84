"""Forests of several draws: one text and one forest that predict their mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
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


def predicted(text: str, lesson: Lesson) -> Any:
    return lightgbm.Booster(model_str=text).predict(lesson.matrix)


def test_the_text_predicts_the_mean(lesson: Lesson) -> None:
    rows = np.ones(600, bool)
    alone = [grow(lesson, rows, PARAMS, 20, draw=i).predict(lesson.matrix) for i in range(3)]
    assert not np.allclose(alone[0], alone[1])
    text, gains = grow_all(lesson, rows, PARAMS, 20)
    assert tree_count(text) == 60
    assert np.allclose(predicted(text, lesson), np.mean(alone, axis=0))
    assert gains.argmax() in (0, 1)
    forest = from_lightgbm(text, lesson.names)
    columns = lesson.matrix[:, [lesson.names.index(n) for n in forest.features]]
    assert np.allclose(forest.predict(columns), predicted(text, lesson), atol=2e-6)


def test_what_was_there_before_counts_once(lesson: Lesson) -> None:
    rows = np.ones(600, bool)
    before, _ = grow_all(lesson, rows, PARAMS, 20)
    alone = [
        grow(lesson, rows, PARAMS, 10, init_text=before, draw=i).predict(lesson.matrix)
        for i in range(3)
    ]
    text, _ = grow_all(lesson, rows, PARAMS, 10, before)
    assert tree_count(text) == 90
    assert np.allclose(predicted(text, lesson), np.mean(alone, axis=0))


def test_one_draw_is_the_plain_forest(small_data: Dataset) -> None:
    every = np.ones(len(small_data), bool)
    trainer = Trainer(small_data)
    plain = replace(PARAMS, draws=1)
    fitted = trainer.fit(every, plain)
    three = trainer.fit(every, PARAMS)
    first = fitted.text.split("\nTree=")[1]
    assert three.text.split("\nTree=")[1].split("leaf_value")[0] == first.split("leaf_value")[0]
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


def test_there_is_at_least_one_draw() -> None:
    with pytest.raises(InputError, match="draws is 0; use 1 or more"):
        Params(draws=0)
