"""Exported convolutions of a GPU: choices and launches are Python's, for every family."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import Exported
from shown_launches import check_launches, show
from stand_in import one_of_each, stand_in

from tilewise.core.arch import load_arch
from tilewise.core.problem import Problem
from tilewise.errors import ProblemError
from tilewise.export import gpu
from tilewise.export.example import example_problem
from tilewise.export.library import Wanted, narrowed, prepared
from tilewise.export.rules import OpExport
from tilewise.export.top import for_layers
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.selection.selector import Selector

COUNT = 1000
ARCH = load_arch("sm_90:H200")
OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
LAYERS = {
    "3x3": "N=8 C=128 K=256 Hi=28 Wi=28 Y=3 X=3 pad_h=1 pad_w=1",
    "odd channels": "N=4 C=100 K=60 Hi=14 Wi=14 Y=3 X=3 pad_h=1 pad_w=1",
    "1x1": "N=8 C=256 K=64 Hi=14 Wi=14 Y=1 X=1",
    "strided": "N=8 C=64 K=128 Hi=28 Wi=28 Y=3 X=3 stride_h=2 stride_w=2 pad_h=1 pad_w=1",
    "every other pixel": "N=8 C=64 K=128 Hi=28 Wi=28 Y=1 X=1 stride_h=2 stride_w=2",
    "volume": "N=2 C=64 K=64 Di=8 Hi=14 Wi=14 Z=3 Y=3 X=3 pad_d=1 pad_h=1 pad_w=1",
    "sequence": "N=8 C=64 K=96 Wi=500 X=7 pad_w=3",
    "groups of 4": "N=8 C=128 K=128 G=32 Hi=28 Wi=28 Y=3 X=3 pad_h=1 pad_w=1",
    "groups of 16": "N=8 C=256 K=256 G=16 Hi=14 Wi=14 Y=3 X=3 pad_h=1 pad_w=1",
    "groups of 24": "N=8 C=96 K=96 G=4 Hi=28 Wi=28 Y=3 X=3 pad_h=1 pad_w=1",
    "groups of 12": "N=8 C=96 K=96 G=8 Hi=14 Wi=14 Y=3 X=3 pad_h=1 pad_w=1",
    "few channels": "N=8 C=16 K=32 Hi=28 Wi=28 Y=3 X=3 pad_h=1 pad_w=1",
    "depthwise": "N=8 C=96 K=96 G=96 Hi=28 Wi=28 Y=3 X=3 pad_h=1 pad_w=1",
    "strided depthwise": "N=8 C=96 K=96 G=96 Hi=28 Wi=28 Y=3 X=3 stride_h=2 stride_w=2 "
    "pad_h=1 pad_w=1",
    "depthwise sequence": "N=8 C=64 K=64 G=64 Wi=400 X=5 pad_w=2",
    "stem": "N=4 C=3 K=64 Hi=64 Wi=64 Y=3 X=3 stride_h=2 stride_w=2 pad_h=1 pad_w=1",
}
TRAITS = ("engine", "family", "atomic", "persistent", "spreads_nonfinite", "product", "loader")


@dataclass
class Shown:
    """A library of an op that was built, and a program that prints its launches."""

    export: OpExport
    program: Path
    objects: gpu.Objects

    @property
    def library(self) -> Exported:
        return Exported(self.program.parent, [self.export])


def layers(op: str) -> list[Problem]:
    return [made(op, words) for words in LAYERS.values()]


def made(op: str, words: str) -> Problem:
    pairs = (word.split("=") for word in words.split())
    return get_op(op).make_problem(dtype="bf16", **{key: int(value) for key, value in pairs})


def pool(op: str) -> list[Any]:
    """The GPU kernels that ship."""
    found: list[Any] = load_pool(get_op(op), ARCH, ["cuda", "triton"])
    return [kernel for kernel in found if kernel.dtype == "bf16"]


def prepared_for(op: str) -> OpExport:
    """One kernel of each family, and of each way to add up what it cuts."""
    why = get_op(op).why_unusable
    kernels = one_of_each(
        [k for k in pool(op) if any(why(k, p, ARCH) is None for p in layers(op))], *TRAITS
    )
    model = stand_in(op, ARCH, kernels, layers(op))
    return prepared(Wanted(op=op, arch=ARCH, dtypes=("bf16",), model=model))


@pytest.fixture(scope="module", params=OPS)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    export = prepared_for(request.param)
    why = export.op.why_unusable
    export = for_layers(
        export, layers(request.param), lambda kernel, p: why(kernel, p, ARCH) is None
    )
    folder = tmp_path_factory.mktemp(request.param) / "library"
    return Shown(export, *show(export, folder))


def problems(export: OpExport, count: int) -> list[tuple[int, Problem]]:
    """Layers of the library with other images, each with the number of its case."""
    rng = random.Random(11)
    found: dict[Problem, int] = {}
    given = layers(export.op.name)
    while len(found) < count:
        layer = rng.choice(given)
        sizes = {name: getattr(layer, name) for name in ("n", "d", "h", "w")}
        sizes = {
            name: size if size == 1 else rng.choice((rng.randrange(1, 4 * size), size, 8 * size))
            for name, size in sizes.items()
        }
        try:
            problem = ConvProblem(**{**fields_of(layer), **sizes})
        except ProblemError:
            continue
        found[problem] = case_of(export, problem)
    return [(which, problem) for problem, which in found.items()]


def fields_of(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in problem.KEYS.values()}


def case_of(export: OpExport, problem: Problem) -> int:
    return next(at for at, case in enumerate(export.cases) if case.holds(fields_of(problem)))


def test_choices_and_launches_are_python_s(shown: Shown) -> None:
    """1,000 problems an op, with every kernel: the order of the ranking, and number for number."""
    given, export = problems(shown.export, COUNT), shown.export
    unseen = check_launches(export, shown.program, shown.objects, given)
    selector, library = Selector(export.model, export.kernels, ARCH), shown.library
    for _, problem in given:
        theirs = [
            ranked
            for ranked in selector.rank(problem)
            if export.op.why_unusable(ranked.kernel, problem, ARCH) is None
            and (ranked.kernel.name, problem) not in unseen
        ]
        ours = library.rank(problem)
        assert [name for name, _ in ours] == [ranked.kernel.name for ranked in theirs]
        np.testing.assert_allclose([us for _, us in ours], [r.predicted_us for r in theirs])


def test_every_family_serves(shown: Shown) -> None:
    """Its kernels have launches, of several steps where parities or slices are added up."""
    kinds: dict[str, set[int]] = {}
    for at, kernel in enumerate(shown.export.kernels):
        for _, problem in problems(shown.export, 200):
            if shown.library.why_unusable(problem, at) is None:
                launch = shown.export.op.module("launch").launch(kernel, problem, ARCH)
                kinds.setdefault(kernel.family, set()).add(len(launch.steps))  # type: ignore[attr-defined]
    assert set(kinds) == {kernel.family for kernel in pool(shown.export.op.name)}
    if shown.export.op.name == "conv_bwd_data":
        assert 4 in kinds["im2col"], "a step for each parity"
    if shown.export.op.name == "conv_bwd_weight":
        assert {2, 3} <= kinds["im2col"] | kinds["rows"], "slices, and atomics that are cleared"


def test_the_example_is_of_a_layer_that_is_served(shown: Shown) -> None:
    case, problem, runs = example_problem(shown.export)
    assert case.holds(fields_of(problem))
    assert shown.library.rank(problem)
    assert len(runs) >= 1


def test_other_layers_are_refused_with_what_is_exported(shown: Shown) -> None:
    layer = fields_of(layers(shown.export.op.name)[0])
    other = ConvProblem(**{**layer, "x": 5, "pad_w": 2})
    assert "not exported for" in str(shown.library.why_unusable(other, 0))
    assert "stride_d" in str(shown.library.why_unusable(other, 0))


def test_kernels_are_compiled_for_the_layers_that_they_win() -> None:
    """By default the problems behind the model; --top keeps the strongest of them."""
    export = prepared_for("conv_fwd")
    chosen, loss = narrowed(export, wanted_of(export))
    assert loss is not None
    assert loss.kept == loss.winners == len(chosen.kernels) > 1
    assert loss.unserved == 0
    assert sum(map(len, chosen.serving.values())) == loss.problems == len(LAYERS)
    few, cost = narrowed(export, wanted_of(export, top=2))
    assert cost is not None
    assert len(few.kernels) == 2
    assert cost.mean > loss.mean == 0
    served = set().union(*few.serving.values())
    assert len(served) + cost.unserved == loss.problems


def wanted_of(export: OpExport, top: int | None = None) -> Wanted:
    return Wanted(op=export.op.name, arch=ARCH, dtypes=("bf16",), top=top, model=export.model)
