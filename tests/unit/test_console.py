"""Tables for people."""

from __future__ import annotations

import json

import pytest

from tilewise.cli import bench, console, problems
from tilewise.ops.conv.problem import ConvProblem

COLUMNS = ["problem", "kernel", "chosen by", "tilewise GFLOPS", "NumPy", "PyTorch", "vs best"]
ROWS = [
    ["3x3 convolution", "unpacked 8x48", "model", "207.3", "", "221.7", "0.93x"],
    ["skinny GEMM, M=4", "skinny 4x4", "analytic", "95.7", "19.5", "21.4", "4.47x"],
]


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> str:
    monkeypatch.setattr(console.out, "_width", width)
    console.table("a title", COLUMNS, ROWS)
    return capsys.readouterr().out


def test_words_stay_whole_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(monkeypatch, capsys, 70)
    words = {word for row in (COLUMNS, *ROWS) for cell in row for word in cell.split()}
    assert words <= set(text.split())
    assert max(map(len, text.splitlines())) <= 70


def test_nothing_is_lost_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(monkeypatch, capsys, 40)
    assert max(map(len, text.splitlines())) <= 40
    letters = sorted(c for row in ROWS for cell in row for c in cell if c.isalnum())
    body = text.rpartition("─")[2]
    assert sorted(c for c in body if c.isalnum()) == letters


def test_numbers_stand_right_though_some_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, 120).splitlines()
    head = next(line for line in lines if "NumPy" in line)
    row = next(line for line in lines if "19.5" in line)
    assert row.index("19.5") + len("19.5") == head.index("NumPy") + len("NumPy")


def test_a_networks_layers_fit_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "_width", 80)
    problems.network("resnet50", batch=4)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(", all with N=4, G=1, dilation=1")
    assert any("layer1.0.downsample" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_bench_says_where_numpy_is_the_only_yardstick(
    library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = dict.fromkeys(("time_us", "spread_us", "predicted_us", "tflops", "gb_s"), 1.0)
    row = {"kernel": f"conv_fwd_vendor_{library}", "status": "ok", "is_selected": False}
    problem = ConvProblem(n=1, c=8, k=8, h=8, w=8, y=3, x=3)
    bench.tell([{**numbers, **row, "vs_vendor_interval": None}], problem, "a device")
    assert ("install PyTorch" in capsys.readouterr().out) == (library == "numpy")


def test_what_is_no_json_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit({"us": float("inf"), "rates": [float("nan"), 1.0]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "us": None,
        "rates": [None, 1.0],
    }
