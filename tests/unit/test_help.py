"""Every command's `--help` ends with examples, and the examples are sound."""

from __future__ import annotations

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

LEFT_OUT = {"doctor", "build", "sweep", "tune", "validate", "bench", "demo", "problems capture"}
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name, as earlier ones would have made it."""
    folder = tmp_path_factory.mktemp("examples")
    write_material(folder)
    write_rows(folder / "another_store", measurements()[:6])
    (folder / "new_model").symlink_to(folder / "model")
    return folder


def test_examples_run_one_after_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    order = sorted(EXAMPLES, key=lambda name: (name in ("problems augment", "search"), 0))
    for name in order:
        for rest in EXAMPLES[name] if name not in LEFT_OUT else ():
            line = ["tilewise", *name.split(), *shlex.split(rest)]
            with mock.patch.object(sys, "argv", line), pytest.raises(SystemExit) as ended:
                main()
            told = capsys.readouterr()
            allowed = (0, 1) if name in AFTER else (0,)
            assert ended.value.code in allowed, f"{line}: {told.err}"
