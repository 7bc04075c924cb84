"""SECURITY.md names a test for every promise, and the promises that no other file tests."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import tilewise
from tilewise.cli import main
from tilewise.cli.console import cell
from tilewise.errors import FileError
from tilewise.problems import tables

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
PROMISES = re.findall(r"^\d+\. .*?(?=^\d+\. |^`make|\Z)", TEXT, re.MULTILINE | re.DOTALL)
NAMED = re.findall(r"\[(tests/[\w/]+\.py)::(\w+)\]", TEXT)


def test_every_promise_names_a_test() -> None:
    assert len(PROMISES) == 10
    for promise in PROMISES:
        assert re.search(r"\[tests/", promise), promise


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_tests_are_there(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_nothing_is_unpickled_or_evaluated() -> None:
    """No call of what turns data into code, in any module."""
    forbidden = {"eval", "exec", "compile", "__import__", "system", "popen", "literal_eval"}
    modules = {"pickle", "marshal", "shelve", "yaml", "dill", "joblib"}
    for path in Path(tilewise.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, f"{path}: {node.func.id}"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                where = owner.id if isinstance(owner, ast.Name) else ""
                assert (where, node.func.attr) not in {("os", "system"), ("os", "popen")}, path
                assert (where, node.func.attr) not in {("torch", "load"), ("np", "load")}, path
                assert not any(k.arg == "shell" for k in node.keywords), path
            elif isinstance(node, ast.Import):
                assert not modules & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in modules, path


def test_a_table_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that repeats is stored once."""
    column = pa.array(["x" * 10_000]).take(pa.array([0] * 20_000))
    parquet.write_table(pa.table({"M": column}), tmp_path / "p.parquet")
    assert (tmp_path / "p.parquet").stat().st_size < 100_000
    monkeypatch.setattr(tables, "MOST_BYTES", 1 << 26)
    with pytest.raises(FileError, match="unpacks to more"):
        tables.read_parquet(tmp_path / "p.parquet")
    monkeypatch.setattr(tables, "MOST_ROWS", 1000)
    with pytest.raises(FileError, match="20,000 rows"):
        tables.read_parquet(tmp_path / "p.parquet")


def test_terminals_are_not_commanded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    escape = "\x1b]0;title\x07"
    assert cell(f"a{escape}") == "a\\x1b]0;title\\x07"
    monkeypatch.setattr(sys, "argv", ["tilewise", "data", "show", f"no{escape}"])
    with pytest.raises(SystemExit):
        main()
    assert "\x1b" not in capsys.readouterr().err
