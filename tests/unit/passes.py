"""What tests of our passes over tensors have in common: scripts for Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpreted(script: str, *replaced: str) -> list[dict[str, Any]]:
    """What the interpreter finds, a line for each result of each case."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *replaced],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in found if not (one["error"] <= one["allowed"] and one["is_inside"])]
