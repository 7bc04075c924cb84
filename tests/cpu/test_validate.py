"""`validate` and `bench` from the command line: recordings replayed, and one real problem."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewise.data.store import Store, write_rows

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import recording  # noqa: E402

PROBLEMS, KERNELS = 5, 6
SMALL = ("M=48", "N=32", "K=24", "layout=rrr")
QUICK = ("--policy", "quick,rounds=2,time_ms=1,threads=1")


def tilewise(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewise", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800)


def shown(*words: object, code: int = 0) -> Any:
    ran = tilewise(*words, "--json")
    assert ran.returncode == code, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "tape"
    recording.record(path, problem_count=PROBLEMS, kernel_count=KERNELS, seed=5)
    return path


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    lines = [
        json.dumps({**p.to_dict(), "network": "made up"}) for p in recording.problems(PROBLEMS)
    ]
    path.write_text("\n".join([*lines, lines[0]]))  # one of them twice
    return path


def test_a_recording_is_judged(tape: Path, problems: Path, tmp_path: Path) -> None:
    words = ("validate", "--op", "gemm", "--dtype", "fp32", "--problems", problems)
    words = (*words, "--replay", tape, "--store", tmp_path / "store")
    report = shown(*words)
    assert len(report["rows"]) == report["summary"]["problems"] == PROBLEMS
    assert report["summary"]["unjudged"] == 0
    for row in report["rows"]:
        assert row["labels"] == {"network": "made up"}
        assert row["best_us"] <= (row["chosen_us"] or float("inf"))
        assert 0 <= row["efficiency"] <= 100
    mean = report["summary"]["efficiency"]["mean"]
    assert mean == pytest.approx(sum(r["efficiency"] for r in report["rows"]) / PROBLEMS, abs=1e-2)
    # The store is resumed: the same command measures nothing and judges the same.
    again = shown(*words, "--min-efficiency", 0)
    assert again["rows"] == report["rows"]
    assert again["checks"] == [{"check": "mean", "least": 0.0, "found": mean, "passed": True}]
    failed = shown(*words, "--min-efficiency", 100, "--min-vs-vendor", 1, code=1)
    assert [check["passed"] for check in failed["checks"]] == [False, False]
    assert tilewise(*words).returncode == 0


def test_what_cannot_be_judged_says_why(tape: Path, tmp_path: Path) -> None:
    """One problem that failed everywhere, and one that nobody recorded."""
    rows = list(Store(tape).measurements())
    fails = recording.problems(1)[0]
    crash = {"status": "crash", "time_us": None, "min_us": None, "spread_us": None}
    crash |= {"tflops": None, "gb_s": None}
    broken = [replace(r, **crash) if r.problem_key == fails.key else r for r in rows]
    write_rows(tmp_path / "broken", broken)
    file = tmp_path / "problems.json"
    file.write_text(json.dumps([p.to_dict() for p in recording.problems(PROBLEMS + 1)]))
    words = ("validate", "--op", "gemm", "--problems", file, "--replay", tmp_path / "broken")
    report = shown(*words)
    assert report["summary"]["unjudged"] == 2
    assert {u["problem"]["M"]: u["why"] for u in report["unjudged"]} == {
        fails.m: "no kernel gave a right result (crash)",
        fails.m + PROBLEMS: "nothing was measured",
    }
    told = tilewise(*words).stdout
    assert "2 problems could not be judged:" in told
    assert f"1: no kernel gave a right result (crash), such as M={fails.m}" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--problems", "no-such-file"), "no-such-file"),
        (("--problems", "{problems}", "--dtype", "bf16"), "bf16"),
        (("--problems", "{problems}", "--filter", "famly == 1"), "did you mean"),
        (("--problems", "{problems}", "--policy", "hasty"), "hasty"),
        (("--problems", "{problems}", "--model", "/no/such/model"), "not a model"),
    ],
)
def test_bad_input_is_two(words: tuple[str, ...], says: str, tape: Path, problems: Path) -> None:
    given = [word.replace("{problems}", str(problems)) for word in words]
    ran = tilewise("validate", "--op", "gemm", "--replay", tape, *given)
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_problem_is_judged_on_this_cpu(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps([{"M": 48, "N": 32, "K": 24, "layout": "rrr"}]))
    words = ("--op", "gemm", "--dtype", "fp32", "--problems", file, *QUICK)
    narrow = ("--filter", "family == 'unpacked' and nr <= 32 and unroll == 1")
    report = shown("validate", *words, *narrow)
    (row,) = report["rows"]
    assert row["kernels"] >= 3  # some of the pool, and the vendor's routines
    assert row["vendor_us"] > 0
    assert row["chosen_us"] >= row["best_us"] > 0
    assert row["efficiency"] == pytest.approx(100 * row["best_us"] / row["chosen_us"])
    ratio, (low, high) = row["vendor_us"] / row["chosen_us"], row["vs_vendor_interval"]
    assert low <= ratio <= high
    assert row["vs_vendor"] in (None, pytest.approx(ratio))  # noise may hide it


def test_kernels_are_timed_side_by_side() -> None:
    words = ("bench", "--op", "gemm", "--dtype", "fp32", *SMALL, *QUICK)
    report = shown(*words, "--top", 2)
    rows = report["rows"]
    assert [r["time_us"] for r in rows] == sorted(r["time_us"] for r in rows)
    assert sum(r["is_selected"] for r in rows) == 1
    assert {"gemm_vendor_torch", "gemm_vendor_numpy"} <= {r["kernel"] for r in rows}
    vendors = [r for r in rows if "vendor" in r["kernel"]]
    assert vendors[0]["vs_vendor"] == 1.0
    assert all(r["vs_vendor_interval"][0] <= 1.0 for r in vendors)  # noise may hide the ratio
    named = next(r["kernel"] for r in rows if not r["is_selected"] and r["predicted_us"])
    told = tilewise(*words, "--top", 0, "--kernel", named)
    assert told.returncode == 0, told.stderr
    assert named[:12] in told.stdout


def test_a_kernel_that_cannot_serve_is_bad_input() -> None:
    name = recording.kernels(1)[0].name
    ran = tilewise("bench", "--op", "gemm", "--dtype", "bf16", *SMALL, "--kernel", name, *QUICK)
    assert ran.returncode == 2
    assert "cannot serve" in ran.stderr
