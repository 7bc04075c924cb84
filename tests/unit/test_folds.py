"""Which problems teach what scores others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tilewise.core.sealed import seal
from tilewise.errors import InputError, ModelError
from tilewise.learn.cross import SEEN, cross_validate
from tilewise.learn.dataset import Dataset
from tilewise.learn.evaluate import read_folds
from tilewise.learn.fit import Trainer
from tilewise.learn.params import Params
from tilewise.learn.score import judge
from tilewise.learn.split import folds, held_out


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


def test_problems_measured_in_part_teach_and_judge_nothing(small_data: Dataset) -> None:
    labels = [{"top": 4} if i % 2 else {} for i in range(len(small_data.problems))]
    data = replace(small_data, labels=tuple(labels))
    cross = cross_validate(Trainer(data), Params(trees=5, leaves=4), count=3)
    assert ((cross.fold == SEEN) == ~data.is_whole).all()
    assert set(judge(data, cross.score).problems.tolist()) == set(np.flatnonzero(data.is_whole))
    alone = replace(data, labels=tuple({"top": 4} for _ in labels))
    with pytest.raises(InputError, match="without --top"):
        cross_validate(Trainer(alone), Params(trees=5, leaves=4), count=3)


def test_the_same_product_of_another_dtype_gives_nothing_away(small_data: Dataset) -> None:
    """Problems that only teach are in every training set, but for the twins of what is scored."""
    problems = list(small_data.problems)
    for i in range(1, len(problems), 2):
        other = "bf16" if problems[i - 1].dtype == "fp16" else "fp16"
        problems[i] = replace(problems[i - 1], dtype=other)
    data = replace(small_data, problems=tuple(problems))
    place = np.arange(len(problems))
    fold = np.where(place % 2, SEEN, place // 2 % 4)
    is_twin = (place % 8 == 1)[data.problem_index]  # of those in fold 0
    score = {}
    for name, hidden in (("as measured", False), ("spoiled", is_twin)):
        trainer = Trainer(replace(data, time_us=np.where(hidden, 7.0, data.time_us)))
        score[name] = cross_validate(trainer, Params(trees=5, leaves=4), fold=fold).score
    for number in range(4):
        scored = (fold == number)[data.problem_index]
        same = np.array_equal(score["as measured"][scored], score["spoiled"][scored])
        assert same == (number == 0), number


def test_the_third_split_is_apart(small_data: Dataset) -> None:
    among = np.arange(40)
    apart = held_out(small_data.problems, among)
    assert 0 < len(apart) < 12
    assert set(apart.tolist()) <= set(among.tolist())


def test_damaged_folds_of_a_model_are_said(tmp_path: Path) -> None:
    columns = {"problem": ["p"], "kernel": ["k"], "score": [1.0], "predicted_us": [2.0]}
    for written, kept, says in (
        ({"p": 0}, list(columns), ""),
        ([0], list(columns), "names no folds"),
        ({"p": "0"}, list(columns), "names no folds"),
        ({"p": 0}, list(columns)[:3], "predicted_us"),
    ):
        table = pa.table({name: columns[name] for name in kept})
        parquet.write_table(table, tmp_path / "oof.parquet")
        seal(tmp_path, {"folds.json": json.dumps(written).encode()}, {})
        if not says:
            assert read_folds(tmp_path) == ({"p": 0}, {("", "p", "k"): (1.0, 2.0)})
            continue
        with pytest.raises(ModelError, match=says):
            read_folds(tmp_path)
