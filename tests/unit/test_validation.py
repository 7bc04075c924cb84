"""Judging selections by measurements: contests, failures, noise, and what a summary says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.judge.verdicts import geomean, judge, percentages, summarise, why_unjudged
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel

PROBLEM = GemmProblem(m=64, n=64, k=64)
SETTING = Setting(arch="x86_avx2", device="a CPU", toolchain="g++", policy=Policy())
A, B, C = load_pool(get_op("gemm"), load_arch("x86_avx2"), ["cpu"])[:3]
VENDOR = VendorKernel(op_name="gemm", library="torch")


def row(kernel: object, us: float | None, **values: object) -> Measurement:
    status = str(values.pop("status", "ok" if us else "crash"))
    given = {"time_us": us, "spread_us": us and 0.1 * us, "repeats": 9, **values}
    return Measurement.of(PROBLEM, kernel, SETTING, status=status, **given)  # type: ignore[arg-type]


def turn(kernel: object, us: float, when: float = 2.0) -> Measurement:
    return row(kernel, us, stage="leader", attempt=1, measured_at=when, run_id="run")


def test_times_of_one_contest_are_compared() -> None:
    rows = [row(A, 90.0), row(B, 100.0), row(C, 95.0), row(VENDOR, 150.0)]
    rows += [turn(A, 110.0), turn(B, 100.0), turn(VENDOR, 160.0)]
    verdict = judge(PROBLEM, "model", [A, C, B], rows)
    assert verdict is not None
    assert (verdict.chosen, verdict.best) == (A.name, B.name)
    assert verdict.efficiency == pytest.approx(100 / 110)
    assert verdict.vs_vendor == pytest.approx(160 / 110)
    assert verdict.place == 3
    assert verdict.kernels == 4
    # The first pass held A for the fastest; measured again it reached this much.
    assert verdict.again == pytest.approx(100 / 110)
    assert verdict.spread == pytest.approx(0.1)


def test_an_earlier_contest_counts_where_the_choice_took_part_in_it() -> None:
    rows = [turn(A, 100.0, 1.0), turn(B, 90.0, 1.0), turn(B, 50.0, 2.0), turn(C, 60.0, 2.0)]
    by_a = judge(PROBLEM, "model", [A], rows)
    by_c = judge(PROBLEM, "model", [C], rows)
    assert by_a is not None and by_c is not None
    assert by_a.efficiency == pytest.approx(0.9)
    assert by_c.efficiency == pytest.approx(50 / 60)


def test_a_contest_is_among_kernels_whose_right_result_holds() -> None:
    wrong = row(C, 10.0, status="wrong_result", attempt=2, measured_at=2.0, stage="leader")
    timed = [row(A, 90.0), row(B, 100.0), row(C, 80.0), turn(A, 110.0), turn(B, 100.0)]
    for rows in ([*timed, turn(C, 60.0), wrong], [*timed, replace(wrong, run_id="run")]):
        verdict = judge(PROBLEM, "model", [A, B], rows)
        assert verdict is not None
        assert (verdict.best, verdict.kernels) == (B.name, 2)
        assert verdict.efficiency == pytest.approx(100 / 110)
        assert verdict.again == pytest.approx(100 / 110)
        failed = judge(PROBLEM, "model", [C, B], rows)
        assert failed is not None
        assert (failed.chosen, failed.chosen_us) == (C.name, None)
    crashed = judge(PROBLEM, "model", [A], [*timed, row(A, None, attempt=2)])
    assert crashed is not None
    assert crashed.chosen_us == 110.0  # a crash later on does not undo a right result


def test_without_contests_the_first_pass_holds() -> None:
    verdict = judge(PROBLEM, "analytic", [B, A], [row(A, 50.0), row(B, 100.0)])
    assert verdict is not None
    assert verdict.efficiency == 0.5
    assert (verdict.vendor, verdict.vs_vendor, verdict.again) == (None, None, None)


def test_failures_count_unless_the_dispatcher_would_pass_them_over() -> None:
    rows = [row(A, None, status="compile_error"), row(B, 100.0), row(C, None)]
    passed = judge(PROBLEM, "model", [A, B, C], rows)
    failed = judge(PROBLEM, "model", [C, B], rows)
    assert passed is not None and failed is not None
    assert (passed.chosen, passed.efficiency) == (B.name, 1.0)
    assert (failed.chosen, failed.efficiency, failed.vs_vendor) == (C.name, 0.0, None)
    assert dict(failed.failures) == {"compile_error": 1, "crash": 1}
    assert judge(PROBLEM, "model", [C], [row(C, None)]) is None


def test_what_is_not_judged_says_why() -> None:
    """By the rows that hold: a right result that a later one proved wrong is none."""
    right, wrong = row(A, 50.0), row(A, None, status="wrong_result", attempt=1)
    for ranking, rows, why in (
        ([A], [], "nothing was measured"),
        ([], [right], "of the kernels that gave a right result none can be chosen"),
        ([A, C], [right, wrong, row(C, None), row(C, None, attempt=1)], "(crash, wrong_result)"),
    ):
        assert judge(PROBLEM, "model", ranking, rows) is None
        assert why in why_unjudged(rows)


def test_a_summary_of_verdicts() -> None:
    good = judge(PROBLEM, "model", [A, B], [turn(A, 50.0), turn(B, 60.0), turn(VENDOR, 100.0)])
    bad = judge(PROBLEM, "analytic", [B, A], [row(A, 50.0), row(B, 100.0), row(VENDOR, 50.0)])
    assert good is not None and bad is not None
    found = summarise([good, bad], unjudged=3)
    assert found["efficiency"] == {"mean": 75.0, "median": 75.0, "p10": 55.0, "min": 50.0}
    assert (found["top1"], found["top3"], found["unjudged"]) == (50.0, 100.0, 3)
    low, high = found["vs_vendor_interval"]  # twice as fast, and half as fast
    assert low < 1 < high
    assert found["vs_vendor"] is None  # and nobody can say
    assert summarise([good, good])["vs_vendor"] == 2.0
    assert found["paths"] == {"model": 1, "analytic": 1}
    assert found["noise"] == pytest.approx(0.1)
    nothing = summarise([])
    assert (nothing["efficiency"], nothing["vs_vendor"], nothing["noise"]) == (None, None, None)


def test_means_of_nothing() -> None:
    assert percentages([]) is None
    assert geomean([None, 0.0]) is None
    assert geomean([2.0, None, 8.0]) == 4.0
