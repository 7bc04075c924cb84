"""The demo: its words claim no more than was seen, and a GPU cannot end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise.cli import demo, demo_gpu
from tilewise.cli.demo import DemoRow, gpu_verdict, tally, verdict
from tilewise.cli.session import Session
from tilewise.engines.device import detect
from tilewise.engines.toolchain import cache_folder
from tilewise.errors import MachineError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem

ROOT = Path(__file__).resolve().parents[2]
SMALL = (GemmProblem(m=32, n=48, k=40), ConvProblem(n=1, c=8, k=8, h=8, w=8, y=3, x=3))


def test_choices_are_run_checked_and_timed_by_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """What a GPU is put through, on the device that is here."""
    found = demo_gpu.live(SMALL, policy="quick", arch=detect("cpu").name)
    assert (found["why_not"], found["wrong"], found["unjudged"]) == (None, 0, 0)
    assert [row["op"] for row in found["rows"]] == ["gemm", "conv_fwd"]
    assert all(row["us"] > 0 for row in found["rows"])
    told = capsys.readouterr().out
    assert "conv_fwd N=1 C=8" in " ".join(told.split())
    assert "2 of 2 results are right" in gpu_verdict(found)


def test_a_gpu_that_fails_does_not_end_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise MachineError("the driver is older than the library")

    monkeypatch.setattr(Session, "executor", fails)
    found = demo_gpu.live(SMALL[:1], policy="quick", arch=detect("cpu").name)
    assert "the driver is older" in found["why_not"]
    assert "gemm could not be tried" in capsys.readouterr().out
    assert gpu_verdict(found).startswith("Nothing ran on a GPU here")


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("PyTorch is not installed; `pip install 'tilewise[gpu]'`", "pip install 'tilewise[gpu]'"),
        ("PyTorch 2.13 sees no device", "PyTorch 2.13 sees no device"),
        (None, None),
    ],
)
def test_it_says_why_no_gpu_is_used(
    why: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_gpu, "why_no_gpu", lambda: why)
    found = demo_gpu.why_not()
    assert found is None if told is None else told in str(found)


def test_words_count_what_the_readings_tell() -> None:
    rows = [DemoRow(label=str(i), problem=SMALL[0], is_right=i > 0) for i in range(4)]
    assert verdict(rows) == "On the CPU 3 of 4 results are right."
    for row, ratio in zip(rows, (1.3, 0.9, None, None), strict=True):
        row.vendors, row.vs_best = {"NumPy": 1.0}, ratio
    rows[3].comparison = demo.OWN
    assert verdict(rows).endswith(
        "Beside NumPy: 1 at least as fast, 1 slower, 1 too noisy to tell."
    )
    assert tally([1.0, 2.0]) == "2 at least as fast"


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    """In a cache of its own, where what it measures lies, but for kernels that were compiled."""
    (tmp_path / "cpu").symlink_to(cache_folder())
    command = [sys.executable, "-m", "tilewise", "demo", "--json"]
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert all(row["is_right"] for row in found["rows"])
    assert found["learned"]["efficiency"]["mean"] > 50
    assert Path(found["learned"]["report"]).read_text().startswith("<!doctype html>")
    told = found["h200"]["replayed"]
    assert (told["problems"], told["mean"], told["min"]) == (609, 99.2, 87.8)
    assert [c["kernel"].split("_")[0] for c in found["h200"]["choices"]] == ["gemm"] * 3 + ["conv"]
    for part in ("1. This machine", "5. Ask about", "In short"):
        assert part in ended.stderr
