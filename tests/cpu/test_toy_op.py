"""An op is one folder: the toy op of `tests/toy_op` goes through everything."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler

HERE = Path(__file__).parents[1]
QUICK = ("--policy", "quick,rounds=2,time_ms=1,threads=1")
OP = ("--op", "row_sum")
WORDS = ("rows=100", "columns=1000")
PROBLEMS = 24

pytestmark = pytest.mark.skipif(
    find_compiler() is None or not detect("cpu").has("avx2"), reason="no compiler, or no AVX2"
)


def started(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TILEWISE_OPS": "toy_op", **more}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, env=env)


def shown(*words: object) -> Any:
    """What a verb says in JSON."""
    ran = started("-m", "tilewise", *words, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems, a store and a model, each made by its verb."""
    folder = tmp_path_factory.mktemp("toy")
    drawn = shown("problems", "sample", *OP, "--count", PROBLEMS, "-o", folder / "problems.csv")
    assert drawn["count"] == PROBLEMS
    ran = started(
        *("-m", "tilewise", "sweep", folder / "store", *OP),
        *("--problems", folder / "problems.csv", *QUICK),
    )
    assert ran.returncode == 0, ran.stderr
    shown("train", folder / "store", *OP, "--out", folder / "model", "--trees", 20, "--folds", 3)
    return folder


def test_problems_of_it(work: Path) -> None:
    wide = shown("problems", "sample", *OP, "--count", 10, "--wide")["problems"]
    assert {row["family"] for row in wide} == {"tall", "wide"}
    assert shown("problems", "edge", *OP)["count"] == 25
    assert shown("problems", "coverage", work / "problems.csv")["problems"] == PROBLEMS
    with (work / "problems.csv").open() as file:
        rows = [{**row, "efficiency": "0.5"} for row in csv.DictReader(file)]
    with (work / "judged.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    assert shown("problems", "augment", work / "judged.csv", "--count", 5)["count"] == 5
    (work / "renamed.csv").write_text("height,WIDTH\n3,4\n")
    read = shown("problems", "import", work / "renamed.csv", *OP)["problems"]
    assert [(row["rows"], row["columns"]) for row in read] == [(3, 4)]
    (work / "commands.txt").write_text("MIOpenDriver reduce -r 3 --columns 4\n")
    read = shown("problems", "import", work / "commands.txt", *OP)["problems"]
    assert [(row["rows"], row["columns"]) for row in read] == [(3, 4)]
    table_of_them = started("-m", "tilewise", "problems", "edge", *OP)
    assert table_of_them.returncode == 0 and "columns" in table_of_them.stdout


def test_kernels_of_it(tmp_path: Path) -> None:
    listed = shown("kernels", "list", *OP, "--arch", "x86_avx2")
    assert len(listed) == 4
    assert shown("kernels", "count", *OP, "--arch", "x86_avx2")["count"] == 4
    shown("kernels", "export", *OP, "--arch", "x86_avx2", tmp_path / "kernels.json")
    name = "row_sum_cpu_avx2_partial_s8"
    assert shown("kernels", "check", *OP, "--arch", "x86_avx2", name)["refused"] == {}
    assert shown("build", *OP)["ok"] == 4


def test_its_measurements(work: Path, tmp_path: Path) -> None:
    checked = shown("data", "check", work / "store")
    assert checked["rows"] == checked["ok"] >= PROBLEMS * 4
    assert shown("data", "show", work / "store")
    shown("data", "export", work / "store", tmp_path / "rows.csv", *OP)
    with (tmp_path / "rows.csv").open() as file:
        assert {"rows", "columns", "latency_ms"} <= set(next(csv.reader(file)))
    again = shown(
        "data", "import", tmp_path / "rows.csv", tmp_path / "again", *OP, "--arch", arch()
    )
    assert again["problems"] == PROBLEMS and again["bad"] == 0
    shown("report", work / "store", "--out", tmp_path / "report.html")
    shown("data", "publish", work / "store", tmp_path / "lean")
    assert shown("data", "check", tmp_path / "lean")["ok"] == checked["ok"]
    merged = shown("data", "merge", tmp_path / "merged", work / "store", tmp_path / "lean")
    assert merged["added"] >= checked["rows"] and not merged["conflicts"]


def arch() -> str:
    return detect("cpu").name


def test_its_model(work: Path, tmp_path: Path) -> None:
    model = ("--model", work / "model")
    report = shown("evaluate", work / "model", work / "store")
    assert {"shape", "width"} <= set(report["slices"]) and "direction" not in report["slices"]
    assert set(report["slices"]["width"]) <= {"odd", "even"}
    assert shown("compare", work / "model", work / "model", work / "store")
    assert shown("predict", *OP, *WORDS, *model)
    assert shown("explain", *OP, *WORDS, *model)
    assert shown("search", *OP, *WORDS, *model)
    ran = started("-m", "tilewise", "export-c", work / "model", tmp_path / "model.h", "--json")
    assert ran.returncode == 0, ran.stderr
    words = ("export-cpp", tmp_path / "library", *OP, "--arch", arch(), "--dtype", "fp32")
    made = shown(*words, *model)
    assert made["kernels"]["row_sum"] > 0


def test_it_is_ranked_measured_and_validated(work: Path) -> None:
    assert shown("rank", *OP, *WORDS)["ranking"]
    assert shown("bench", *OP, *WORDS, *QUICK)["rows"]
    few = work / "few.csv"
    few.write_text("\n".join((work / "problems.csv").read_text().splitlines()[:3]))
    words = ("validate", *OP, "--dtype", "fp32", "--problems", few, *QUICK)
    tuned = shown("tune", *OP, "--problems", few, "--out", work / "plan.json")
    assert len(tuned["rows"]) == 2
    report = shown(*words, "--store", work / "judged")
    assert report["summary"]["problems"] == 2 and report["summary"]["failures"] == {}


RUN = """
import numpy as np, torch, tilewise as tw
from tilewise.core.arch import load_arch
from tilewise.dispatch import default_registry
from tilewise.engines.device import detect
from tilewise.ops.contract import get_op

problem = get_op("row_sum").make_problem(rows=33, columns=77)
choice = tw.select(problem)
assert choice.kernel.op == "row_sum", choice
x = np.random.default_rng(0).standard_normal((33, 77)).astype(np.float32)
registry = default_registry("row_sum", detect("cpu"))
ran = 0
for kernel in registry.kernels:
    only = registry.filter(lambda k: k == kernel)
    for given in (x, torch.from_numpy(x)):
        y = np.asarray(only.run(problem, given).out)
        assert only.run(problem, given).kernel == kernel and y.shape == (33,)
        assert np.allclose(y, x.astype(np.float64).sum(1), atol=1e-4), kernel
        ran += 1
ranked = tw.Predictor(r"{model}").rank_kernels(problem, registry.kernels)
assert len(ranked) == len(registry.kernels)
print(ran)
"""


def test_it_is_selected_and_run(work: Path) -> None:
    ran = started("-c", RUN.format(model=work / "model"), TILEWISE_MODEL_DIR=str(work))
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 10


@pytest.mark.parametrize("value", ["nowhere", "toy_op,toy_op.missing", ".toy_op", "json"])
def test_a_package_that_is_none_is_named(value: str) -> None:
    ran = started("-m", "tilewise", "kernels", "list", "--op", "gemm", TILEWISE_OPS=value)
    assert ran.returncode == 2
    assert "TILEWISE_OPS names" in ran.stderr and "Traceback" not in ran.stderr
