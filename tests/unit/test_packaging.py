"""What the package declares is what it imports, and an extra brings no more than it promises."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import tilewise

ROOT = Path(__file__).resolve().parents[2]
SRC = Path(tilewise.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

ON_REQUEST = {"ml_dtypes"}
"""Imported where a user asks for it; the error names the package."""
TOOLS = {"pytest-xdist", "ruff", "mypy", "mkdocs-material", "nvidia-cuda-nvrtc"}
"""What tests and checks use without importing it: plugins, commands, a library found on disk."""


def names(requirements: list[str]) -> set[str]:
    """The packages that requirements name, without versions and markers."""
    return {re.match(r"[\w.-]+", each).group() for each in requirements}  # type: ignore[union-attr]


def imported(root: Path) -> set[str]:
    """The packages that the files below `root` import, tilewise and Python's own aside."""
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
    return found - set(sys.stdlib_module_names) - {"tilewise"}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dependencies_are_declared_as_they_are_used() -> None:
    used = imported(SRC) - ON_REQUEST
    served = names(PROJECT["dependencies"] + EXTRAS["learn"] + EXTRAS["gpu"])
    assert used == served | names(EXTRAS["tune"] + EXTRAS["ray"] + EXTRAS["report"])


def test_what_the_tests_install_can_train_and_run_all() -> None:
    needed = names(EXTRAS["learn"] + EXTRAS["gpu"] + EXTRAS["ray"] + EXTRAS["report"])
    tests = names(EXTRAS["test"])
    assert needed <= tests
    assert tests - needed - TOOLS <= imported(ROOT / "tests")


def test_the_demo_is_light() -> None:
    heavy = set(script(".ci/extras.py").HEAVY)
    assert not heavy & names(PROJECT["dependencies"] + EXTRAS["demo"])


@pytest.mark.parametrize(("gpu", "extras"), [("", "demo"), ("/dev/nvidiactl", "demo,gpu")])
def test_the_demo_installs_pytorch_for_a_gpu_alone(gpu: str, extras: str) -> None:
    command = ["make", "--dry-run", "--always-make", "demo", f"GPU={gpu}"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"--editable '.[{extras}]'" in told
    assert ("no PyTorch" in told) == (not gpu)


STAND_IN = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "$SEEN"
case "$(basename "$0") $*" in *"$FAILS"*) exit 1;; esac
"""


@pytest.mark.parametrize(
    ("fails", "said"),
    [("no such", ""), ("memcheck", "failed: memcheck"), ("cpp_dispatch", "times")],
)
def test_exported_libraries_are_tried_on_a_gpu_by_one_command(
    fails: str, said: str, tmp_path: Path
) -> None:
    """Results, memory and times, each whatever became of those before it."""
    for name in ("python", "compute-sanitizer"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    own = {"SEEN": str(tmp_path / "seen"), "FAILS": fails}
    own["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["make", "gpu-export", f"PYTHON={tmp_path / 'python'}"]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert (ran.returncode == 0) == (not said)
    assert said in ran.stdout
    results, memory, times = (tmp_path / "seen").read_text().splitlines()
    assert results.startswith("python -m pytest tests/gpu/test_export_gpu.py")
    assert memory.startswith("compute-sanitizer --tool memcheck --error-exitcode 1")
    assert memory.endswith(results.removeprefix("python "))
    assert times == "python benchmarks/cpp_dispatch.py"
    for path in ("tests/gpu/test_export_gpu.py", "benchmarks/cpp_dispatch.py"):
        assert (ROOT / path).exists()


def test_the_readme_reads_the_same_where_there_is_nothing_beside_it() -> None:
    """As on PyPI: it links to nothing relative, and its picture is named where it is missing."""
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"(!?)\[([^\]]*)\]\(([^)]+)\)", readme)
    for is_picture, words, target in links:
        assert target.startswith("https://") or (is_picture and target in words), target
    for path in re.findall(r"`((?:docs|benchmarks|datasets|[A-Z]+\.md)[\w./]*)`", readme):
        assert (ROOT / path).exists(), path


def test_an_unknown_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert script(".ci/extras.py").main(["nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().out


def test_a_light_extra_that_became_heavy_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = script(".ci/extras.py")
    monkeypatch.setattr(extras, "_resolve", lambda _: {"numpy": "2.4", "torch": "2.15.0"})
    assert extras.main(["demo"]) == 1
    assert "brings torch" in capsys.readouterr().out
    assert extras.main(["gpu"]) == 0
    monkeypatch.setattr(extras, "_resolve", lambda _: "ResolutionImpossible")
    assert extras.main(["gpu"]) == 1


LINKS = re.compile(r"\]\(([^)]*)\)|(?:src|href)=[\"']([^\"']*)")


@pytest.mark.parametrize("source", [None, "https://git.example/tilewise"])
def test_what_package_indexes_show_has_no_link_that_leads_nowhere(source: str | None) -> None:
    readme = (ROOT / "README.md").read_text() + "[more](docs/limits.md) [own](#tilewise)\n"
    shown = script("setup.py").shown(readme, source)
    links = [one or other for one, other in LINKS.findall(shown)]
    assert all(link.startswith(("https://", "#")) for link in links)
    if source is None:
        assert "![" not in shown and shown.endswith("more [own](#tilewise)\n")
    else:
        assert f"({source}/raw/main/docs/assets/results.svg)" in shown
        assert f"[more]({source}/blob/main/docs/limits.md)" in shown


def test_the_readme_names_files_that_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    links = {one or other for one, other in LINKS.findall(readme)}
    named = set(re.findall(r"`([\w./-]+(?:\.md|\.svg|/))`", readme)) | links
    assert len(named) > 5
    assert [path for path in named if "://" not in path and not (ROOT / path).exists()] == []
