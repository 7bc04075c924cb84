"""Measurements of several devices, or numbers of threads, teach one model, figures and all."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_kernels, synthetic_problems

from tilewise.core.arch import load_arch
from tilewise.core.identity import canonical_json
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.model import load_model
from tilewise.core.problem import Problem
from tilewise.learn.dataset import Dataset, from_measurements
from tilewise.learn.evaluate import evaluate
from tilewise.learn.params import Params
from tilewise.learn.train import save, train
from tilewise.ops.contract import get_op
from tilewise.ops.fields import figures
from tilewise.selection.selector import how_different

FILE = load_arch("x86_avx512")
ONE = FILE.with_figures(device="a CPU", compute_units=1, memory_gb_s=12.0)
TWO = FILE.with_figures(device="a CPU", compute_units=2, memory_gb_s=24.0)
KERNELS = synthetic_kernels("gemm", FILE, 6, dtype="fp32", engine="cpu")
PROBLEMS = synthetic_problems("gemm", "fp32", 24, seed=3)


def row(problem: Problem, at: int, threads: int, policy: Policy | None = None) -> Measurement:
    """With one thread the first kernels are the fastest, with two the last."""
    stand = {1: ONE, 2: TWO}[threads]
    setting = Setting(
        arch=FILE.name,
        device=stand.device,
        toolchain="g++",
        policy=replace(policy or Policy(), threads=threads),
        figures=canonical_json(figures(stand)),
    )
    place = at if threads == 1 else len(KERNELS) - at
    time_us = problem.flops * 1e-3 * (1 + 0.2 * place) + 1
    return Measurement.of(problem, KERNELS[at], setting, status="ok", time_us=time_us)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return from_measurements(
        [row(p, at, threads) for threads in (1, 2) for p in PROBLEMS for at in range(len(KERNELS))],
        op="gemm",
    )


def test_each_stand_has_its_own_figures(data: Dataset) -> None:
    assert len(data.problems) == 2 * len(PROBLEMS)
    assert sorted(stand.compute_units for stand in data.devices) == [1, 2]
    features = get_op("gemm").features
    units = features.evaluate(data.rows(features), ["units"])["units"]
    expected = [data.stands[p].compute_units for p in data.problem_index]
    assert units.tolist() == expected


def test_equal_measurements_elsewhere_are_other_data(data: Dataset) -> None:
    swapped = replace(data, stands=data.stands[::-1])
    assert swapped.digest != data.digest


def test_one_model_tells_stands_apart(data: Dataset, tmp_path: Path) -> None:
    trained = train(data, Params(trees=200, leaves=7, min_rows=2, max_features=0, patience=0))
    save(trained, data, tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert [stand.compute_units for stand in model.stands] == [1, 2]
    assert how_different(model, ONE) is None
    assert how_different(model, TWO) is None
    assert how_different(model, FILE.with_figures(compute_units=64)) is not None
    judged = evaluate(tmp_path / "model", data)
    assert judged.outcome.efficiency.mean() > 0.93  # what fits one stand has 0.75 on the other
    alone = from_measurements(
        [row(p, at, 2) for p in PROBLEMS for at in range(len(KERNELS))], op="gemm"
    )
    held = evaluate(tmp_path / "model", alone)
    assert held.out_of_fold == len(PROBLEMS)
    assert held.outcome.efficiency.mean() > 0.93


def test_folds_part_no_problem_from_itself(data: Dataset) -> None:
    fold = train(data, Params(trees=5, leaves=4, min_rows=2)).cross.fold
    by_key: dict[str, set[int]] = {}
    for problem, number in zip(data.problems, fold.tolist(), strict=True):
        by_key.setdefault(problem.key, set()).add(number)
    assert {len(found) for found in by_key.values()} == {1}
    assert len(np.unique(fold)) == 5


def test_what_is_timed_otherwise_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A cold cache is no figure of a device."""
    rows = [row(p, 0, threads) for threads in (1, 2) for p in PROBLEMS]
    cold = [row(p, 0, 1, Policy(cache="cold")) for p in PROBLEMS[:3]]
    with caplog.at_level(logging.WARNING):
        found = from_measurements([*rows, *cold], op="gemm")
    assert len(found) == len(rows)
    assert "3 rows of another policy" in caplog.text
