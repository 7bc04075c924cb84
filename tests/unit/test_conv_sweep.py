"""The half-hour sweep of convolutions: fair sets from a seed, and launches that work out."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.arch import load_arch

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = load_arch("sm_90:H200")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("sweep_convs", BENCHMARKS / "sweep_convs.py")
    assert spec and spec.loader
    module = sys.modules["sweep_convs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_sets_are_fair_and_come_back_from_their_seed(script: Any, op: str) -> None:
    made = script.problem_set(op, "bf16", 240, 0, H200)
    assert len(set(made.problems)) == 240
    grouped = [problem.g > 1 for problem in made.problems]
    assert sum(grouped) >= 80
    # Every beginning is a sample of the whole: grouped layers are not all at one end.
    assert 0.2 <= sum(grouped[:80]) / 80 <= 0.5
    assert {problem.ndim for problem in made.problems} == {1, 2, 3}
    assert any("network" in labels for labels in made.labels)
    assert script.problem_set(op, "bf16", 240, 0, H200).problems == made.problems
    assert script.problem_set(op, "bf16", 240, 1, H200).problems != made.problems


def test_every_launch_of_a_small_sweep_works_out(script: Any) -> None:
    args = Namespace(sets="bf16:12", ops="conv_fwd,conv_bwd_weight", seed=0, whole=0.25, top=8)
    args.engines = args.without = ""
    listed = script.sets(args, H200)
    rows = script.check(listed, args, H200)
    assert [row["problems"] for row in rows] == [12, 12] and rows[0]["whole"] == 3
    assert all(row["launches"] > 12 and len(row["families"]) >= 5 for row in rows)


def test_engines_can_be_chosen(script: Any) -> None:
    args = Namespace(sets="bf16:4", ops="conv_fwd", seed=0, whole=0.0, top=4, engines="cuda,vendor")
    (one,) = script.sets(args, H200)
    assert script.engines_of(one, args, "gpu") == ["cuda", "vendor"]


def test_families_can_be_left_out(script: Any) -> None:
    whole = script.pool("conv_fwd", "bf16", H200, ["cuda"])
    some = script.pool("conv_fwd", "bf16", H200, ["cuda"], ["halo", "rows"])
    gone = {k.family for k in whole if k not in some}
    assert gone == {"halo", "rows"} and some[-1].engine == "vendor"


def test_narrowed_problems_say_so(script: Any) -> None:
    args = Namespace(sets="bf16:8", ops="conv_fwd", seed=0, whole=0.5, top=8)
    (one,) = script.sets(args, H200)
    labels = list(script.Narrowing(one, [], 8).labels(one, 8))
    assert ['"top": 8' in text for text in labels] == [False] * 4 + [True] * 4
