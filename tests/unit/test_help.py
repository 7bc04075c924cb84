"""Every command's `--help` ends with examples, and the examples are sound."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from material import measurements, write_material

from tilewise.cli import main
from tilewise.cli.app import app
from tilewise.cli.examples import EXAMPLES
from tilewise.data.store import write_rows

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = {"doctor", "build", "sweep", "tune", "validate", "bench", "demo", "problems capture"}
LEFT_OUT |= {"export-cpp"}
"""These compile and time, or run a program: tests of their own take them through it."""
AFTER = {"problems coverage", "data check", "kernels check", "compare"}
"""These may find fault with what they are given."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_every_command_has_an_example() -> None:
    assert set(COMMANDS) == set(EXAMPLES)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_fit_and_parse(name: str) -> None:
    command = COMMANDS[name]
    context = command.make_context(name, [], resilient_parsing=True)
    told = command.get_help(context).partition("Example")[2].splitlines()[1:]
    assert [line.strip() for line in told] == [
        f"tilewise {name} {rest}".strip() for rest in EXAMPLES[name]
    ]
    assert max(map(len, told)) <= 80
    for rest in EXAMPLES[name]:
        command.make_context(name, shlex.split(rest))


@pytest.mark.parametrize("group", ["", "arch", "kernels", "problems", "data"])
def test_lists_of_commands_say_what_each_does_in_a_whole_sentence(group: str) -> None:
    command = typer.main.get_command(app)
    for name in group.split():
        command = command.commands[name]  # type: ignore[attr-defined]
    context = command.make_context("tilewise", [], resilient_parsing=True)
    listed = command.get_help(context).partition("Commands:\n")[2].splitlines()
    told = [line for line in listed if line.strip()]
    assert len(told) == len(command.commands)  # type: ignore[attr-defined]
    assert [line for line in told if line.endswith("...") or len(line) > 80] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with what earlier examples would have made."""
    monkeypatch.chdir(tmp_path)
    write_material(tmp_path)
    write_rows(tmp_path / "another_store", measurements()[:6])
    return tmp_path


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_prose_and_tables_are_there(page: Path) -> None:
    for line in re.findall(r"`tilewise ([^`]+)`", page.read_text()):
        words = line.split()
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), None)
        if name is None:
            groups = {command.split()[0] for command in COMMANDS}
            assert words[0] in groups or words[0].startswith("--"), line
            continue
        known = {option for given in COMMANDS[name].params for option in given.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_nothing_is_overwritten_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writing = {name for name, command in COMMANDS.items() if takes_force(command)}
    assert writing >= {"train", "report", "export-c", "evaluate", "kernels export", "data export"}
    for name in sorted(writing):
        given = COMMANDS[name].make_context(name, shlex.split(EXAMPLES[name][-1])).params
        target = next(given[key] for key in ("target", "folder", "file") if given.get(key))
        kept = target / "manifest.json" if "folder" in given else target
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("years of work")
        assert ended_with(name, EXAMPLES[name][-1]) == 2
        assert f"{target} already exists" in capsys.readouterr().err
        assert kept.read_text() == "years of work"


def takes_force(command: Any) -> bool:
    return any("--force" in given.opts for given in command.params)


def ended_with(name: str, rest: str) -> int:
    line = ["tilewise", *name.split(), *shlex.split(rest)]
    with mock.patch.object(sys, "argv", line), pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_examples_run_one_after_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "kernels.json").unlink()
    for name in sorted(EXAMPLES, key=lambda name: name == "problems augment"):
        for rest in EXAMPLES[name] if name not in LEFT_OUT else ():
            code = ended_with(name, rest)
            told = capsys.readouterr().err
            assert code in ((0, 1) if name in AFTER else (0,)), f"{name} {rest}: {told}"
