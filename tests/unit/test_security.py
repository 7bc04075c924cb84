"""SECURITY.md names a test for every promise, and the promises that no other file tests."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.padding import Padding

import tilewise
from tilewise.cli import console, main
from tilewise.cli.console import cell
from tilewise.core.arch import load_arch
from tilewise.errors import FileError
from tilewise.notices import warn_once
from tilewise.problems import tables
from tilewise.selection.measured import measured_rankers
from tilewise.settings import settings

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


MODULES = {"pickle", "marshal", "shelve", "yaml", "dill", "joblib", "builtins", "cloudpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__", "system", "popen", "literal_eval"}
CALLS = {("os", "system"), ("os", "popen"), ("torch", "load"), ("np", "load"), ("numpy", "load")}


def evaluated(tree: ast.AST) -> list[str]:
    """What a module does that turns data into code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            found.append(node.arg)
    calls = {".".join(call) for call in CALLS} | BUILTINS | {"shell", "allow_pickle"}
    return [one for one in found if one in calls or one.split(".")[0] in MODULES or "pickle" in one]


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import builtins", "eval(x)", "f = exec"),
        *("np.load(x)", "numpy.load(x, allow_pickle=True)", "from torch import load"),
        *("torch.load(x)", "pd.read_pickle(x)", "run(x, shell=True)", "os.system(x)"),
    ],
)
def test_what_evaluates_is_found(source: str) -> None:
    assert evaluated(ast.parse(source))


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Nothing that turns data into code, in any module."""
    for path in Path(tilewise.__file__).parent.rglob("*.py"):
        assert evaluated(ast.parse(path.read_text())) == [], path


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


def test_no_message_commands_a_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor do lines that are left out, titles, errors and warnings, which all show what was read."""
    escape = "\x1b]0;title\x07"
    file = str(tmp_path / "p.csv")
    Path(file).write_text(f"M,N,K,dtype\n8,8,8,fp32\n8,8,{escape},fp32\n")
    monkeypatch.setattr(sys, "argv", ["tilewise", "problems", "import", file, "--op", "gemm"])
    with pytest.raises(SystemExit):
        main()
    console.out.print(f"a{escape}\nb", Padding(f"c{escape}"))
    console.table(f"d{escape}", [f"e{escape}"], [[escape]])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and "\\x1b" in shown.err and "\nb" in shown.out
    assert str(FileError(f"{escape}\n\tb")) == "\\x1b]0;title\\x07\n\tb"
    warn_once(f"f{escape}")
    plan = {"device": "a", "problems": [{"problem": {"op": f"g{escape}"}, "us": {}}]}
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 1, "sections": [plan]}))
    monkeypatch.setattr("tilewise.selection.measured.section_of", lambda arch: {"device": "a"})
    monkeypatch.setenv("TILEWISE_PLAN", str(tmp_path / "plan.json"))
    settings.cache_clear()
    assert measured_rankers("gemm", load_arch("x86_avx512")) == []
    settings.cache_clear()
    assert len(caplog.messages) == 2
    assert all("\\x1b" in message and "\x1b" not in message for message in caplog.messages)
