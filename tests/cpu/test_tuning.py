"""`tune` times what a model computes; the plan file it writes chooses from then on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tilewise as tw
from tilewise.cli.app import app
from tilewise.core import plain_files
from tilewise.core.arch import load_arch
from tilewise.core.plain_files import one_at_a_time
from tilewise.dispatch import default_dispatcher
from tilewise.engines.device import detect
from tilewise.errors import FileError, InputError, TilewiseError
from tilewise.judge import trials
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.selection.measured import read_plan, section_of, write_plan

PROBLEM = GemmProblem(m=4, n=16, k=32, layout="rcr")
VENDOR = "gemm_vendor_torch"


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TILEWISE_PLAN", raising=False)
    yield
    tw.use_plan(None)


def ours() -> str:
    """Some kernel of ours that serves the problem."""
    ranking = default_dispatcher("gemm", detect("cpu")).select(PROBLEM).ranking
    return next(r.kernel.name for r in ranking if r.kernel.engine == "cpu")


@pytest.mark.parametrize("is_vendor", [False, True])
def test_a_plan_file_chooses(tmp_path: Path, is_vendor: bool) -> None:
    mine = ours()
    times = {mine: 9.0 if is_vendor else 5.0, VENDOR: 5.0 if is_vendor else 9.0}
    write_plan(tmp_path / "plan.json", detect("cpu"), {PROBLEM: times})
    tw.use_plan(tmp_path / "plan.json")
    choice = tw.select(PROBLEM)
    assert choice.path == "measured"
    assert choice.kernel.name == (VENDOR if is_vendor else mine)
    assert default_dispatcher("gemm", detect("cpu")).vendor_us(PROBLEM) == times[VENDOR]
    assert tw.select(GemmProblem(m=5, n=16, k=32, layout="rcr")).path != "measured"


@pytest.mark.parametrize("dtype", ["bf16", "gpu", "none"])
def test_a_plan_without_times_of_what_can_serve_leaves_the_choice_to_others(
    tmp_path: Path, dtype: str
) -> None:
    """Any of those would be first among equals that were never timed."""
    arch = load_arch("sm_90:H200") if dtype == "gpu" else detect("cpu")
    pool = load_pool(get_op("gemm"), arch)
    names = [k.name for k in pool if dtype != "none" and k.to_dict().get("dtype") == "bf16"]
    write_plan(tmp_path / "plan.json", detect("cpu"), {PROBLEM: dict.fromkeys(names, 1.0)})
    usual = tw.select(PROBLEM)
    tw.use_plan(tmp_path / "plan.json")
    choice = tw.select(PROBLEM)
    assert (choice.kernel, choice.path) == (usual.kernel, usual.path) != (None, "measured")
    assert "no kernel that can serve was timed" in choice.reason
    assert default_dispatcher("gemm", detect("cpu")).vendor_us(PROBLEM) is None


def test_a_model_is_tuned_and_served_by_what_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)).train()
    image = torch.randn(2, 3, 8, 8)
    times = tw.tune(model, image, plan=tmp_path / "plan.json", top=1)
    assert {p.op for p in times} == {"gemm", "conv_fwd", "conv_bwd_weight"}
    assert all(len(of) == 2 for of in times.values())
    assert all(p.grad is None for p in model.parameters())
    for problem, of in times.items():
        choice = tw.select(problem)
        assert choice.path == "measured"
        assert of[choice.kernel.name] <= min(of.values()) * 1.03
    head, *lines = str(times).splitlines()
    assert head.split() == ["us", "PyTorch", "us", "fastest", "kernel", "problem"]
    for line, (problem, of) in zip(lines, times.items(), strict=True):
        best = min(of, key=lambda name: of[name])
        assert line.split()[:2] == [f"{of[best]:.1f}", f"{of[f'{problem.op}_vendor_torch']:.1f}"]
        assert best in line and problem.dtype in line
    held = json.loads((tmp_path / "plan.json").read_text())
    (section,) = held["sections"]
    assert section["versions"]["tilewise"] == tw.__version__
    assert len(section["problems"]) == len(times)


def test_patched_layers_go_by_measured_times(tmp_path: Path) -> None:
    layer, x = tw.patch(nn.Linear(32, 16)), torch.randn(4, 32)
    with torch.no_grad():
        layer(x)
        for theirs_us, is_ours in ((1e4, True), (1.0, False)):
            plan = tmp_path / f"{is_ours}.json"
            write_plan(plan, detect("cpu"), {PROBLEM: {ours(): 50.0, VENDOR: theirs_us}})
            tw.use_plan(plan)
            layer(x)
            assert tw.layers(layer)[-1].served.is_ours == is_ours


def test_files_keep_what_others_timed(tmp_path: Path) -> None:
    path, arch = tmp_path / "plan.json", detect("cpu")
    write_plan(path, arch, {PROBLEM: {VENDOR: 3.0}})
    held = json.loads(path.read_text())
    held["sections"].append({**section_of(arch), "device": "another", "problems": []})
    path.write_text(json.dumps(held))
    other = GemmProblem(m=7, n=7, k=7)
    write_plan(path, arch, {other: {VENDOR: 2.0}})
    assert read_plan(path, arch) == {PROBLEM: {VENDOR: 3.0}, other: {VENDOR: 2.0}}
    assert len(json.loads(path.read_text())["sections"]) == 2


def test_nothing_is_lost_where_several_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_files, "MOST_WAIT_S", 600.0)  # disks may be slow
    path, arch = tmp_path / "plan.json", detect("cpu")
    problems = [GemmProblem(m=m, n=7, k=7) for m in range(1, 9)]
    with ThreadPoolExecutor(len(problems)) as crew:
        list(crew.map(lambda problem: write_plan(path, arch, {problem: {VENDOR: 2.0}}), problems))
    assert set(read_plan(path, arch)) == set(problems)
    assert list(tmp_path.iterdir()) == [path]


def test_who_holds_a_folder_does_not_stop_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_files, "MOST_WAIT_S", 0.0)
    path, arch = tmp_path / "plan.json", detect("cpu")
    with one_at_a_time(tmp_path):
        write_plan(path, arch, {PROBLEM: {VENDOR: 3.0}})
    assert set(read_plan(path, arch)) == {PROBLEM}


def test_times_of_other_versions_do_not_count(tmp_path: Path) -> None:
    path, arch = tmp_path / "plan.json", detect("cpu")
    write_plan(path, arch, {PROBLEM: {VENDOR: 3.0}})
    path.write_text(path.read_text().replace(tw.__version__, "0.0.0"))
    assert read_plan(path, arch) == {}


BROKEN: dict[str, Any] = {
    "text": "{",
    "list": "[]",
    "schema": '{"schema": 99, "sections": []}',
    "sections": '{"schema": 1, "sections": [3]}',
    "doubled": '{"schema": 2, "schema": 1, "sections": []}',
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_left_out(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(BROKEN[name])
    with pytest.raises(FileError):
        read_plan(path, detect("cpu"))
    tw.use_plan(path)
    assert tw.select(PROBLEM).path != "measured"
    assert "the plan file is left out" in caplog.text


def test_a_plan_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(FileError, match="not a regular file"):
        read_plan(tmp_path / "plan.json", detect("cpu"))


@pytest.mark.parametrize("us", [-1.0, 0, float("nan"), "fast", True, 10**400])
def test_what_is_no_time_is_refused(tmp_path: Path, us: Any) -> None:
    path, arch = tmp_path / "plan.json", detect("cpu")
    row = {"problem": PROBLEM.to_dict(), "us": {VENDOR: us}}
    sections = [{**section_of(arch), "problems": [row]}]
    path.write_text(json.dumps({"schema": 1, "sections": sections}))
    with pytest.raises(FileError, match="no time"):
        read_plan(path, arch)


def test_nothing_waits_for_a_pipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "plan.json")
    tw.use_plan(tmp_path / "plan.json")
    assert tw.select(PROBLEM).path != "measured"
    assert "not a regular file" in caplog.text


def test_what_cannot_be_added_to_is_known_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_timed", lambda *_: pytest.fail("timed for nothing"))
    (tmp_path / "file").write_text("no plan")
    torn = {**section_of(detect("cpu")), "problems": [{"problem": {}}]}
    (tmp_path / "torn").write_text(json.dumps({"schema": 1, "sections": [torn]}))
    paths = [tmp_path / "file", tmp_path / "file" / "plan.json", tmp_path / "torn"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    paths += [Path("/dev/null"), Path("/proc/nosuch/plan.json"), Path("x" * 300), tmp_path / "loop"]
    for path in paths:
        with pytest.raises(FileError):
            tw.tune(nn.Linear(32, 16), torch.randn(4, 32), plan=path)
    problems = tmp_path / "problems.csv"
    problems.write_text("M,N,K\n4,16,32\n")
    words = ["tune", "--op", "gemm", "--problems", str(problems), "--out", str(tmp_path / "file")]
    assert isinstance(CliRunner().invoke(app, words).exception, FileError)


def test_a_disk_that_fills_leaves_the_old_plan_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, arch = tmp_path / "plan.json", detect("cpu")
    write_plan(path, arch, {PROBLEM: {VENDOR: 3.0}})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left"):
        write_plan(path, arch, {PROBLEM: {VENDOR: 2.0}})
    assert list(tmp_path.iterdir()) == [path]
    assert read_plan(path, arch) == {PROBLEM: {VENDOR: 3.0}}


def test_kernels_that_fail_in_turn_keep_the_times_they_had_alone() -> None:
    class Bench:
        def run(self, kernel: str, problem: Any, launched: Any) -> Any:
            timing = type("Timing", (), {"time_us": 2.0})
            return type("Outcome", (), {"status": "ok", "timing": timing})

        def run_in_turn(self, kernels: list[str], problem: Any, launched: Any) -> list[Any]:
            raise RuntimeError("once more was too much")

        def failed(self, failure: Exception, phase: str) -> None:
            assert "too much" in str(failure)

    class Name(str):
        name = property(str)

    assert trials._timed(Bench(), PROBLEM, [Name("one")]) == {"one": 2.0}  # type: ignore[arg-type, list-item]


def test_kernels_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bench:
        def run(self, kernel: str, problem: Any, launched: Any) -> Any:
            return type("Outcome", (), {"status": "ok" if kernel == "good" else "wrong_result"})

        def run_in_turn(self, kernels: list[str], problem: Any, launched: Any) -> list[Any]:
            assert [kernel.name for kernel in kernels] == ["good"]
            return [type("Outcome", (), {"timing": type("Timing", (), {"time_us": 2.0})})]

    class Name(str):
        name = property(str)

    found = trials._timed(Bench(), PROBLEM, [Name("good"), Name("bad")])  # type: ignore[arg-type, list-item]
    assert found == {"good": 2.0}


def test_the_command(tmp_path: Path) -> None:
    problems = tmp_path / "problems.csv"
    problems.write_text("M,N,K\n4,16,32\n")
    plan = tmp_path / "plan.json"
    words = ["tune", "--op", "gemm", "--problems", str(problems), "--out", str(plan), "--top", "1"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["kernel"] in row["us"]
    assert len(read_plan(plan, detect("cpu"))) == 1


def test_what_is_not_here_is_not_timed(tmp_path: Path) -> None:
    problems = tmp_path / "problems.csv"
    problems.write_text("M,N,K\n4,16,32\n")
    words = ["tune", "--op", "gemm", "--problems", str(problems), "--out", str(tmp_path / "plan")]
    assert isinstance(
        CliRunner().invoke(app, [*words, "--arch", "gfx950"]).exception, TilewiseError
    )


@pytest.mark.parametrize("top", [0, -1, 1.5, "3", None])
def test_what_counts_no_kernels_is_refused(tmp_path: Path, top: Any) -> None:
    """Every kernel of the pool was timed."""
    with pytest.raises(InputError, match="at least 1 kernel"):
        tw.tune(nn.Linear(4, 4), torch.ones(2, 4), plan=tmp_path / "plan.json", top=top)


def test_only_models_are_tuned() -> None:
    with pytest.raises(InputError, match="not a model"):
        tw.tune([])  # type: ignore[arg-type]
