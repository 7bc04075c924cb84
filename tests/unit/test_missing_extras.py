"""What an extra brings is missed in one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys; sys.modules[{package!r}] = None; "


def run(package: str, code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process that has not got a package."""
    given = WITHOUT.format(package=package) + code
    return subprocess.run([sys.executable, "-c", given], capture_output=True, text=True)


def test_a_name_that_needs_pytorch_says_so() -> None:
    done = run("torch", "import tilewise; tilewise.patch")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: tilewise.patch: torch is not installed; `pip install 'tilewise[gpu]'`"
    )


@pytest.mark.parametrize(("package", "extra"), [("scipy", "learn"), ("lightgbm", "learn")])
def test_training_says_what_it_needs(package: str, extra: str, tmp_path: Path) -> None:
    store = ROOT / "datasets" / "emerald" / "conv_bwd_weight"
    words = ["tilewise", "train", str(store), "--out", str(tmp_path / "model")]
    done = run(package, f"sys.argv = {words!r}; from tilewise.cli import main; main()")
    assert done.returncode == 2
    says = f"tilewise: {package} is not installed; `pip install 'tilewise[{extra}]'`"
    assert done.stderr.splitlines()[-1] == says
