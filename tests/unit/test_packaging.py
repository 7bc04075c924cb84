"""What the package declares is what it imports, and an extra brings no more than it promises."""

from __future__ import annotations

import ast
import importlib.util
import re
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

ON_REQUEST = {"ml_dtypes", "cuda"}
"""Imported where a user asks for it; the error names the package, and PyTorch's GPU build brings
CUDA's own."""


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


def extras_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extras", ROOT / ".ci" / "extras.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dependencies_are_declared_as_they_are_used() -> None:
    used = imported(SRC) - ON_REQUEST
    served = names(PROJECT["dependencies"] + EXTRAS["learn"] + EXTRAS["gpu"])
    assert used == served | names(EXTRAS["tune"] + EXTRAS["ray"] + EXTRAS["report"])


def test_what_the_tests_install_can_train_and_run_all() -> None:
    needed = names(EXTRAS["learn"] + EXTRAS["gpu"] + EXTRAS["ray"])
    assert needed <= names(EXTRAS["test"])


def test_the_demo_is_light() -> None:
    heavy = set(extras_script().HEAVY)
    assert not heavy & names(PROJECT["dependencies"] + EXTRAS["demo"])


def test_the_readme_reads_the_same_where_there_is_nothing_beside_it() -> None:
    """As on PyPI: it links to nothing relative, and its picture is named where it is missing."""
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"(!?)\[([^\]]*)\]\(([^)]+)\)", readme)
    for is_picture, words, target in links:
        assert target.startswith("https://") or (is_picture and target in words), target
    for path in re.findall(r"`((?:docs|benchmarks|datasets|[A-Z]+\.md)[\w./]*)`", readme):
        assert (ROOT / path).exists(), path


def test_an_unknown_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert extras_script().main(["nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().out


def test_a_light_extra_that_became_heavy_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = extras_script()
    monkeypatch.setattr(script, "_resolve", lambda _: {"numpy": "2.4", "torch": "2.15.0"})
    assert script.main(["demo"]) == 1
    assert "brings torch" in capsys.readouterr().out
    assert script.main(["gpu"]) == 0
    monkeypatch.setattr(script, "_resolve", lambda _: "ResolutionImpossible")
    assert script.main(["gpu"]) == 1
