"""Layers of patches run in simpler shapes, for arrays and tensors, remembered calls included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from leaves import gradients, leaf
from torch.nn import functional

import tilewise as tw
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.dispatch import Dispatcher, Registry, default_dispatcher
from tilewise.dispatch.remembered import CALLS
from tilewise.dispatch.reshaping import ReshapedPlan
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.ops.conv.problem import DIRECTIONS, ConvProblem
from tilewise.ops.conv.reshape import reshaped
from tilewise.selection.analytic import AnalyticRanker
from tilewise.torch_ops import calls

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
CPU = detect("cpu")
LAST = torch.channels_last


def patches(direction: str = "fwd", **sizes: Any) -> ConvProblem:
    given = {"n": 2, "c": 3, "k": 16, "h": 24, "w": 16, "y": 4, "x": 4}
    return ConvProblem(direction=direction, stride_h=4, stride_w=4, **{**given, **sizes})


def kernel_of(direction: str) -> Kernel:
    """Some kernel of ours for the simpler shapes."""
    problem = reshaped(patches(direction))
    ranking = default_dispatcher(problem.op, CPU).select(problem).ranking
    return next(r.kernel for r in ranking if r.kernel.engine == "cpu")


class Timetable(AnalyticRanker):
    """Knows some problems, and whom it was asked about."""

    path = "model"

    def __init__(self, known: Sequence[Problem]) -> None:
        super().__init__()
        self.known, self.asked = known, set[Problem]()

    def why_unfit(self, problem: Problem, arch: Any) -> str | None:
        return None if problem in self.known else "it is far away"

    def predict_us(self, problem: Problem, kernels: Any, arch: Any) -> Any:
        self.asked.add(problem)
        return super().predict_us(problem, kernels, arch)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rankers_are_asked_about_the_shapes_that_they_know(direction: str) -> None:
    problem = patches(direction)
    other = reshaped(problem)
    registry = Registry(problem.op, CPU)
    registry.declare(kernel_of(direction))
    for known in ([other, problem], [problem]):
        ranker = Timetable(known)
        choice = Dispatcher(registry, rankers=[ranker]).select(problem)
        assert ranker.asked >= {known[0]} and choice.path == "model"
        assert choice.problem == problem and "its tensors are read as" in choice.reason
        assert f"C={other.c} " in choice.reason
    assert Dispatcher(registry, rankers=[Timetable([])]).select(problem).path == "analytic"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_plan_runs_on_the_tensors_as_they_lie(direction: str) -> None:
    problem = patches(direction)
    registry = Registry(problem.op, CPU)
    registry.declare(kernel_of(direction))
    x, w = torch.randn(2, 3, 24, 16), torch.randn(16, 3, 4, 4)
    x, w = (t.to(memory_format=LAST).requires_grad_() for t in (x, w))
    y = functional.conv2d(x, w, stride=4)
    dy = torch.randn_like(y).to(memory_format=LAST)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    tensors, expected = {
        "fwd": ((x, w), y),
        "bwd_data": ((dy, w), dx),
        "bwd_weight": ((x, dy), dw),
    }[direction]
    found = registry.run(problem, *tensors)
    assert found.kernel == kernel_of(direction) and not found.copied
    assert isinstance(registry.dispatcher.plan(problem)[0], ReshapedPlan)
    torch.testing.assert_close(found.out, expected, rtol=1e-4, atol=1e-4)
    arrays = [t.detach().numpy() for t in tensors]
    out = registry.run(problem, *arrays).out
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-4, atol=1e-4)


def test_images_that_lie_apart_are_served_all_the_same() -> None:
    registry = Registry("conv_fwd", CPU)
    registry.declare(kernel_of("fwd"))
    x = torch.randn(4, 3, 24, 16).to(memory_format=LAST)[::2]
    w = torch.randn(16, 3, 4, 4).to(memory_format=LAST)
    found = registry.run(patches(), x, w)
    torch.testing.assert_close(found.out, functional.conv2d(x, w, stride=4), rtol=1e-4, atol=1e-4)


@pytest.fixture
def _without_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our kernels alone serve tensors."""

    @cache
    def own(op: str, arch: Any) -> Dispatcher:
        return default_dispatcher(op, arch).registry.filter("engine == 'cpu'").dispatcher

    CALLS.forget()
    monkeypatch.setattr(calls, "default_dispatcher", own)
    yield
    CALLS.forget()


@pytest.mark.usefixtures("_without_pytorch")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_layers_and_their_gradients_again_and_again(rank: int) -> None:
    """The second call of a kind takes the remembered way."""
    memory = {2: LAST, 3: torch.channels_last_3d}.get(rank, torch.contiguous_format)
    for seed in range(3):
        torch.manual_seed(seed)
        x, w = leaf(2, 4, *(8, 12, 8)[:rank]), leaf(8, 4, *(2, 4, 4)[:rank])
        x, w = (t.detach().to(memory_format=memory).requires_grad_() for t in (x, w))
        bias, step = leaf(8), (2, 4, 4)[:rank]
        ours, theirs = (
            gradients(partial(getattr(module, f"conv{rank}d"), stride=step), x, w, bias)
            for module in (tw, functional)
        )
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


def test_whole_boxes_as_language_models_embed_them() -> None:
    x, w = torch.randn(6, 3, 2, 14, 14), torch.randn(32, 3, 2, 14, 14)
    for _ in range(2):
        found = tw.conv3d(x, w, stride=(2, 14, 14))
        expected = (x.reshape(6, -1) @ w.reshape(32, -1).T).reshape(6, 32, 1, 1, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_tuning_times_what_is_served(tmp_path: Any) -> None:
    model = torch.nn.Conv2d(3, 16, 4, stride=4).to(memory_format=LAST).eval()
    image = torch.randn(2, 3, 24, 16).to(memory_format=LAST)
    try:
        with torch.no_grad():
            times = tw.tune(model, image, plan=tmp_path / "plan.json", top=2)
        (found,) = (of for problem, of in times.items() if problem == patches())
        assert len(found) == 3  # two of ours and PyTorch's
        assert tw.select(patches()).path == "measured"
    finally:
        tw.use_plan(None)
