"""The sweep over a real Ray cluster, with a node killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def told_by(script: str, folder: Path) -> dict[str, Any]:
    """What a script that starts a cluster of its own prints at its end."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tilewise.__file__).parent.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills actors where others fill the memory
    }
    command = [sys.executable, HERE / script, folder]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told: dict[str, Any] = json.loads(
        next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    )
    return told


@pytest.mark.slow
def test_a_node_lost_in_the_middle_costs_nothing(tmp_path: Path) -> None:
    told = told_by("ray_sweep.py", tmp_path)
    assert told["nodes_killed"] == told["nodes_lost"] == 1
    assert told["first"] == told["expected"]
    assert told["rows"] == told["distinct"] > told["expected"]  # leaders were confirmed too
    assert told["remaining"] == 0


@pytest.mark.slow
def test_each_node_compiles_ahead_for_what_it_measures_next(tmp_path: Path) -> None:
    told = told_by("ray_ahead.py", tmp_path)
    assert told["statuses"] == ["ok"] * 6
    nodes = {what: node for node, _, what in (note.partition(" ") for note in told["notes"])}
    ahead = {what: nodes[what] for what in nodes if what.startswith("ahead")}
    assert len(nodes) == len(told["notes"])  # nothing was done twice
    first, second = nodes["measured 0"], nodes["measured 3"]
    assert first != second
    assert ahead == dict.fromkeys(["ahead 1", "ahead 2"], first) | dict.fromkeys(
        ["ahead 4", "ahead 5"], second
    )


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
