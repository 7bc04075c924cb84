"""The half-hour sweep of convolutions: fair sets from a seed, and launches that work out."""

from __future__ import annotations

import importlib.util
import sys
import time
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


def test_kernels_are_compiled_ahead_as_the_sweep_needs_them(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = Namespace(sets="bf16:12", ops="conv_fwd", seed=0, whole=0.0, top=2)
    args.engines, args.without = "cuda,vendor", "im2col,halo,rows,gather,stem"
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
    assert {k.family for k, _ in asked} == {"grouped", "depthwise", "channelwise"}


def test_what_compiles_beside_a_sweep_ends_with_it(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    pids = tmp_path / "pids"
    child.write_text(
        "import os, subprocess, sys, time\n"
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"with open({str(pids)!r}, 'w') as file:\n"
        "    print(os.getpid(), own.pid, sys.argv[-1], file=file)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(script, "__file__", str(child))
    monkeypatch.setattr(sys, "argv", ["sweep_convs.py", "store"])
    with script.compiled_beside():
        while not (pids.exists() and pids.read_text().endswith("\n")):
            time.sleep(0.01)
    first, second, option = pids.read_text().split()
    assert option == "--compile"
    while is_alive(first) or is_alive(second):
        time.sleep(0.01)


def is_alive(pid: str) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "Z (zombie)" not in status.read_text()
    except OSError:
        return False
