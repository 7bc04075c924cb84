"""The examples run on whatever device is there, and the README's picture is of today's results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(example: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(example), "4"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "PyTorch" in ended.stdout
    assert "tilewise" in ended.stdout


def test_the_picture_is_of_the_published_results() -> None:
    script = ROOT / "benchmarks" / "picture.py"
    assert subprocess.run([sys.executable, str(script), "--check"]).returncode == 0
