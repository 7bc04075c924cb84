"""The cache is the user's own: nothing is written through links, waited for, or loaded unhashed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.plain_files import open_plain, read_plain
from tilewise.engines.toolchain import Unit, compile_units, load, private_folder
from tilewise.errors import BuildError, MachineError
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.files import read_problems
from tilewise.selection import unfamiliar
from tilewise.settings import settings

PROBLEM = GemmProblem(m=8, n=8, k=8, dtype="fp32")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(folder))
    monkeypatch.setattr(unfamiliar, "_told", set())
    settings.cache_clear()
    yield folder
    monkeypatch.undo()
    settings.cache_clear()


def unit(answer: int) -> Unit:
    head = 'extern "C" __attribute__((visibility("default")))'
    return Unit(source=f"{head} int tw_answer() {{ return {answer}; }}\n")


def built(answer: int) -> Path:
    (made,) = compile_units([unit(answer)])
    assert made.library is not None, made.log
    return made.library


def test_nothing_is_written_through_a_link(cache: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (cache / "unfamiliar.jsonl").symlink_to(victim)
    unfamiliar.note(PROBLEM)
    assert victim.read_text() == "mine\n"


def test_nothing_is_written_where_others_may_write(cache: Path) -> None:
    cache.chmod(0o777)
    unfamiliar.note(PROBLEM)
    assert list(cache.iterdir()) == []


def test_a_log_that_is_a_pipe_is_not_waited_for(cache: Path) -> None:
    os.mkfifo(cache / "unfamiliar.jsonl")
    unfamiliar.note(PROBLEM)  # returns


def test_what_is_written_down_is_read_back(cache: Path) -> None:
    unfamiliar.note(PROBLEM)
    assert read_problems(str(unfamiliar.log_path()), PROBLEM.op).problems == [PROBLEM]
    assert (cache / "unfamiliar.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["key.json", "kernel.so"])
@pytest.mark.parametrize("what", ["pipe", "link", "brackets", "writable", "folder"])
def test_an_entry_that_was_tampered_with_is_made_anew(cache: Path, name: str, what: str) -> None:
    library = built(1)
    spoiled = library.parent / name
    held = spoiled.read_bytes()
    if what == "writable":
        spoiled.chmod(0o666)
    else:
        spoiled.unlink()
    if what == "pipe":
        os.mkfifo(spoiled)
    elif what == "link":
        (cache / "elsewhere").write_bytes(held)
        spoiled.symlink_to(cache / "elsewhere")
    elif what == "brackets":
        spoiled.write_text("[" * 200_000)
    elif what == "folder":
        spoiled.mkdir()
    again = compile_units([unit(1)])[0]
    assert again.library is not None and not again.was_cached
    assert load(again.library, "tw_answer").tw_answer() == 1


def test_what_is_loaded_was_hashed(cache: Path) -> None:
    """A library that takes another's place after it was found is not loaded."""
    first, second = built(1), built(2)
    first.write_bytes(second.read_bytes())
    with pytest.raises(BuildError, match="not what was compiled"):
        load(first, "tw_answer")


def test_what_takes_a_librarys_place_while_it_is_loaded_is_not_loaded(cache: Path) -> None:
    first, second = built(1), built(2)
    other = second.read_bytes()

    def swapped(path: str) -> ctypes.CDLL:
        first.unlink()
        first.write_bytes(other)
        return ctypes.CDLL(path)

    kind: Any = swapped
    assert load(first, "tw_answer", kind=kind).tw_answer() == 1


def test_what_others_own_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, other = built(1), os.getuid() + 1
    read_plain(library, is_private=True)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="another user"):
        read_plain(library, is_private=True)
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(MachineError, match="another user"):
        private_folder(cache)


def test_libraries_loaded_one_after_another_are_themselves(cache: Path) -> None:
    """Each is opened under the number that the last one had."""
    answers = [load(built(i), "tw_answer", kind=ctypes.PyDLL).tw_answer() for i in range(4)]
    assert answers == [0, 1, 2, 3]


def test_only_regular_files_of_bearable_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert read_plain(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="more than"):
        read_plain(tmp_path / "file", most=4)
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            open_plain(tmp_path / name)
