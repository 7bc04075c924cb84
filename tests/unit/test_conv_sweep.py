"""The half-hour sweep of convolutions: fair sets from a seed, and launches that work out."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.arch import load_arch
from tilewise.selection.shortlist import with_absent, with_strange

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = load_arch("sm_90:H200")


OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """Benchmarks import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def script(scripts: None) -> Any:
    return importlib.import_module("sweep_convs")


@pytest.fixture(scope="module")
def made(scripts: None) -> Any:
    return importlib.import_module("conv_sets")


def given(**options: Any) -> Namespace:
    usual = {"sets": "bf16:12", "ops": "conv_fwd", "seed": 0, "whole": 0.25, "top": 8, "jobs": 1}
    rest = {"engines": "", "without": "", "model": "", "known": "", "dry_run": False, "workers": 1}
    return Namespace(**usual | rest | options)


@pytest.mark.parametrize("op", OPS)
def test_sets_are_fair_and_come_back_from_their_seed(made: Any, op: str) -> None:
    one = made.make_set(op, "bf16", 240, H200)
    listed = one.problems.problems
    assert len(set(listed)) == 240
    grouped = [problem.g > 1 for problem in listed]
    assert sum(grouped) >= 80
    # Every beginning is a sample of the whole: grouped layers are not all at one end.
    assert 0.2 <= sum(grouped[:80]) / 80 <= 0.5
    assert {problem.ndim for problem in listed} == {1, 2, 3}
    assert len(one.whole) == 48 and one.whole <= set(listed)
    again = made.make_set(op, "bf16", 240, H200)
    assert again.problems.problems == listed and again.whole == one.whole
    assert made.make_set(op, "bf16", 240, H200, seed=1).problems.problems != listed


def test_whole_models_come_first_and_what_is_compared_is_kept_out(made: Any) -> None:
    one = made.make_set("conv_fwd", "bf16", 240, H200)
    names = [labels.get("network") for labels in one.problems.labels]
    assert one.first == 72
    assert set(names[: one.first]) == {*made.MODELS, "unet_block", "video_decoder"}
    compared = {problem for _, problem in made.conv_contest.layers("conv_fwd", "bf16")}
    assert not compared & set(one.problems.problems)


def test_kinds_that_models_know_least_of_come_before_others(made: Any) -> None:
    one = made.make_set("conv_bwd_data", "bf16", 240, H200)
    weak = [made.is_weak(problem) for problem in one.problems.problems[one.first :]]
    count = sum(weak)
    assert 0.2 <= count / len(weak) <= 0.7
    assert sum(weak[:count]) >= 0.9 * count, "simpler problems follow those they serve"


def test_no_problem_takes_more_time_or_memory_than_a_sweep_has(made: Any) -> None:
    one = made.make_set("conv_fwd", "bf16", 700, H200)
    assert max(made.least_ms(p, H200) for p in one.problems.problems) <= made.MOST_MS
    assert max(p.bytes for p in one.problems.problems) <= made.MOST_BYTES
    assert max(made.least_ms(p, H200) for p in one.whole) <= made.WHOLE_MS


def test_every_beginning_of_a_sweep_holds_its_share_of_each_set(script: Any, made: Any) -> None:
    listed = script.sets(given(sets="bf16:70,fp16:25", ops=",".join(OPS)), H200)
    problems, labels = made.in_order(listed)
    assert len(problems) == len(labels) == 3 * 95 and len(set(problems)) == len(problems)
    first = sum(one.first for one in listed)
    for beginning in (problems[: first // 2], problems[first : first + 100]):
        shares = Counter((p.op, p.dtype) for p in beginning)
        for one in listed:
            share = len(one.problems) / 285 * len(beginning)
            assert 0.6 * share <= shares[one.op, one.dtype] <= 1.6 * share


def test_every_launch_of_a_small_sweep_works_out(script: Any) -> None:
    args = given(ops="conv_fwd,conv_bwd_weight")
    rows = script.check(script.sets(args, H200), args, H200)
    assert [row["problems"] for row in rows] == [12, 12] and rows[0]["whole"] == 3
    assert all(row["launches"] > 12 and len(row["families"]) >= 5 for row in rows)


def test_the_vendor_comes_first_and_narrowed_problems_say_so(script: Any) -> None:
    args = given(top=4)
    (one,) = listed = script.sets(args, H200)
    pick = script.picks(listed, args, "gpu")
    for _, problem, labels in one.labelled():
        vendor, *own = pick(problem, H200)
        assert vendor.engine == "vendor" and all(k.op == "conv_fwd" for k in own)
        assert ('"top": 4' not in labels) == (problem in one.whole)
        assert len(own) <= 4 or problem in one.whole
        assert len(set(own)) == len(own)


def test_engines_and_families_can_be_left_out(script: Any, made: Any) -> None:
    args = given(engines="cuda,vendor", without="halo,rows")
    assert script.engines_of("conv_fwd", args, "gpu") == ["cuda", "vendor"]
    whole = made.pool("conv_fwd", "bf16", H200, ["cuda"])
    some = made.pool("conv_fwd", "bf16", H200, ["cuda"], ["halo", "rows"])
    assert {k.family for k in whole if k not in some} == {"halo", "rows"}
    assert some[0].engine == "vendor"


def test_families_that_nobody_measured_are_among_the_few(made: Any) -> None:
    kernels = [k for k in made.pool("conv_fwd", "bf16", H200, ["cuda"]) if k.engine == "cuda"]
    ranked = sorted(kernels, key=lambda k: k.family != "im2col")
    few = with_absent(ranked, 16)
    assert few[:12] == ranked[:12] and {k.family for k in few[:12]} == {"im2col"}
    assert len({k.family for k in few[12:]} - {"im2col"}) == 4 and len(few) == 16
    assert set(with_absent(ranked, len(ranked))) == set(ranked)


def test_families_that_a_model_never_met_have_half_of_the_few(made: Any) -> None:
    kernels = [k for k in made.pool("conv_fwd", "bf16", H200, ["cuda"]) if k.engine == "cuda"]
    strange = frozenset(k for k in kernels if k.family in ("taps", "ragged"))
    ranked = sorted(kernels, key=lambda k: (k in strange, k.family != "gather"))
    few = with_strange(ranked, strange, 10)
    own = Counter(k.family for k in few)
    assert len(few) == 10 and own["taps"] + own["ragged"] == 5 and min(own.values()) >= 1
    assert few[0] == ranked[0] and own["gather"] >= 3
    gather = [k for k in ranked if k.family == "gather"]
    assert with_strange(gather, strange, 10) == gather[:10], (
        "where nothing is strange, all is known"
    )
    assert set(with_strange(ranked, strange, len(ranked))) == set(ranked)


def test_kernels_are_compiled_ahead_as_the_sweep_needs_them(
    script: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = {"im2col", "halo", "rows", "gather", "stem"}
    args = given(whole=0.0, top=2, engines="cuda,vendor", without=",".join(left_out))
    asked: list[Any] = []
    engine = script.get_engine("cuda")
    monkeypatch.setattr(
        engine, "compile_ahead", lambda pairs, arch, **how: asked.extend(pairs) or []
    )
    monkeypatch.setattr(script, "get_engine", lambda name: engine)
    listed = script.sets(args, H200)
    told = script.compile_sets(listed, args, H200)
    assert told == {"pairs": len(asked), "failed": 0}
    problems = [p for _, p in asked]
    needed = [p for p in problems if p in listed[0].problems.problems]
    order = [listed[0].problems.problems.index(p) for p in needed]
    assert needed and order == sorted(order), "in the order in which they are measured"
    kept = {k.family for k in made.pool("conv_fwd", "bf16", H200, ["cuda"])[1:]}
    assert {k.family for k, _ in asked} <= kept - left_out
    usual = script.get_op("conv_fwd").module("launch").representative
    first = dict(reversed(asked))
    assert all(first[k] == usual(k) for k in first), "what a sweep builds first comes first"
