"""kill -9 of the orchestrator at 50 random instants: no row lost, torn or measured twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tilewise

HERE = Path(__file__).parent


def test_fifty_kills_and_resumes_end_with_the_same_rows(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}
    command = [sys.executable, HERE / "kill_sweeps.py", tmp_path, "50", "7"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["killed"] >= 50
    assert told["midway"] >= 5  # else the instants were not random enough to mean anything
