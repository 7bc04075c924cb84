"""Judging: efficiency by hand, noise ceiling, reach, slices, comparison, families left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import synthetic

from tilewise.core.arch import load_arch
from tilewise.core.compile_expr import Array
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.model import load_model
from tilewise.errors import InputError
from tilewise.learn.compare import compare, compare_evaluations
from tilewise.learn.dataset import Dataset, from_measurements
from tilewise.learn.evaluate import evaluate, leave_one_out
from tilewise.learn.judging import worst
from tilewise.learn.noise import noise_ceiling, remeasured
from tilewise.learn.params import Params
from tilewise.learn.reach import LEAST, MOST, by_distance, nearest_outside, reach, regions
from tilewise.learn.score import judge, summary
from tilewise.learn.slices import shape_family
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem

QUICK = Params(trees=30, leaves=8)


def test_efficiency_by_hand(small_data: Dataset) -> None:
    rows = small_data.problem_index < 2
    outcome = judge(small_data, np.where(small_data.is_ok, -small_data.time_us, -np.inf), rows)
    assert outcome.efficiency.tolist() == [1.0, 1.0]
    assert outcome.place.tolist() == [0, 0]
    assert outcome.ndcg == pytest.approx([1.0, 1.0])
    backwards = judge(small_data, np.where(small_data.is_ok, small_data.time_us, -np.inf), rows)
    for i in range(2):
        own = small_data.time_us[(small_data.problem_index == i) & small_data.is_ok]
        assert backwards.efficiency[i] == pytest.approx(own.min() / own.max())
    assert backwards.ndcg.max() < 1


def test_choosing_a_failure_scores_nothing() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=4, kernels=5)
    times = data.time_us.copy()
    times[data.kernel_index == 0] = np.nan
    spoiled = replace(data, time_us=times)
    outcome = judge(spoiled, (data.kernel_index == 0).astype(float))
    assert outcome.efficiency.tolist() == [0.0] * 4


def test_the_noise_ceiling_falls_with_noise() -> None:
    quiet = synthetic("gemm", arch=load_arch("gfx950"), problems=20, kernels=8, noise=0.001)
    loud = synthetic("gemm", arch=load_arch("gfx950"), problems=20, kernels=8, noise=0.3)
    a, b = noise_ceiling(quiet, draws=20), noise_ceiling(loud, draws=20)
    assert a is not None
    assert b is not None
    assert 100 >= a["mean"] > b["mean"]
    unknown = replace(quiet, spread_us=np.full(len(quiet), np.nan))
    assert noise_ceiling(unknown) is None


def test_a_second_reading_is_the_ceiling_where_there_is_one() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=4, kernels=3, noise=0.0)
    # By first readings the second kernel won twice; on the last problem nothing was in doubt. The
    # machine was slower when leaders were read again, which says nothing about either.
    first = np.array([12, 11, np.nan] * 2 + [9, 11, np.nan] + [np.nan] * 3)
    again = np.array([20, 22, np.nan] * 3 + [np.nan] * 3)
    times = np.tile([10.0, 11.0, 15.0], 4)
    twice = replace(data, time_us=times, first_us=first, again_us=again)
    found = remeasured(twice)
    assert found is not None
    assert found["mean"] == pytest.approx(100 * (2 + 2 * 10 / 11) / 4, abs=1e-3)
    assert found["problems"] == 3
    ceiling = noise_ceiling(twice)
    assert ceiling is not None
    assert ceiling["how"] == "remeasured"
    assert remeasured(data) is None
    rarely = np.where(data.problem_index == 0, first, np.nan)
    assert remeasured(replace(twice, first_us=rarely)) is None


def test_a_sample_measured_again_speaks_for_itself_alone() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=90, kernels=2, noise=0.0)
    again = np.where(data.problem_index < 30, np.where(data.kernel_index == 0, 20.0, 25.0), np.nan)
    twice = replace(data, first_us=again * (1 - data.kernel_index / 2), again_us=again)
    found = remeasured(twice)
    assert found is not None
    assert (found["problems"], found["mean"]) == (30, 80.0)
    assert remeasured(replace(twice, first_us=np.where(data.problem_index, again, np.nan))) is None


def read(
    small_data: Dataset, readings: Sequence[tuple[int, str, str, float | None]]
) -> list[Measurement]:
    """Rows of one problem, in order: the kernel's number, stage, status and time of each."""
    setting = Setting(arch="gfx950", device="d", toolchain="t", policy=Policy())
    problem, kernels = small_data.problems[0], small_data.kernels
    return [
        Measurement.of(
            problem, kernels[k], setting, stage=stage, status=status, time_us=us, attempt=attempt
        )
        for attempt, (k, stage, status, us) in enumerate(readings)
    ]


def times(small_data: Dataset, data: Dataset, column: Array | None) -> list[float | None]:
    """The column's values by the number of the kernel."""
    assert column is not None
    found = {data.kernels[k].key: us for k, us in zip(data.kernel_index, column, strict=True)}
    values = [found[k.key] for k in small_data.kernels[: len(data.kernels)]]
    return [None if np.isnan(us) else round(float(us), 6) for us in values]


def test_the_last_verdict_counts_and_the_first_is_kept(small_data: Dataset) -> None:
    rows = read(
        small_data,
        [
            *[(0, "first", "ok", 5.0), (0, "retry", "ok", 3.0)],
            *[(1, "first", "ok", 4.0)],
            *[(2, "first", "ok", 6.0), (2, "retry", "ok", 7.0)],
            *[(3, "first", "ok", 2.0), (3, "leader", "crash", None)],  # says nothing of its result
            *[(4, "first", "ok", 2.0), (4, "leader", "wrong_result", None)],
            *[(5, "first", "timeout", None), (5, "retry", "ok", 8.0)],
            *[(6, "first", "ok", None)],
        ],
    )
    for order in (rows, rows[::-1]):
        data = from_measurements(order)
        assert times(small_data, data, data.time_us) == [3.0, 4.0, 7.0, 2.0, None, 8.0, None]
        assert times(small_data, data, data.first_us) == [5.0, None, 6.0, *[None] * 4]
        assert times(small_data, data, data.again_us) == [3.0, None, 7.0, *[None] * 4]


def test_readings_taken_alone_are_compared_with_those_taken_in_turn(small_data: Dataset) -> None:
    """Kernel 0 was lucky when first read; in turn, both leaders take two microseconds less."""
    first = [(0, 19.0), (1, 20.0), (2, 24.0), (3, 10.0)]
    turns = [(0, 18.0), (1, 17.0)]
    rows = read(
        small_data,
        [
            *[(k, "first", "ok", us) for k, us in first],
            *[(k, "leader", "ok", us) for k, us in turns],
            *[(1, "retry", "ok", 5.0)],  # later, but alone
        ],
    )
    for order in (rows, rows[::-1]):
        data = from_measurements(order)
        # 2 is as much slower as it was; 3, about half as long, is moved about half as far.
        expected = [18.0, 17.0, 22.0, round(10.0 - 2.0 * 10.0 / 19.5, 6)]
        assert times(small_data, data, data.time_us) == expected
        assert times(small_data, data, data.again_us) == [18.0, 17.0, None, None]


def contests(data: Dataset, *turns: dict[int, float]) -> list[Measurement]:
    """Rows of contests one after the other, under policies of their own and equal attempts."""
    rows = []
    for number, times_us in enumerate(turns):
        policy = Policy(rounds=5 + number)
        setting = Setting(arch="gfx950", device="d", toolchain="t", policy=policy)
        rows += [
            Measurement.of(
                *(data.problems[0], data.kernels[k], setting),
                status="ok",
                time_us=us,
                stage="leader",
                run_id=f"2026010{number}",
            )
            for k, us in times_us.items()
        ]
    return rows


def test_what_was_read_in_turn_twice_tells_the_noise(
    small_data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three contests the first two share most; what was in one of them only tells nothing."""
    turns = ({0: 7.0, 1: 6.0, 2: 9.0}, {0: 7.5, 1: 5.5, 2: 9.5, 3: 8.0}, {0: 7.0, 3: 8.5})
    rows = contests(small_data, *turns)
    few = from_measurements(rows)
    assert times(small_data, few, few.first_us)[0] == 7.0
    monkeypatch.setattr("tilewise.learn.readings.SECOND_CONTESTS", 1)
    for order in (rows, rows[::-1]):
        data = from_measurements(order)
        assert times(small_data, data, data.first_us) == [7.0, 6.0, 9.0, None]
        assert times(small_data, data, data.again_us) == [7.5, 5.5, 9.5, None]


def test_on_a_cpu_the_shortest_call_counts_of_readings_taken_alone(small_data: Dataset) -> None:
    """What disturbs a CPU slows it; in turn, all are disturbed alike and the median is taken."""
    problem, kernel = small_data.problems[0], small_data.kernels[0]
    for arch, stage, expected in (
        *[("x86_avx2", "first", 4.0), ("x86_avx2", "leader", 6.0)],
        *[("gfx950", "first", 6.0), ("gfx950", "leader", 6.0)],
    ):
        setting = Setting(arch=arch, device="d", toolchain="t", policy=Policy())
        row = Measurement.of(
            problem, kernel, setting, status="ok", time_us=6.0, min_us=4.0, stage=stage
        )
        assert from_measurements([row]).time_us.tolist() == [expected]
        assert from_measurements([replace(row, min_us=None)]).time_us.tolist() == [6.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"problem": "{x"}, "problem is not a JSON object: '{x'"),
        ({"problem": "[]"}, "not a JSON object"),
        ({"problem": ""}, "problem is not a JSON object"),
        ({"problem": '{"M": -1}'}, "'n' and 'k'"),
        ({"kernel_fields": ""}, "kernel_fields is not a JSON object"),
        ({"kernel_fields": '{"engine": "nope"}'}, "nope"),
        ({"labels": "{x"}, "labels"),
        ({"kernel_fields": "nope"}, "kernel_fields"),
        ({"tactic": "{x"}, "tactic"),
        ({"time_us": 0.0}, "time_us of 0"),
        ({"time_us": -1.0}, "time_us of -1"),
        ({"time_us": float("inf")}, "time_us of inf"),
        ({"min_us": 0.0}, "min_us of 0"),
    ],
)
def test_damaged_rows_are_refused_by_name(
    small_data: Dataset, changes: dict[str, Any], says: str
) -> None:
    setting = Setting(arch="gfx950", device="d", toolchain="t", policy=Policy())
    row = Measurement.of(
        small_data.problems[0], small_data.kernels[0], setting, status="ok", time_us=6.0
    )
    with pytest.raises(InputError, match=re.escape(says)) as raised:
        from_measurements([replace(row, **changes)])
    assert row.key[:16] in str(raised.value)


def test_unsteady_readings_are_left_out_on_a_gpu_only(small_data: Dataset) -> None:
    """A CPU shared with others is never steady; without such readings none would be left."""
    problem, kernel = small_data.problems[0], small_data.kernels[0]
    for arch, kept in (("x86_avx2", [6.0]), ("gfx950", [])):
        setting = Setting(arch=arch, device="d", toolchain="t", policy=Policy())
        row = Measurement.of(problem, kernel, setting, status="ok", time_us=6.0, spread_us=3.0)
        other = Measurement.of(
            problem, small_data.kernels[1], setting, status="ok", time_us=7.0, spread_us=0.1
        )
        assert from_measurements([row, other]).time_us.tolist() == [*kept, 7.0]


def test_readings_compare_however_often_they_were_taken(small_data: Dataset) -> None:
    """A policy's repeats are no part of what is timed; whether the cache is cold is."""
    problem = small_data.problems[0]
    policies = (Policy(), Policy(noise=0.5, rounds=9, time_ms=9.0), Policy(cache="cold"))
    rows = [
        Measurement.of(
            problem,
            kernel,
            Setting(arch="gfx950", device="d", toolchain="t", policy=policy),
            status="ok",
            time_us=6.0,
        )
        for kernel, policy in zip(small_data.kernels[:3], policies, strict=True)
    ]
    assert len(from_measurements(rows)) == 2


def test_several_contests_count_together_at_the_pace_of_the_last(small_data: Dataset) -> None:
    """The second ran half as fast. Kernel 2 was in the first only, kernel 3 in the second."""
    rows = contests(small_data, {0: 10.0, 1: 11.0, 2: 15.0}, {0: 20.0, 1: 22.0, 3: 26.0})
    for order in (rows, rows[::-1]):
        data = from_measurements(order)
        assert times(small_data, data, data.time_us) == [20.0, 22.0, 30.0, 26.0]
    # Where they do not agree, the mean counts.
    rows[1] = replace(rows[1], time_us=11.0 * 1.21)
    data = from_measurements(rows)
    found = times(small_data, data, data.time_us)
    assert found[:2] == pytest.approx([20.0 / 1.1**0.5, 22.0 * 1.1**0.5])
    assert found[2:] == pytest.approx([30.0 / 1.1, 26.0])


def test_contests_are_chained_and_strangers_left_alone(small_data: Dataset) -> None:
    """Each contest shares a kernel with the next and is half as fast; the last shares none."""
    rows = contests(small_data, {0: 10.0, 1: 20.0}, {1: 40.0, 2: 20.0}, {2: 40.0, 3: 10.0})
    data = from_measurements(rows)
    assert times(small_data, data, data.time_us) == pytest.approx([40.0, 80.0, 40.0, 10.0])
    stranger = from_measurements([*contests(small_data, {0: 10.0}, {1: 5.0})])
    assert times(small_data, stranger, stranger.time_us) == [10.0, 5.0]


def bands(*means: float, analytic: float = 95.0) -> list[dict[str, Any]]:
    return [
        {"octaves": [i / 2, (i + 1) / 2], "mean": mean, "analytic": analytic}
        for i, mean in enumerate(means)
    ]


def test_reach_ends_where_the_analytic_model_is_as_good() -> None:
    assert reach(bands(99, 98.5, 97, 96.5, 90, 99)) == 2.0
    assert reach(bands(99, 98.5, 97, 96.5, 90, 80, 99, analytic=83)) == 2.5
    assert reach(bands(99, 98.5, 94, 92, 90.1, 89.9, analytic=90)) == 2.5
    assert reach(bands(99, 90)) == LEAST
    assert reach(bands(*[99] * 30)) == MOST
    assert reach([]) == LEAST


def test_evidence_by_distance_joins_thin_bands() -> None:
    far = np.r_[np.full(20, 0.1), np.full(3, 0.7), np.full(9, 1.2), 5.0]
    good = np.r_[np.full(20, 1.0), np.full(3, 0.6), np.full(9, 0.9), 0.1]
    found = by_distance(far, good, good)
    assert [b["octaves"] for b in found] == [[0.0, 0.5], [0.5, 1.5]]
    assert [b["problems"] for b in found] == [20, 12]
    assert found[1]["mean"] == pytest.approx(100 * (3 * 0.6 + 9 * 0.9) / 12, abs=0.01)


def test_a_trained_model_says_how_far_it_reaches(small_trained: Any) -> None:
    model = small_trained.model
    assert LEAST <= model.measured.reach <= MOST
    assert model.measured.reach == reach(model.metrics["by_distance"])
    assert model.metrics["by_distance"][-1]["octaves"][1] > 1


def test_regions_are_apart() -> None:
    points = np.array([[0.0, 0], [0, 1], [9, 0], [9, 1], [0, 20]])
    region = regions(points, 3)
    assert region[0] == region[1]
    assert region[2] == region[3]
    assert len(set(region.tolist())) == 3
    assert nearest_outside(points, region, np.arange(5) != 3).tolist() == [9, 9, 9, np.inf, 19]


def test_trained_problems_are_judged_out_of_fold(small_data: Dataset, small_model: Path) -> None:
    seen = evaluate(small_model, small_data)
    assert seen.unseen == 0
    assert seen.out_of_fold == len(small_data.problems)
    expected = load_model(small_model).metrics["efficiency"]["mean"]
    report = seen.to_dict()
    assert report["efficiency"]["mean"] == pytest.approx(expected)
    assert len(report["worst"]) == 10
    wanted = {"shape", "layout", "pipeline", "groups", "network"}
    assert wanted <= set(report["slices"])
    for groups in report["slices"].values():
        assert sum(g["problems"] for g in groups.values()) == len(small_data.problems)
    assert all(w["why"] for w in report["worst"])
    fresh = synthetic("gemm", arch=load_arch("gfx950"), problems=12, kernels=20, seed=9)
    other = evaluate(small_model, fresh)
    assert other.unseen == 12


def test_problems_of_which_only_promising_kernels_were_measured_judge_nothing(
    small_data: Dataset, small_model: Path
) -> None:
    top = replace(small_data, labels=tuple({**x, "top": 8} for x in small_data.labels))
    with pytest.raises(InputError, match=r"none of the \d+ problems can judge .* without --top"):
        evaluate(small_model, top)
    with pytest.raises(InputError, match=r"0 kinds of 'shape'"):
        leave_one_out(top, "shape")


def test_a_group_without_whole_problems_is_learned_and_not_left_out(small_data: Dataset) -> None:
    half = len(small_data.problems) // 3
    kinds = ["a"] * half + ["b"] * half + ["c"] * (len(small_data.problems) - 2 * half)
    labels = tuple({"kind": k, **({"top": 8} if k == "c" else {})} for k in kinds)
    found = leave_one_out(replace(small_data, labels=labels), "kind", QUICK)
    assert sorted(found) == ["a", "all", "b"]
    assert found["all"]["problems"] == 2 * half


def test_the_worst_choices_say_why() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=4, kernels=3, noise=0.0)
    times = np.tile([10.0, 15.0, 30.0], 4)
    predicted = np.array([[20, 15, 30], [10, 5, 30], [10.1, 10, 30], [12, 11, 30.0]]).ravel()
    spread = np.repeat([0.0, 0.0, 0.0, 4.0], 3)
    made = replace(data, time_us=times, spread_us=spread)
    found = {str(w["problem"]): w["why"] for w in worst(made, judge(made, -predicted), predicted)}
    assert [found[str(p.to_dict())] for p in data.problems] == [
        "the best kernel was predicted 2.00 times as slow as it is",
        "the chosen kernel was predicted 3.00 times as fast as it is",
        "they were predicted 1.0 % apart, which is almost a tie",
        "their times differ by less than the noise",
    ]


def test_shapes_have_families() -> None:
    gemm = [(1, 64, 64), (16, 512, 64), (64, 64, 4096), (300, 333, 64), (64, 64, 64), (4096,) * 3]
    names = ["vector", "skinny", "deep", "odd", "small", "large"]
    assert [shape_family(GemmProblem(m=m, n=n, k=k)) for m, n, k in gemm] == names
    layer = {"n": 1, "c": 64, "k": 64, "h": 28, "w": 28, "y": 3, "x": 3}
    conv = [
        {},
        {"g": 64},
        {"g": 4},
        {"y": 1, "x": 1},
        {"stride_h": 2},
        {"dilation_w": 2},
        {"z": 3, "d": 9},
    ]
    names = ["dense", "depthwise", "grouped", "pointwise", "strided", "dilated", "3-D"]
    assert [shape_family(ConvProblem(**{**layer, **c})) for c in conv] == names


def test_leaving_one_family_out(small_data: Dataset) -> None:
    labels = tuple({"family": "even" if i % 2 else "odd"} for i in range(len(small_data.problems)))
    report = leave_one_out(replace(small_data, labels=labels), "family", QUICK)
    assert set(report) == {"all", "even", "odd"}
    assert report["even"]["problems"] + report["odd"]["problems"] == report["all"]["problems"]
    assert "analytic_mean" in report["odd"]
    by_shape = leave_one_out(small_data, "shape", QUICK)
    assert len(by_shape) > 2
    with pytest.raises(InputError, match="leaving one out takes two"):
        leave_one_out(small_data, "family", QUICK)


def test_comparison_follows_its_rules(small_data: Dataset, small_model: Path) -> None:
    same = compare(small_model, small_model, small_data)
    assert same["passed"]
    assert same["worse"] == 0
    good = evaluate(small_model, small_data)
    bad = replace(good, score=-good.score)
    verdict = compare_evaluations(good, bad)
    assert not verdict["passed"]
    assert verdict["fallen"]
    # A single problem that falls far is enough to fail, even where the averages hold.
    one = good.score.copy()
    one[small_data.problem_index == 0] *= -1
    verdict = compare_evaluations(good, replace(good, score=one))
    assert [c["passed"] for c in verdict["checks"]][-1] is False


def test_a_mix_of_ops_must_be_chosen_from(small_data: Dataset) -> None:
    setting = Setting(arch="gfx950", device="d", toolchain="t", policy=Policy())
    other = synthetic("conv_fwd", arch=load_arch("gfx950"), problems=2, kernels=2)
    rows = [
        Measurement.of(d.problems[0], d.kernels[0], setting, status="ok", time_us=3.0)
        for d in (small_data, other)
    ]
    with pytest.raises(InputError, match="mix op conv_fwd, gemm"):
        from_measurements(rows)
    assert len(from_measurements(rows, op="gemm")) == 1
    with pytest.raises(InputError, match="no measurements are left"):
        from_measurements(rows, op="conv_bwd_data")


def test_summary_of_nothing() -> None:
    data = synthetic("gemm", arch=load_arch("gfx950"), problems=2, kernels=3)
    assert summary(judge(data, data.time_us, np.zeros(len(data), bool))) == {"problems": 0}
