"""The sweep over a real Ray cluster, with a node killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

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
