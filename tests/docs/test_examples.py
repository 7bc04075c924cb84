"""The examples run on whatever device is there, and the README's picture is of today's results."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(example: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(example), "4"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "PyTorch" in ended.stdout
    assert "tilewise" in ended.stdout


def results_of(section: str, first: str, row: str, column: int) -> str:
    """A cell of the published results."""
    module = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    return next(cells[column] for cells in module["table"](section, first) if cells[0] == row)


CONV = ("Convolution on an H200 against cuDNN", "selected", "all")
CLAIMS = {
    "bf16 GEMM, 126 shapes": (
        *("GEMM on an H200 against cuBLAS", "", "selected, the vendor among the candidates"),
        1,
    ),
    "| convolution forward, ": (*CONV, 1),
    "gradient of the input": (*CONV, 2),
    "gradient of the filter": (*CONV, 3),
}
"""Row of the README's table -> where its numbers come from: mean, worst and count."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_readme_claims_what_was_measured(claim: str) -> None:
    (line,) = (text for text in (ROOT / "README.md").read_text().splitlines() if claim in text)
    for number in re.findall(r"[\d.]+", results_of(*CLAIMS[claim])):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", line), (number, line)


def test_the_readme_claims_what_was_judged() -> None:
    readme = (ROOT / "README.md").read_text()
    served = "all, as a dispatcher takes it, ties of 2.25 % going to cuBLAS"
    judged = ("What the H200's GEMM model chooses", "dtype", served)
    count, mean, worst = (results_of(*judged, column) for column in (1, 2, 4))
    assert f"{count} problems the model never saw" in readme
    assert f"| {mean} % of its speed | {worst} % |" in readme
    convs = ("Convolution on an H200 against cuDNN", "op")
    counts, means, worsts = (
        [results_of(*convs, op, column) for op in ("forward", "backward-data", "backward-weight")]
        for column in (1, 2, 5)
    )
    assert f"{sum(map(int, counts))} problems the model never saw" in readme
    assert f"| {', '.join(means)} % of its speed | {', '.join(worsts)} % |" in readme
    model = ("A whole model on an H200", "training step, batch 256, eager", "ResNeXt-50 32x4d")
    step = results_of(*model, 3)
    assert f"| {step.partition('(')[2].rstrip(')')} times as fast | one model |" in readme


def test_the_picture_is_of_the_published_results() -> None:
    script = ROOT / "benchmarks" / "picture.py"
    assert subprocess.run([sys.executable, str(script), "--check"]).returncode == 0
