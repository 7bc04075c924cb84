"""kill -9 before every step on files: of sweeps, merges, publishing, training, plans, compiling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

SCRIPT = Path(__file__).with_name("kill_steps.py")
WORK = re.findall(r'^    "([^"]+)": Work\(', SCRIPT.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_a_kill_at_any_step_leaves_what_can_be_carried_on(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}
    command = [sys.executable, SCRIPT, tmp_path, name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 4  # else nothing was killed
