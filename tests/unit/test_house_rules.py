"""The house stays in order: imports point one way, and importing tilewise stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

SRC = Path(tilewise.__file__).parent
FLOORS = [
    *("errors", "settings", "core", "archs", "ops", "engines", "problems", "sweep", "data"),
    *("learn", "selection", "dispatch", "torch_ops", "functional", "report", "cli"),
]
"""A module may import its own floor and those before it."""

HEAVY = ("torch", "triton", "lightgbm", "sklearn", "polars", "pyarrow", "ray", "numpy")


def modules() -> list[Path]:
    return [p for p in SRC.rglob("*.py") if p.parent != SRC or p.stem in FLOORS]


def floor(module: str) -> str:
    return module.removeprefix("tilewise.").split(".")[0]


def imported(path: Path) -> set[str]:
    """Every tilewise module that a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("tilewise.")}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(SRC)
    own = relative.parts[0].removesuffix(".py")
    for name in imported(path):
        target = floor(name)
        assert FLOORS.index(target) <= FLOORS.index(own), f"{relative} must not import {name}"
        if own in ("selection", "dispatch"):
            assert target != "learn", f"serving must not need {name}"


def test_importing_tilewise_is_light() -> None:
    code = (
        "import sys, tilewise; "
        f"print([m for m in {HEAVY!r} if m in sys.modules]); print(len(tilewise.__all__))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[0] == "[]"


def test_public_names_exist() -> None:
    for name in tilewise.__all__:
        assert getattr(tilewise, name) is not None
    assert sorted(tilewise.__all__) == sorted({*tilewise._PUBLIC, "__version__"})


def test_select_stays_a_function() -> None:
    """A sub-package of the same name would take its place once imported."""
    code = "import tilewise as tw, tilewise.cli.app; assert callable(tw.select), tw.select"
    subprocess.run([sys.executable, "-c", code], check=True)
