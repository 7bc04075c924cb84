"""A store or a folder of another's making does not say where this user's files are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewise.core import plain_files
from tilewise.core.plain_files import replacing
from tilewise.data.schema import to_table
from tilewise.data.store import Store, write_shard
from tilewise.errors import StoreError
from tilewise.problems.lines import replace_text


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine\n")
    return path


def test_damaged_lines_are_not_set_aside_through_a_link(tmp_path: Path, victim: Path) -> None:
    """A store with such a link wrote what its journal held over any file of the user's."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "r-00000.journal").write_bytes(b"ssh-rsa attacker\n")
    (store / "r-00000.damaged").symlink_to(victim)
    Store(store).recover()
    assert victim.read_text() == "mine\n"
    assert (store / "r-00000.damaged").read_bytes() == b"ssh-rsa attacker\n"


def test_shards_are_not_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for name in (".a.parquet", "a.parquet"):
        (store / name).symlink_to(victim)
    write_shard(store / "a.parquet", to_table([]))
    assert victim.read_text() == "mine\n"
    assert not (store / "a.parquet").is_symlink()


def test_a_journal_that_is_a_link_is_not_taken(tmp_path: Path, victim: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "r-00000.journal").symlink_to(victim)
    with pytest.raises(StoreError):
        Store(store).recover()
    assert victim.read_text() == "mine\n"


def test_claims_are_not_made_elsewhere(tmp_path: Path) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store.mkdir()
    elsewhere.mkdir()
    (store / "claims").symlink_to(elsewhere)
    with pytest.raises(StoreError):
        Store(store).claim("x")
    assert list(elsewhere.iterdir()) == []


def test_temporary_names_are_nobodys_guess(tmp_path: Path, victim: Path) -> None:
    import os

    (tmp_path / f".out.csv.{os.getpid()}").symlink_to(victim)
    replace_text(tmp_path / "out.csv", "M,N,K\n")
    assert (victim.read_text(), (tmp_path / "out.csv").read_text()) == ("mine\n", "M,N,K\n")


def test_a_name_that_was_guessed_is_not_written_through(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_files, "token_hex", lambda count: "guessed")
    (tmp_path / ".out.csv.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError), replacing(tmp_path / "out.csv") as file:
        file.write(b"theirs\n")
    assert victim.read_text() == "mine\n"


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), replacing(tmp_path / "x") as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
