"""`export-cpp`: bad input gets one line and leaves nothing; `--top` tells what it costs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise.cli import main
from tilewise.cli.app import app

USUAL = ("--op", "gemm", "--arch", "x86_avx512", "--dtype", "fp32")
BAD = {
    "no such op": (("--op", "gem", "--arch", "x86_avx512", "--dtype", "fp32"), "unknown"),
    "no model": (("--op", "gemm", "--arch", "gfx942", "--dtype", "bf16"), "no model of gemm"),
    "others' kernels": (
        ("--op", "conv_fwd", "--arch", "gfx950", "--dtype", "bf16"),
        "export-c writes its ranking",
    ),
    "no dtype": (("--op", "gemm", "--arch", "sm_90", "--dtype", "int8"), "models there know"),
    "no kernel": ((*USUAL, "--filter", "mr == 5"), "loosen --filter"),
    "no field": ((*USUAL, "--where", "zz > 1"), "unknown field"),
    "no problem": ((*USUAL, "--where", "m < 0"), "is left by --where"),
    "no layout": ((*USUAL, "--layout", "abc"), "gemm has rcr"),
    "no such op there": ((*USUAL, "--layout", "conv_fwd:nhwc"), "--op names gemm"),
    "no result": ((*USUAL, "--out-dtype", "int32"), "can give"),
    "too many objects": (
        ("--op", "gemm", "--arch", "sm_90", "--dtype", "bf16", "--layout", "rcr"),
        "narrow it with",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_gets_a_line_and_leaves_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, expected = BAD[name]
    more = ("--max-objects", "1", "--filter", 'family == "tma"') if "objects" in name else ()
    arguments = ["export-cpp", str(tmp_path / "out"), *given, *more]
    monkeypatch.setattr("sys.argv", ["tilewise", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert expected in said
    assert said.count("tilewise:") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    ran = CliRunner().invoke(app, ["export-cpp", str(tmp_path / "out"), *USUAL])
    assert ran.exit_code != 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    ran = CliRunner().invoke(app, ["export-cpp", str(tmp_path / "file" / "out"), *USUAL])
    assert "nothing can be made in" in str(ran.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_top_keeps_kernels_that_win_and_tells_the_loss(tmp_path: Path) -> None:
    problems = tmp_path / "shapes.csv"
    rows = [f"{m},{n},{k}" for m in (1, 64, 1024) for n in (64, 1000) for k in (64, 512)]
    problems.write_text("\n".join(["M,N,K", *rows]) + "\n")
    found = {}
    for top in (1, 100):
        out = tmp_path / f"top{top}"
        given = ["--top", str(top), "--problems", str(problems), "--layout", "rcr", "--json"]
        ran = CliRunner().invoke(app, ["export-cpp", str(out), *USUAL, *given])
        assert ran.exit_code == 0, ran.output
        found[top] = json.loads(ran.stdout[ran.stdout.index("{") :])
        facts = (out / "include" / "tilewise.h").read_text().splitlines()[0]
        assert "x86_avx512" in facts
        assert "x86_avx512_gemm_fp32" in facts
    few, all_of = (found[top]["losses"]["gemm"] for top in (1, 100))
    assert found[1]["kernels"]["gemm"] == few["kept"] == 1
    assert few["mean"] > 0
    assert found[100]["kernels"]["gemm"] == all_of["winners"] > 1
    assert all_of["mean"] == all_of["worst"] == all_of["unserved"] == 0
    written = sum(p.stat().st_size for p in (tmp_path / "top1").rglob("*") if p.is_file())
    assert found[1]["total_bytes"] == written


def test_options_may_name_the_op_that_they_are_for(tmp_path: Path) -> None:
    """One file with problems of both ops, too; a line that is none of either is told."""
    problems, out = tmp_path / "mixed.jsonl", tmp_path / "both"
    lines = (
        {"op": "gemm", "M": 64, "N": 64, "K": 64},
        {"op": "conv_fwd", "N": 1, "C": 16, "K": 16, "Hi": 8, "Wi": 8, "Y": 3, "X": 3},
        {"op": "conv_fwd", "N": 1, "C": 17, "K": 16, "G": 16, "Hi": 8, "Wi": 8, "Y": 3, "X": 3},
    )
    problems.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given = [*USUAL, "--op", "conv_fwd", "--top", "2", "--problems", str(problems)]
    given += ["--layout", "gemm:rcr", "--where", "gemm: batch == 1", "--where", "gemm: k < 512"]
    ran = CliRunner().invoke(app, ["export-cpp", str(out), *given])
    assert ran.exit_code == 0, ran.output
    assert "C is 17, which 16 groups (G) do not divide" in ran.stderr
    assert "line 2" not in ran.stderr
    rules = (out / "src" / "gemm_rules.cpp").read_text()
    assert "exported for problems with (batch == 1) and (k < 512)" in rules
    assert "exported for problems with" not in (out / "src" / "conv_fwd_rules.cpp").read_text()
    assert "gemm: words dtype, out_dtype, layout (rcr, rrr, crr, ccr)" in header(out)


def header(folder: Path) -> str:
    """The C interface, which C takes without a warning."""
    path = folder / "include" / "tilewise.h"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    source = ["-fsyntax-only", "-x", "c", "-include", str(path), "/dev/null"]
    subprocess.run(["cc", *strict, *source], check=True)
    return path.read_text()
