"""The scorer: C and NumPy agree bit for bit, ties keep the pool's order, nothing grows."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_kernels, synthetic_problems

from tilewise import notices
from tilewise.core.arch import load_arch
from tilewise.core.model import Model, load_model
from tilewise.engines import toolchain
from tilewise.engines.toolchain import why_no_compiler
from tilewise.learn.dataset import Dataset
from tilewise.selection import scorer as scorers
from tilewise.selection.codegen import BLOCK
from tilewise.selection.compiled import CompiledScorer
from tilewise.selection.scorer import NumpyScorer, make_scorer

GFX950 = load_arch("gfx950")
needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason="no compiler")


@pytest.fixture(scope="module")
def model(small_model: Path) -> Model:
    return load_model(small_model)


@needs_compiler
@pytest.mark.parametrize("count", [1, 20, BLOCK, BLOCK + 1, 3 * BLOCK, 300])
def test_c_and_numpy_agree_exactly(model: Model, count: int) -> None:
    kernels = synthetic_kernels("gemm", GFX950, count)
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    plain = NumpyScorer(model, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 40, seed=11):
        a, b = compiled(problem), plain(problem)
        assert np.array_equal(a.score, b.score)
        assert np.array_equal(a.order, b.order)
        assert a.level == pytest.approx(b.level, abs=1e-12)
        assert compiled.nearest(problem) == pytest.approx(plain.nearest(problem), abs=1e-12)


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-mavx2", "-mfma")])
def test_every_instruction_set_gives_the_same(
    model: Model, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags and not scorers._isa_flags():
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(scorers, "_isa_flags", lambda: flags)
    kernels = synthetic_kernels("gemm", GFX950, 100)
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    plain = NumpyScorer(model, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 10, seed=12):
        assert np.array_equal(compiled(problem).score, plain(problem).score)


@needs_compiler
def test_features_in_c_equal_numpy(model: Model) -> None:
    kernels = synthetic_kernels("gemm", GFX950, 70)
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    assert isinstance(compiled, CompiledScorer)
    plain = NumpyScorer(model, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 10, seed=13):
        found = compiled.features(problem)
        expected = model.features.evaluate(plain.rows(problem), list(found))
        for name, values in found.items():
            assert (values == expected[name][: len(values)]).all(), name


@needs_compiler
@pytest.mark.parametrize("flags", [None, (), ("-mavx2", "-mfma")])
@pytest.mark.parametrize("leaves", [3, 16, 17, 32, 33, 64, 65, 128, 129])
def test_trees_of_any_size_are_served(
    model: Model,
    small_data: Dataset,
    leaves: int,
    flags: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewise.learn.fit import Params, Trainer

    if flags is not None:
        if flags and not scorers._isa_flags():
            pytest.skip("this machine has no AVX2")
        monkeypatch.setattr(scorers, "_isa_flags", lambda: flags)
    trainer = Trainer(small_data)
    fitted = trainer.fit(
        np.ones(len(small_data), bool),
        Params(trees=5, leaves=leaves, min_rows=2, max_features=0),
    )
    assert fitted.forest.max_leaves == leaves
    features = trainer.features.restricted(
        dict.fromkeys(
            [*fitted.forest.features, *(n for f in model.forests.values() for n in f.features)]
        ),
        [*model.measured.axes, "calibrated_us"],
    )
    forests = {**model.forests, "rank": fitted.forest}
    large = replace(model, features=features, forests=forests, calibration=fitted.calibration)
    kernels = synthetic_kernels("gemm", GFX950, 70)
    compiled = make_scorer(large, kernels, GFX950, compiled=True)
    plain = NumpyScorer(large, kernels, GFX950)
    for problem in synthetic_problems("gemm", "bf16", 10, seed=14):
        assert np.array_equal(compiled(problem).score, plain(problem).score)


@needs_compiler
def test_many_scores_are_sorted_stably(model: Model) -> None:
    kernels = synthetic_kernels("gemm", GFX950, 250) * 4  # every score four times
    compiled = make_scorer(model, kernels, GFX950, compiled=True)
    for problem in synthetic_problems("gemm", "bf16", 10, seed=16):
        found = compiled(problem)
        assert np.array_equal(found.order, np.argsort(-found.score, kind="stable"))


def test_ties_keep_the_order_of_the_pool(model: Model) -> None:
    kernel = synthetic_kernels("gemm", GFX950, 1)[0]
    problem = synthetic_problems("gemm", "bf16", 1)[0]
    for compiled in (None, False):
        order = make_scorer(model, [kernel] * 70, GFX950, compiled=compiled)(problem).order
        assert order.tolist() == list(range(70))


def test_without_a_compiler_numpy_serves_and_says_so_once(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "why_no_compiler", lambda: "no compiler in this test")
    monkeypatch.setattr(notices, "_told", set())
    kernels = synthetic_kernels("gemm", GFX950, 5)
    for _ in range(2):
        assert isinstance(make_scorer(model, kernels, GFX950), NumpyScorer)
    assert caplog.text.count("no compiler in this test") == 1


@needs_compiler
def test_memory_does_not_grow(model: Model) -> None:
    scorer = make_scorer(model, synthetic_kernels("gemm", GFX950, 10), GFX950, compiled=True)
    assert isinstance(scorer, CompiledScorer)
    problems = synthetic_problems("gemm", "bf16", 50, seed=15)

    def work(rounds: int) -> int:
        for _ in range(rounds):
            for problem in problems:
                scorer.rank(problem)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = work(20)
    assert work(200) - before < 2000  # KiB
