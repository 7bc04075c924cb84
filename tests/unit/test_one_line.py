"""Whatever is wrong with what a command is given, it says so in one line and ends with 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from resealing import copied, resealed

from tilewise.cli import main, progress
from tilewise.core.arch import load_arch, parse_arch
from tilewise.core.measurement import parse_policy
from tilewise.core.model import check_place
from tilewise.data.store import write_shard
from tilewise.errors import ArchError, FileError, InputError
from tilewise.export.library import write_library
from tilewise.problems.lines import replace_text
from tilewise.settings import settings


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str | Path
) -> tuple[int, str]:
    """Exit code and what stands on stderr; what takes long on a busy machine is not told there."""
    monkeypatch.setattr(progress, "PATIENCE_S", 1e6)
    monkeypatch.setattr(sys, "argv", ["tilewise", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return int(ended.value.code or 0), shown


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs a command that must end with 2 and one line, and gives that."""

    def check(*words: str | Path) -> str:
        code, shown = run(monkeypatch, capsys, *words)
        assert code == 2, shown
        assert shown.startswith("tilewise: ") and shown.count("\n") == 1, shown
        return shown

    return check


def problems_parquet(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def test_a_flipped_byte_in_a_parquet_of_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = problems_parquet(tmp_path / "p.parquet", M=[1] * 500, N=[2] * 500, K=[3] * 500)
    whole = path.read_bytes()
    codes = set()
    for at in range(4, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        code, _ = run(monkeypatch, capsys, "problems", "coverage", path, "--op", "gemm")
        codes.add(code)
    assert codes == {0, 2}  # some bytes do no harm


def test_text_that_is_no_utf8_in_a_parquet_of_problems(refuses, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    parquet.write_table(pa.table({"M": [1], "layer": bad}), tmp_path / "p.parquet")
    refuses("problems", "coverage", tmp_path / "p.parquet", "--op", "gemm")


def test_deep_json_in_a_parquet_of_problems(refuses, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = problems_parquet(tmp_path / "p.parquet", problem=["[" * 200_000])
    assert "not a JSON object" in refuses("problems", "coverage", path, "--op", "gemm")


@pytest.mark.parametrize("verb", [("data", "show"), ("data", "check"), ("data", "merge", "a")])
def test_names_that_no_file_has(refuses, verb: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    refuses(*verb, "x" * 300)


def test_a_link_to_itself(refuses, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "store").mkdir()
    refuses("data", "merge", tmp_path / "loop", tmp_path / "store")
    refuses("data", "merge", tmp_path / "store", tmp_path / "loop")
    refuses("train", tmp_path / "store", "--op", "gemm", "--out", tmp_path / "loop")
    with pytest.raises(FileError, match="cannot be written: Too many levels"):
        write_library(tmp_path / "loop", [])
    with pytest.raises(FileError, match="cannot be a model's folder: Too many levels"):
        check_place(tmp_path / "loop")
    with pytest.raises(FileError, match="cannot be written: Too many levels"):
        replace_text(tmp_path / "loop", "")


def test_a_shard_with_a_doubled_column(refuses, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from tilewise.data.schema import to_table

    table = to_table([])
    doubled = table.append_column("status", table.column("status"))
    write_shard(tmp_path / "a.parquet", doubled.replace_schema_metadata(table.schema.metadata))
    assert "more than once" in refuses("data", "show", tmp_path)


@pytest.mark.parametrize("seconds", ["1e308", "nan", "inf"])
@pytest.mark.parametrize("verb", ["sweep", "validate", "bench"])
def test_a_timeout_that_nobody_waits_for(refuses, verb: str, seconds: str) -> None:  # type: ignore[no-untyped-def]
    given = {"sweep": ["store", "--problems", "p.csv"], "validate": ["--problems", "p.csv"]}
    words = given.get(verb, ["M=8", "N=8", "K=8"])
    said = refuses(verb, *words, "--op", "gemm", "--timeout", seconds)
    assert "--timeout" in said


def test_a_seed_of_5000_digits() -> None:
    with pytest.raises(InputError, match="must be an integer"):
        parse_policy(f"seed={'9' * 5000}")


@pytest.mark.parametrize("name", ["TILEWISE_CACHE_DIR", "TILEWISE_MODEL_DIR", "XDG_CACHE_HOME"])
def test_a_home_of_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWISE_CACHE_DIR", raising=False)
    monkeypatch.setenv(name, "~nosuchuser/x")
    settings.cache_clear()
    try:
        with pytest.raises(InputError, match="cannot be resolved"):
            settings()
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "[[devices]]\na = 1\n",
        "figures = 3\n",
        "devices = {a = 1}\n",
        "sources = []\n",
        f"x = {'9' * 5000}\n",
        "[figures]\nmemory_gb_s = {value = nan, source = 'derived: x'}\n",
    ],
)
def test_arch_files_of_another_shape(text: str) -> None:
    with pytest.raises(ArchError):
        parse_arch(text, "sm_90")


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_gb_s", float("nan")), ("clock_mhz", "fast"), ("vendor", "a\nb"), ("l1_bytes", 2**70)],
)
def test_archs_of_other_kinds(name: str, value: object) -> None:
    from tilewise.core.arch import Arch

    whole = load_arch("sm_90").to_dict()
    assert Arch.from_dict(whole).name == "sm_90"
    with pytest.raises(ArchError, match=name):
        Arch.from_dict({**whole, name: value})


def test_doubled_keys_are_refused(refuses, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "p.jsonl"
    path.write_text('{"M": 1, "N": 2, "K": 3, "M": 4}\n')
    assert "'M' appears twice" in refuses("problems", "coverage", path, "--op", "gemm")
    path.write_text('[{"M": 1, "N": 2, "K": 3, "M": 4}]\n')
    assert "'M' appears twice" in refuses("problems", "coverage", path, "--op", "gemm")


class Counted(str):
    """A column's name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, str(other))


def test_columns_are_not_compared_with_one_another(tmp_path: Path) -> None:
    """A hundred thousand of them took ten thousand million comparisons."""
    from tilewise.problems.files import read_problems
    from tilewise.problems.lines import _check_doubled

    _check_doubled("x.csv", [Counted(f"c{i}") for i in range(1000)])
    assert Counted.compared < 3000
    names = ",".join(f"c{i}" for i in range(100_000))
    path = tmp_path / "p.csv"
    path.write_text(f"M,N,K,{names}\n8,8,8,{','.join('1' * 100_000)}\n")
    assert len(read_problems(path, "gemm").labels[0]) == 100_000


def test_a_model_of_another_op(refuses, small_model: Path) -> None:  # type: ignore[no-untyped-def]
    said = refuses(
        *("explain", "--op", "conv_fwd", "--arch", "gfx950", "--dtype", "bf16"),
        *("N=1", "C=8", "K=8", "Hi=8", "Wi=8", "Y=3", "X=3", "--model", small_model),
    )
    assert "the model is for gemm" in said


@pytest.mark.parametrize(
    "change",
    [{"kernels": 3}, {"dtypes": {}}, {"figures": []}, {"op": None}, {"name": 7}, {"arch": ["x"]}],
)
def test_a_resealed_manifest_of_other_kinds(  # type: ignore[no-untyped-def]
    refuses, small_model: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = resealed(copied(small_model, tmp_path / "m"), {}, **change)
    words = ("--op", "gemm", "--arch", "gfx950", "M=8", "N=8", "K=8", "--model", folder)
    refuses("explain", *words)
    refuses("export-c", folder, tmp_path / "x.h")
    (folder / "manifest.json").write_text(json.dumps(change))
    refuses("explain", *words)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["arch", "list"], ["arch", "list", "--json"]])
def test_a_full_disk_below_standard_output(words: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "tilewise", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert ended.returncode == 2
    assert ended.stderr == "tilewise: standard output: No space left on device\n"


def test_a_cache_that_is_named_from_here_stays_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TILEWISE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    settings.cache_clear()
    try:
        assert settings().cache_dir == tmp_path / "relative" / ".cache" / "tilewise"
    finally:
        monkeypatch.undo()
        settings.cache_clear()
