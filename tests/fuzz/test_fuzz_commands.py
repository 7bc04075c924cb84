"""Any words after `tilewise` end with 0, 1 or 2 and without a traceback."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from fuzzing import fuzz
from hypothesis import example
from hypothesis import strategies as st
from spoiling import HOSTILE

from tilewise.cli import main
from tilewise.cli.app import app
from tilewise.engines import toolchain
from tilewise.engines.toolchain import find_compiler
from tilewise.export import cases

LEFT_OUT = {"demo", "doctor", "problems capture"}
"""These run kernels, or programs that they are given."""


def _verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from _verbs(below, (*path, name))
    elif " ".join(path) not in LEFT_OUT:
        options = [o for p in command.params for o in p.opts if o.startswith("--")]
        yield path, [o for o in options if o != "--ray"]


COMMAND = typer.main.get_command(app)
VERBS = list(_verbs(COMMAND))
FILES = (
    *(
        "store",
        "model",
        "p.csv",
        "p.json",
        "p.jsonl",
        "commands.txt",
        "kernels.json",
        "config.json",
    ),
    *(
        "bench.json",
        "model/manifest.json",
        "model/oof.parquet",
        "nosuch",
        "out.csv",
        "out.h",
        "plan.json",
        "new",
    ),
    *("loop", "pipe.d", ".", "", "-", "/dev/null", "/proc/self/mem/x", "x" * 300, "a\nb"),
)
VALUES = (
    *("gemm", "conv_fwd", "fp32", "bf16", "nosuch", "x86_avx512", "sm_90:H200", "gfx950", "cpu"),
    *("1", "0", "-1", "3", "nan", "1e308", "9" * 5000, "M=8", "N=8", "K=8", "M=", "Hi=8", "m=8"),
    *("quick", "seed=1", "tile_m >= 64", "mr ==", "x" * 20_000, "1 < mr < 9", "label", "all"),
    *(v for v in HOSTILE if isinstance(v, str) and "\0" not in v),
)
words = st.sampled_from(FILES) | st.sampled_from(VALUES)


_verbs_with_options = st.sampled_from(
    [
        (verb, st.lists(st.sampled_from(options or ["--help"]), max_size=5, unique=True))
        for verb, options in VERBS
    ]
)
_sixth, _words = st.integers(0, 5), st.lists(words, max_size=5)


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A verb with some of its own options and some words."""
    verb, options = draw(_verbs_with_options)
    given: list[str] = [*verb]
    for option in draw(options):
        given += [option, draw(words)] if draw(_sixth) else [option]
    return given + draw(_words)


def likely() -> st.SearchStrategy[list[str]]:
    """Lines that come far: what each verb wants, with a word or two changed."""
    problem = ["M=8", "N=8", "K=8"]
    where = ["--op", "gemm", "--arch", "x86_avx512", "--dtype", "fp32"]
    sound = [
        ["rank", *where, *problem],
        ["explain", *where, *problem, "--model", "model"],
        ["predict", *where, *problem, "--model", "model"],
        ["evaluate", "model", "store"],
        ["compare", "model", "model", "store"],
        ["train", "store", "--op", "gemm", "--arch", "x86_avx512", "--out", "new", "--trees", "2"],
        ["export-c", "model", "out.h"],
        ["data", "show", "store"],
        ["data", "check", "store"],
        ["data", "merge", "new", "store"],
        ["data", "export", "store", "out.csv"],
        ["data", "import", "bench.json", "new", "--op", "gemm", "--arch", "x86_avx512"],
        ["problems", "import", "p.csv", "--op", "gemm"],
        ["problems", "coverage", "p.json", "--op", "gemm"],
        ["kernels", "list", "--op", "gemm", "--arch", "x86_avx512"],
        ["kernels", "check", "--op", "gemm", "--arch", "x86_avx512", "--file", "kernels.json"],
        ["sweep", "new", "--problems", "p.csv", "--op", "gemm", "--dtype", "fp32"],
        ["arch", "show", "sm_90:H200"],
        ["report", "store", "--out", "out.html"],
        ["data", "publish", "store", "new"],
        ["export-cpp", "new", *where, "--model", "model", "--layout", "rcr", "--top", "1"],
        ["tune", "--op", "gemm", "--problems", "p.csv", "--out", "plan.json", "--top", "1"],
    ]

    @st.composite
    def changed(draw: st.DrawFn) -> list[str]:
        line = list(draw(st.sampled_from(sound)))
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(1, len(line) - 1))
            what = draw(st.sampled_from("rrid"))
            if what == "d":
                del line[at]
            else:
                line[at : at + (what == "r")] = [draw(words)]
            if len(line) < 2:
                break
        return line + (["--json"] if draw(st.booleans()) else [])

    return changed()


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to run in, in which no process is started.

    Compilers are looked for before, and what goes wrong with them is forgotten after: one that
    could not be started once is not asked again in the same process.
    """
    find_compiler()
    place = tmp_path_factory.mktemp("commands")
    refused = OSError(1, "this test starts no processes")
    before = Path.cwd()
    logging.disable(logging.CRITICAL)
    with (
        mock.patch.dict(toolchain._faults),
        mock.patch.object(subprocess.Popen, "__init__", side_effect=refused),
        mock.patch.object(subprocess.Popen, "__del__", lambda self: None),
        mock.patch("os.fork", side_effect=refused),
        mock.patch.object(cases, "EXAMPLES", 300),  # of problems that an export looks at
        mock.patch("typer.main.get_command", return_value=COMMAND),  # made once, not for every line
    ):
        os.chdir(place)
        yield place
    os.chdir(before)
    logging.disable(logging.NOTSET)


def laid_out(folder: Path, material: Path) -> None:
    """The files that words name, as they were."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(material, folder, dirs_exist_ok=True)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "pipe.d").mkdir()
    os.mkfifo(folder / "pipe.d" / "a.parquet")
    os.mkfifo(folder / "pipe.d" / "manifest.json")


def ends_well(line: list[str]) -> str:
    """What it says of errors, where that is one clear message."""
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["tilewise", *line]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"M,N,K\n8,8,8\n"))),
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code in (0, 1, 2), errors.getvalue()
    assert "Traceback" not in errors.getvalue()
    # A group of commands alone shows which there are. Before may stand what takes long on a busy
    # machine, and lines of a file that were left out.
    says = re.search(r"^(tilewise|Usage): ", errors.getvalue(), re.MULTILINE)
    assert ended.value.code != 2 or says, errors.getvalue()
    return errors.getvalue()


@fuzz(120, line=lines())
def test_any_words(folder: Path, material: Path, line: list[str]) -> None:
    laid_out(folder, material)
    ends_well(line)


@example(line=["data"])
@fuzz(80, line=likely())
def test_sound_lines_with_a_word_changed(folder: Path, material: Path, line: list[str]) -> None:
    laid_out(folder, material)
    ends_well(line)


def test_machines_may_be_busy(folder: Path, material: Path) -> None:
    """What takes long says so before it says what is wrong."""

    @contextlib.contextmanager
    def slow(first: str) -> Iterator[Callable[[str], None]]:
        sys.stderr.write(f"{first}\n")
        yield lambda text: None

    laid_out(folder, material)
    with mock.patch("tilewise.cli.train.telling", slow):
        errors = ends_well(["train", "nosuch", "--op", "gemm", "--out", "new"])
    assert errors.startswith("reading measurements\ntilewise: ")


def test_the_sound_lines_are_sound(folder: Path, material: Path) -> None:
    """Else the test above would not come far."""
    laid_out(folder, material)
    for line in (["data", "check", "store"], ["evaluate", "model", "store"]):
        with (
            mock.patch.object(sys, "argv", ["tilewise", *line]),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        assert ended.value.code == 0, line
