"""The compile cache: keyed by content, atomic, private, and never trusted blindly."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewise.engines import toolchain
from tilewise.engines.toolchain import Unit, compile_units, find_compiler, private_folder, unit_key
from tilewise.errors import BuildError, MachineError
from tilewise.settings import settings

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def answer(value: int) -> Unit:
    return Unit(
        source=f'extern "C" __attribute__((visibility("default"))) int f() {{ return {value}; }}\n'
    )


def test_compiles_once_and_loads(cache: Path) -> None:
    first = compile_units([answer(1), answer(2)])
    again = compile_units([answer(1), answer(2)])
    assert [one.was_cached for one in first + again] == [False, False, True, True]
    assert [ctypes.CDLL(str(one.library)).f() for one in again] == [1, 2]


def test_a_compile_error_is_a_result_and_stops_nothing(cache: Path) -> None:
    bad, good = compile_units([Unit(source="int f( {"), answer(3)])
    assert bad.library is None
    assert "error" in bad.log
    assert good.library is not None
    assert not list(cache.glob("cpu/.building-*")), "nothing half written is left behind"


def test_every_input_changes_the_key(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    header = tmp_path / "a"
    header.mkdir()
    (header / "x.hpp").write_text('#include "y.inc"\n#include <cstdint>\n')
    (header / "y.inc").write_text("// one")
    text = '#include "x.hpp"\nint x;'
    unit = Unit(source=text, flags=("-O1",), include_dirs=(header,))
    keys = {unit_key(unit, compiler)}
    keys.add(unit_key(Unit(source=text + ";", flags=("-O1",), include_dirs=(header,)), compiler))
    keys.add(unit_key(Unit(source=text, flags=("-O2",), include_dirs=(header,)), compiler))
    keys.add(unit_key(unit, toolchain.Compiler(compiler.path, "another 1.0")))
    for changed in ("x.hpp", "y.inc"):  # whatever it is called, and through another
        toolchain._headers_digest.cache_clear()
        (header / changed).write_text((header / changed).read_text() + "// two")
        keys.add(unit_key(unit, compiler))
    toolchain._headers_digest.cache_clear()
    (header / "unrelated.hpp").write_text("// nobody includes this")
    keys.add(unit_key(unit, compiler))
    toolchain._headers_digest.cache_clear()
    assert len(keys) == 6


def test_the_cache_is_private(cache: Path) -> None:
    compile_units([answer(4)])
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / "cpu").stat().st_mode) == 0o700
    (cache / "cpu").chmod(0o777)
    with pytest.raises(BuildError, match="others may write"):
        compile_units([answer(4)])


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("echo fake 1.0", "wrote no library"),
        (r"printf 'f\377ke 1.0\n'", "wrote no library"),
        ('[ "$1" = --version ] && exec echo fake 1.0; kill -40 $$', "killed by signal 40"),
    ],
    ids=["writes nothing", "tells no text", "ends by a signal without a name"],
)
def test_a_compiler_that_does_not_work_is_the_machines_fault(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str
) -> None:
    fake = tmp_path / "fake-c++"
    fake.write_text(f"#!/bin/bash\n{does}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("TILEWISE_CXX", str(fake))
    settings.cache_clear()
    find_compiler.cache_clear()
    try:
        with pytest.raises(MachineError, match=told):
            compile_units([answer(8)])
    finally:
        monkeypatch.delenv("TILEWISE_CXX")
        settings.cache_clear()
        find_compiler.cache_clear()


def test_a_damaged_entry_is_built_again(cache: Path) -> None:
    (made,) = compile_units([answer(5)])
    assert made.library is not None
    body = bytearray(made.library.read_bytes())
    body[len(body) // 2] ^= 0xFF
    made.library.write_bytes(body)
    (again,) = compile_units([answer(5)])
    assert not again.was_cached
    assert ctypes.CDLL(str(again.library)).f() == 5


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BuildError, match="TILEWISE_CACHE_DIR"):
        private_folder(tmp_path / "cache")


def test_a_file_in_place_of_the_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(BuildError, match="TILEWISE_CACHE_DIR"):
        private_folder(tmp_path / "cache" / "below")


def _build_same(_: int) -> bool:
    (made,) = compile_units([answer(6)])
    return made.library is not None and ctypes.CDLL(str(made.library)).f() == 6


def test_many_processes_build_one_kernel(cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert all(pool.map(_build_same, range(8)))
    assert len(list(cache.glob("cpu/*/kernel.so"))) == 1


def test_no_compiler_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CXX", "no-such-compiler")
    settings.cache_clear()
    find_compiler.cache_clear()
    try:
        with pytest.raises(BuildError, match="no-such-compiler"):
            compile_units([answer(7)])
    finally:
        monkeypatch.undo()
        settings.cache_clear()
        find_compiler.cache_clear()
