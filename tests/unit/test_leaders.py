"""Choosing without ranking all: the same scores, and the same choices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tilewise.core.model import Model, load_model
from tilewise.dispatch.dispatcher import Dispatcher
from tilewise.dispatch.registry import Registry
from tilewise.engines.toolchain import why_no_compiler
from tilewise.ops.configs import load_pool
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.compiled import CompiledScorer
from tilewise.selection.models import SHIPPED
from tilewise.selection.opening import measured_kernels
from tilewise.selection.ranker import ModelRanker
from tilewise.selection.scorer import NumpyScorer, make_scorer

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(SHIPPED / "sm_90_gemm")


@pytest.fixture(scope="module")
def scorer(model: Model) -> CompiledScorer:
    made = make_scorer(model, measured_kernels(model), model.trained_on, compiled=True)
    assert isinstance(made, CompiledScorer)
    assert made.can_lead
    return made


def problems(count: int, step: int = 1) -> list[GemmProblem]:
    draw = random.Random(count)
    sizes = [[step * draw.randint(1, 4096 // step) for _ in "mnk"] for _ in range(count)]
    return [GemmProblem(m=m, n=n, k=k, dtype="bf16") for m, n, k in sizes]


def asked_of(scorer: CompiledScorer) -> Any:
    own = [getattr(kernel, "dtype", "bf16") == "bf16" for kernel in scorer.kernels]
    return np.array(own, np.uint8)


@pytest.mark.parametrize("problem", problems(20), ids=str)
def test_leaders_have_the_scores_that_ranking_all_gives(
    scorer: CompiledScorer, problem: GemmProblem
) -> None:
    """To the bit, the vendor's routine among them, and none that was not asked about."""
    asked = asked_of(scorer)
    found = scorer.lead(problem, asked)
    every = scorer(problem)
    assert (found.score == every.score[found.order]).all()
    assert found.level == every.level
    assert (np.diff(found.score) <= 0).all()
    assert asked[found.order].all()
    assert any(scorer.kernels[at].engine == "vendor" for at in found.order)
    first = next(at for at in every.order if asked[at])
    assert found.order[0] == first


def test_nearness_is_that_of_the_nearest_problem(model: Model, scorer: CompiledScorer) -> None:
    plain = NumpyScorer(model, scorer.kernels[:1], model.trained_on)
    for problem in [*problems(10), GemmProblem(m=2**40, n=1, k=2**20, dtype="bf16")]:
        distance, _ = scorer.nearest(problem)
        for reach in (0.5 * distance, 0.999 * distance, 1.001 * distance, 2 * distance + 0.1):
            assert scorer.is_near(problem, reach) == (distance <= reach)
            assert plain.is_near(problem, reach) == (distance <= reach)


class Unhurried(ModelRanker):
    """Ranks all kernels for every choice."""

    def leaders_us(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("step", [1, 8, 64], ids=["odd", "even", "aligned"])
def test_choices_are_those_of_ranking_all(model: Model, step: int) -> None:
    """Odd sizes, for which many kernels need copies, are ranked whole."""
    registry = Registry("gemm", model.trained_on)
    registry.declare(load_pool(registry.op, model.trained_on))
    registry.declare(VendorKernel(op_name="gemm", library="torch"))
    quick = Dispatcher(registry, rankers=[ModelRanker(model)])
    slow = Dispatcher(registry, rankers=[Unhurried(model)])
    for problem in problems(30, step):
        mine, all_ranked = quick.select(problem), slow.select(problem)
        assert mine.kernel == all_ranked.kernel, problem
        assert {r.kernel for r in mine.ranking} == {r.kernel for r in all_ranked.ranking}
