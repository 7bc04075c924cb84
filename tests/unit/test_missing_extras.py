"""What an extra brings is missed in one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.errors import EXTRAS

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


def test_capturing_says_what_it_needs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('never gets here')")
    words = ["tilewise", "problems", "capture", str(program)]
    done = run("torch", f"sys.argv = {words!r}; from tilewise.cli import main; main()")
    assert done.returncode == 2
    assert done.stderr == "tilewise: torch is not installed; `pip install 'tilewise[gpu]'`\n"


def test_a_programs_own_missing_package_is_the_programs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text("import no_such_package")
    words = ["tilewise", "problems", "capture", str(program)]
    done = run("nothing", f"sys.argv = {words!r}; from tilewise.cli import main; main()")
    assert done.returncode == 2
    assert f"tilewise: {program} failed in {program}:1: ModuleNotFoundError" in done.stderr


def test_doctor_names_the_extra_that_brings_a_package() -> None:
    code = "from tilewise.cli.doctor import _versions; print([row for row in _versions()])"
    without = "import importlib.metadata as m; real = m.version; m.version = lambda p: "
    without += "real(p) if p in ('numpy', 'pyarrow') else (_ for _ in ()).throw("
    without += "m.PackageNotFoundError(p)); "
    done = run("nothing", without + code)
    for package, extra in EXTRAS.items():
        if package != "optuna":
            assert f"('{package}', 'absent', " in done.stdout, done
            assert f"pip install 'tilewise[{extra}]'" in done.stdout
