"""Triton's GEMM kernels compute what they should, as far as its interpreter can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_kernels_agree_with_float64() -> None:
    """With reductions cut and whole, scaled, biased and activated, along and across memory."""
    path = os.pathsep.join((str(Path(tilewise.__file__).parents[1]), str(HERE)))
    ran = subprocess.run(
        [sys.executable, str(HERE / "gemm_interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    served = {row["family"] for row in found}
    assert served == {"pointer", "splitk", "streamk", "skinny", "smallk", "gemv"}
    assert not [row for row in found if not row["error"] <= row["allowed"]]
