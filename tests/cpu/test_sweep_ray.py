"""The sweep over a real Ray cluster, with a node killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
from tilewise.core.arch import load_arch
from tilewise.core.measurement import Policy
from tilewise.errors import ExecutionError
from tilewise.sweep import ray_backend
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.ray_backend import RayExecutor, _Hand

pytest.importorskip("ray")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_node_lost_in_the_middle_costs_nothing(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tilewise.__file__).parent.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, HERE / "ray_sweep.py", tmp_path]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(next(s for s in ended.stdout.splitlines() if s.startswith('{"rows"')))
    assert told["nodes_killed"] == told["nodes_lost"] == 1
    assert told["first"] == told["expected"]
    assert told["rows"] == told["distinct"] > told["expected"]  # leaders were confirmed too
    assert told["remaining"] == 0


class NoSlots:
    """A cluster that answers nothing, in place of Ray."""

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 0.0}

    def wait(self, waiting: list[object], **options: object) -> tuple[list[object], list[object]]:
        return [], waiting

    def kill(self, actor: object) -> None:
        pass


@pytest.mark.parametrize("pending", [None, "an actor that never starts"])
def test_a_cluster_without_a_slot_ends_the_sweep(
    pending: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the last slot was refused or the one in its place never starts."""
    executor = RayExecutor(WorkerConfig(engines=(), policy=Policy(), kind="cpu"))
    monkeypatch.setattr(executor, "_ray", NoSlots())
    monkeypatch.setattr(ray_backend, "PATIENCE_S", 0.05)
    executor._first = _Hand(None, None)
    steps = executor.run(lambda: None, [], load_arch("x86_avx2"))
    assert next(steps) == (None, None)  # nothing to do just now: that is no reason to give up
    if pending is None:
        executor._refuse(executor._hands[0], "it differs")
    else:
        executor._hands[0].pending = pending
    with pytest.raises(ExecutionError, match="no slot of the cluster can go on"):
        for _ in range(1000):
            next(steps)
    told = [notice["event"] for notice in executor.notices()]
    assert told == (["slot_refused"] if pending is None else [])
