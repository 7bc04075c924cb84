"""Figures travel with measurements: rows carry them, training and prediction use them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.identity import canonical_json
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.model import load_model
from tilewise.data.schema import conform, from_table, to_table
from tilewise.dispatch import default_registry
from tilewise.errors import InputError
from tilewise.learn.dataset import from_measurements
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.fields import figures, recorded_arch
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.selection.models import SHIPPED
from tilewise.selection.selector import how_different
from tilewise.sweep.device_info import DeviceInfo
from tilewise.sweep.plan import make_plan

FILE = load_arch("x86_avx512")
ELSEWHERE = FILE.with_figures(
    device="a CPU elsewhere", compute_units=3, clock_mhz=2100, memory_gb_s=31.0
)
KERNEL = load_pool(get_op("gemm"), FILE)[0]
CONVOLUTION = {"N": 2, "C": 64, "K": 96, "G": 1, "Hi": 28, "Wi": 28, "Y": 3, "X": 3}


def rows(text: str, policy: Policy | None = None) -> list[Measurement]:
    setting = Setting(
        arch=FILE.name,
        device="a CPU elsewhere",
        toolchain="g++",
        policy=policy or Policy(),
        figures=text,
    )
    return [
        Measurement.of(GemmProblem(m=m, n=8, k=8), KERNEL, setting, status="ok", time_us=float(m))
        for m in (8, 16)
    ]


def test_a_sweep_writes_the_figures_of_its_device() -> None:
    device = DeviceInfo(arch=ELSEWHERE, toolchains={"cpu": {"gemm": "g++"}}, unavailable={})
    plan = make_plan([GemmProblem(m=8, n=8, k=8)], [KERNEL], device, Policy())
    written = json.loads(plan.settings[0].figures)
    assert (written["compute_units"], written["clock_mhz"]) == (3, 2100)


def test_training_uses_the_figures_of_the_rows() -> None:
    data = from_measurements(rows(canonical_json(figures(ELSEWHERE))), op="gemm")
    assert figures(data.arch) == figures(ELSEWHERE)
    assert figures(data.arch) != figures(FILE)


def test_rows_without_figures_are_taken_for_the_threads_they_were_timed_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The whole processor of the file made times 20 times wrong."""
    with caplog.at_level(logging.WARNING):
        data = from_measurements(rows("", Policy(threads=1)), op="gemm")
    assert data.arch.compute_units == 1
    assert data.arch.peak_tflops["fp32"] == pytest.approx(
        FILE.peak_tflops["fp32"] / FILE.compute_units
    )
    assert "do not carry the figures" in caplog.text


def test_figures_are_no_part_of_a_key_and_old_shards_lack_them() -> None:
    old, new = rows("")[0], rows(canonical_json(figures(ELSEWHERE)))[0]
    assert old.key == new.key
    table = to_table([new]).drop_columns(["figures"])
    (read,) = from_table(conform(table, "a shard", to_table([new]).column_names))
    assert read == replace(new, figures="")


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"nosuch": 1}', '{"compute_units": "many"}', '{"compute_units": -1}'],
)
def test_figures_are_data(text: str) -> None:
    with pytest.raises(InputError):
        recorded_arch(FILE.name, "a CPU", text)


def test_a_device_unlike_the_trained_one_is_told() -> None:
    model = load_model(Path(SHIPPED) / "x86_avx512_gemm_fp32")
    assert how_different(model, model.trained_on) is None
    told = how_different(model, model.trained_on.with_figures(compute_units=64))
    assert told is not None
    assert "64 units instead of 1" in told


def test_a_choice_tells_where_the_device_differs() -> None:
    trained = load_model(Path(SHIPPED) / "x86_avx512_gemm_fp32").trained_on
    problem = GemmProblem(m=256, n=256, k=256)
    for arch, is_told in ((trained, False), (trained.with_figures(compute_units=64), True)):
        choice = default_registry("gemm", arch).select(problem)
        assert choice.path == "model"
        assert ("64 units instead of 1" in choice.reason) == is_told


@pytest.mark.parametrize("op", ["gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
@pytest.mark.parametrize("threads", [1, 2])
def test_pytorchs_routine_is_a_candidate_on_every_cpu(op: str, threads: int) -> None:
    """Where nobody had measured it, it came last, at a time that nothing takes."""
    arch = FILE.with_figures(compute_units=threads, max_threads_per_block=threads)
    sizes = {"M": 96, "N": 200, "K": 300} if op == "gemm" else CONVOLUTION
    problem = get_op(op).make_problem(**sizes)
    dispatcher = default_registry(op, arch).dispatcher
    choice = dispatcher.select(problem)
    assert choice.path == "model"
    us = dispatcher.vendor_us(problem)
    assert us is not None
    assert us < 100 * choice.predicted_us
