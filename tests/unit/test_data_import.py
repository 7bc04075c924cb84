"""Import of foreign measurements: nothing is lost in silence; export gives the columns back."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tilewise.cli import data_io
from tilewise.cli import problems as problems_cli
from tilewise.core.arch import load_arch
from tilewise.data import importing
from tilewise.data.exporting import export_csv
from tilewise.data.foreign import records
from tilewise.data.importing import Imported, import_file, read_measurements
from tilewise.data.store import Store
from tilewise.errors import ArchError, FileError, InputError, StoreError
from tilewise.learn.dataset import from_measurements
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.json_text import JsonPart, json_value_at

SHARED = Path(__file__).parents[3] / "shared"
PUBLISHED = SHARED / "data" / "ck_gfx950_conv_fwd_bf16.csv"
SAMPLE = SHARED / "problems" / "ck_conv_fwd_sample.csv"

CONV = "grouped_conv_forward_bf16_2d_{}_compv3"
GEMM = (
    "gemm_universal_fp16_rcr_compv4_cshuffle_intrawave_False_False_False_False"
    "_256x256x64_2x2x1_32x32x16"
)
HEADER = (
    "kernel,problem_idx,N,C,K,G,Di,Hi,Wi,Z,Y,X,stride_d,stride_h,stride_w,pad_d,pad_h,pad_w,"
    "dilation_d,dilation_h,dilation_w,latency_ms,tflops,non_zero"
)
LAYER = "{},0,8,64,128,1,1,56,56,1,3,3,1,1,1,0,1,1,1,1,1,{},{},{}"
PROBLEM = ConvProblem(n=8, c=64, k=128, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1, dtype="bf16")
OUTPUTS = 8 * 56 * 56 * 128


def tflops(latency_ms: float) -> float:
    return PROBLEM.flops / latency_ms * 1e-9


def row(tile: str, latency_ms: float, non_zero: int = OUTPUTS) -> str:
    return LAYER.format(CONV.format(tile), latency_ms, tflops(latency_ms), non_zero)


def read(folder: Path, text: str, name: str = "foreign.csv", **choices: str) -> Imported:
    path = folder / name
    path.write_text(text)
    return read_measurements(path, load_arch("gfx950"), **choices)


class TestCsv:
    def test_kernel_fields_times_and_labels(self, tmp_path: Path) -> None:
        found = read(tmp_path, f"{HEADER}\n{row('64x64x32', 0.05)}\n", op="conv_fwd", dtype="bf16")
        (measured,) = found.rows
        assert measured.status == "ok"
        assert measured.time_us == pytest.approx(50.0)
        assert measured.tflops == pytest.approx(tflops(0.05))
        assert json.loads(measured.problem) == PROBLEM.to_dict()
        fields = json.loads(measured.kernel_fields)
        assert (fields["tile_m"], fields["tile_n"], fields["tile_k"]) == (64, 64, 32)
        assert measured.kernel == CONV.format("64x64x32")
        assert (measured.arch, measured.engine) == ("gfx950", "ck_tile")
        assert json.loads(measured.labels)["problem_idx"] == "0"

    @pytest.mark.parametrize(
        "suffix", ["", "_intrawave", "_gm2", "_dsb", "_si", "_2stage", "_interwave_gm4_dsb_si"]
    )
    def test_no_suffix_loses_its_kernel(self, tmp_path: Path, suffix: str) -> None:
        name = f"grouped_conv_bwd_weight_bf16_2d_64x64x64_compv3{suffix}"
        found = read(tmp_path, f"{HEADER}\n{LAYER.format(name, 0.05, tflops(0.05), '')}\n")
        assert found.rows[0].kernel == name
        assert found.rows[0].op == "conv_bwd_weight"
        assert not found.bad_lines

    def test_incomplete_results_are_marked_and_kept(self, tmp_path: Path) -> None:
        lines = [HEADER, row("64x64x32", 0.05, OUTPUTS // 5), row("64x64x64", 0.06, OUTPUTS - 99)]
        broken, whole = read(tmp_path, "\n".join(lines)).rows
        assert (broken.status, whole.status) == ("wrong_result", "ok")
        assert broken.time_us == pytest.approx(50.0)
        assert f"{OUTPUTS // 5} of {OUTPUTS}" in broken.message

    def test_the_first_time_with_a_value_counts_else_the_rate(self, tmp_path: Path) -> None:
        fast, empty = (CONV.format(tile) for tile in ("64x64x32", "64x64x64"))
        lines = [
            HEADER + ",time_us",
            LAYER.format(fast, "", "", OUTPUTS) + ",70.0",
            LAYER.format(empty, "", tflops(0.05), OUTPUTS) + ",",
        ]
        by_column, by_rate = read(tmp_path, "\n".join(lines)).rows
        assert (by_column.status, by_column.time_us) == ("ok", 70.0)
        assert (by_rate.status, by_rate.time_us) == ("ok", pytest.approx(50.0))

    def test_a_stray_quote_costs_its_own_line(self, tmp_path: Path) -> None:
        lines = [HEADER, '"' + row("64x64x32", 0.05), row("64x64x64", 0.06)]
        found = read(tmp_path, "\n".join(lines))
        assert [r.kernel for r in found.rows] == [CONV.format("64x64x64")]
        assert [b.number for b in found.bad_lines] == [2]

    def test_failures_are_rows_too(self, tmp_path: Path) -> None:
        lines = [
            HEADER,
            *(
                LAYER.format(CONV.format(f"{tile}x64x64"), latency, 0, 0)
                for tile, latency in ((16, 0), (32, -1), (64, "nan"), (128, ""))
            ),
        ]
        found = read(tmp_path, "\n".join(lines))
        assert [r.status for r in found.rows] == ["launch_error"] * 4
        assert [r.time_us for r in found.rows] == [None] * 4

    def test_unusable_rows_are_shown_with_line_and_reason(self, tmp_path: Path) -> None:
        lines = [
            HEADER,
            row("64x64x32", 0.05),
            LAYER.format("mystery_kernel", 0.05, 1, 1),
            LAYER.format(CONV.format("64x64x32"), "fast", 1, 1),
            row("64x64x32", 0.05).replace(",64,128,", ",-64,128,"),
            "a,b,c",
            LAYER.format(CONV.format("64x64x32").replace("forward", "bwd_data"), 0.05, 1, 1),
            LAYER.format("", 0.05, 1, 1),
        ]
        found = read(tmp_path, "\n".join(lines), op="conv_fwd", dtype="bf16")
        assert len(found.rows) == 1
        assert [b.number for b in found.bad_lines] == [3, 4, 5, 6, 7, 8]
        for bad, part in zip(
            found.bad_lines,
            ("mystery_kernel", "'fast'", "-64", "3 fields", "bwd_data", "no kernel is named"),
            strict=True,
        ):
            assert part in bad.reason
        assert found.to_dict()["bad"] == 6

    def test_a_name_unknown_to_every_op_is_told_so(self, tmp_path: Path) -> None:
        ops = "conv_fwd, conv_bwd_data, conv_bwd_weight, gemm"
        with pytest.raises(FileError, match=f"'mystery' names no kernel of {ops}"):
            read(tmp_path, f"{HEADER}\n{LAYER.format('mystery', 0.05, 1, 1)}\n")
        with pytest.raises(FileError, match="is not the name of a CK Tile convolution"):
            read(tmp_path, f"{HEADER}\n{LAYER.format(CONV.format('64'), 0.05, 1, 1)}\n")

    def test_wrong_dtype_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="its kernel computes bf16; fp16 was asked for"):
            read(tmp_path, f"{HEADER}\n{row('64x64x32', 0.05)}\n", dtype="fp16")

    def test_time_and_rate_that_disagree_are_noted(self, tmp_path: Path) -> None:
        line = LAYER.format(CONV.format("64x64x32"), 5.0, 2 * tflops(5.0), OUTPUTS)
        found = read(tmp_path, f"{HEADER}\n{line}\n")
        assert found.rows[0].time_us == pytest.approx(5000.0)
        assert sum(found.notes.values()) == 1

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "holds no measurement: it is empty"),
            ("N,C,K\n1,2,3\n", "one of kernel, kernel_name, name must name the kernel"),
            (f"{HEADER}\n", "no table and no JSON object tells of one"),
            ("nothing to see here\n", "no table and no JSON object tells of one"),
        ],
    )
    def test_files_without_measurements(self, tmp_path: Path, text: str, why: str) -> None:
        with pytest.raises(FileError, match=why):
            read(tmp_path, text)


def benchmark(m: int, latency: float, **more: Any) -> dict[str, Any]:
    rate = 2 * m * 4096 * 1024 / latency * 1e-9
    return {
        "name": GEMM,
        "problem": {
            "split_k": 1,
            "m": m,
            "n": 4096,
            "k": 1024,
            "stride_a": 1024,
            "dtype_a": "fp16",
        },
        "perf_result": {
            "latency(ms)": round(latency, 2),
            "tflops(TFlops)": rate,
            "bandwidth(GB/s)": 100.0,
        },
        **more,
    }


class TestJson:
    def test_list_of_benchmarks(self, tmp_path: Path) -> None:
        text = json.dumps([benchmark(512, 0.1), benchmark(1024, 0.2)], indent=2)
        found = read(tmp_path, text, "benchmark.json", op="gemm")
        assert [json.loads(r.problem)["M"] for r in found.rows] == [512, 1024]
        assert [r.time_us for r in found.rows] == pytest.approx([100.0, 200.0])
        wanted = GemmProblem(m=512, n=4096, k=1024, dtype="fp16", layout="rcr")
        assert found.rows[0].problem_key == wanted.key

    def test_two_digits_of_milliseconds_give_way_to_the_rate(self, tmp_path: Path) -> None:
        found = read(tmp_path, json.dumps([benchmark(64, 0.0134)]), "benchmark.json")
        assert found.rows[0].time_us == pytest.approx(13.4)
        assert not found.notes

    def test_rows_inside_objects_share_what_surrounds_them(self, tmp_path: Path) -> None:
        value = {
            "metadata": {"host": "a", "warmup": 3},
            "kernels": [
                {"kernel_name": GEMM, "results": [{"m": 1, "n": 8, "k": 8, "latency_ms": 0.01},
                                                  {"m": 2, "n": 8, "k": 8, "latency_ms": 0.02}]},
            ],
        }  # fmt: skip
        found = read(tmp_path, json.dumps(value), "benchmark.json")
        assert [json.loads(r.problem)["M"] for r in found.rows] == [1, 2]
        assert json.loads(json.loads(found.rows[0].labels)["metadata"]) == value["metadata"]
        assert list(records({"a": 1, "problem": {"b": 2}})) == [{"a": 1, "b": 2}]


class TestLogs:
    def test_fragments_in_text(self, tmp_path: Path) -> None:
        good = [json.dumps(benchmark(m, 0.1), indent=1) for m in (256, 512, 1024)]
        torn = json.dumps(benchmark(2048, 0.1), indent=1)[:90]
        text = (
            "[build] cmake {Release} -DARCH=gfx950\nRunning {} kernels\n"
            f"{good[0]}\nwarming up... done\nkernel 2: {good[1]} ok\n{torn}\n"
            f'Segmentation fault\n{{"host": "a"}}\n{good[2]}\n{{"name": "gemm_what", "m": 1}}\n'
        )
        found = read(tmp_path, text, "run.log")
        assert [json.loads(r.problem)["M"] for r in found.rows] == [256, 512, 1024]
        assert [b.number for b in found.bad_lines] == [
            1 + text[: text.index(f"{torn}\nSegm")].count("\n"),
            1 + text[: text.index('{"name": "gemm_what"')].count("\n"),
        ]
        assert "not JSON" in found.bad_lines[0].reason
        assert "gemm_what" in found.bad_lines[1].reason


def imported(folder: Path, lines: list[str], store: str = "store") -> Imported:
    path = folder / "foreign.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return import_file(path, folder / store, load_arch("gfx950"))


class TestStore:
    def test_twice_is_once_and_repeats_are_attempts(self, tmp_path: Path) -> None:
        lines = [row("64x64x32", 0.05), row("64x64x64", 0.06), row("64x64x32", 0.051)]
        first = imported(tmp_path, lines)
        assert (len(first.rows), first.known) == (3, 0)
        assert [r.attempt for r in first.rows] == [0, 0, 1]
        assert sum(first.notes.values()) == 1
        again = imported(tmp_path, lines)
        assert (len(again.rows), again.known) == (0, 3)
        more = imported(tmp_path, [*lines, row("128x128x64", 0.04)])
        assert (len(more.rows), more.known) == (1, 3)
        stored = Store(tmp_path / "store")
        assert stored.table(latest=False).num_rows == 4
        assert stored.table().num_rows == 3

    def test_a_later_verdict_holds_and_a_later_failure_does_not(self, tmp_path: Path) -> None:
        failed = LAYER.format(CONV.format("64x64x32"), -1, 0, 0)
        imported(tmp_path, [row("64x64x32", 0.05), row("64x64x64", 0.06, OUTPUTS)])
        later = imported(tmp_path, [failed, row("64x64x64", 0.06, 5)])
        assert [(r.status, r.attempt) for r in later.rows] == [
            ("launch_error", 1),
            ("wrong_result", 1),
        ]
        held = {(r.status, r.time_us) for r in Store(tmp_path / "store").measurements()}
        assert held == {("ok", 50.0), ("wrong_result", 60.0)}

    def test_export_has_the_columns_and_reads_back(self, tmp_path: Path) -> None:
        lines = [row("64x64x32", 1 / 30), row("64x64x64", 0.06, 5), row("64x64x32", 0.0511111)]
        first = imported(tmp_path, lines)
        target = tmp_path / "out.csv"
        assert export_csv(tmp_path / "store", target) == 3
        with target.open() as file:
            table = list(csv.DictReader(file))
        assert list(table[0]) == HEADER.split(",")
        latencies = [float(r["latency_ms"]) for r in table]
        assert latencies == pytest.approx([1 / 30, 0.06, 0.0511111], rel=1e-14)
        assert table[1]["non_zero"] == "5"
        back = import_file(target, tmp_path / "second", load_arch("gfx950"))
        assert [r.key for r in back.rows] == [r.key for r in first.rows]
        assert [r.status for r in back.rows] == ["ok", "wrong_result", "ok"]
        assert export_csv(tmp_path / "store", target, latest=True) == 2

    def test_failures_are_exported_on_request(self, tmp_path: Path) -> None:
        failed = LAYER.format(CONV.format("64x64x64"), -1, 0, 0)
        imported(tmp_path, [row("64x64x32", 0.05), failed])
        target = tmp_path / "out.csv"
        assert export_csv(tmp_path / "store", target) == 1
        assert export_csv(tmp_path / "store", target, failures=True) == 2

    def test_gemm_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "benchmark.json"
        path.write_text(json.dumps([benchmark(512, 0.1)]))
        first = import_file(path, tmp_path / "store", load_arch("gfx950"))
        export_csv(tmp_path / "store", tmp_path / "out.csv", op="gemm")
        back = read_measurements(tmp_path / "out.csv", load_arch("gfx950"))
        assert back.rows[0].key == first.rows[0].key

    def test_the_mark_of_promising_kernels_survives(self, tmp_path: Path) -> None:
        path, target = tmp_path / "benchmark.json", tmp_path / "out.csv"
        path.write_text(json.dumps([{**benchmark(512, 0.1), "top": 8}, benchmark(256, 0.1)]))
        import_file(path, tmp_path / "store", load_arch("gfx950"))
        export_csv(tmp_path / "store", target)
        back = import_file(target, tmp_path / "second", load_arch("gfx950"))
        assert from_measurements(back.rows).is_whole.tolist() == [False, True]

    def test_a_wrong_gemm_does_not_turn_right_on_its_way(self, tmp_path: Path) -> None:
        path, target = tmp_path / "benchmark.json", tmp_path / "out.csv"
        wrong = {**benchmark(256, 0.1), "is_valid": False}
        path.write_text(json.dumps([benchmark(512, 0.1), wrong]))
        first = import_file(path, tmp_path / "store", load_arch("gfx950"))
        assert [r.status for r in first.rows] == ["ok", "wrong_result"]
        assert export_csv(tmp_path / "store", target) == 1
        assert export_csv(tmp_path / "store", target, failures=True) == 2
        back = read_measurements(target, load_arch("gfx950"))
        assert [(r.key, r.status) for r in back.rows] == [(r.key, r.status) for r in first.rows]

    def test_export_refuses_clearly(self, tmp_path: Path) -> None:
        imported(tmp_path, [row("64x64x32", 0.05)])
        with pytest.raises(StoreError, match="does not exist"):
            export_csv(tmp_path / "absent", tmp_path / "out.csv")
        with pytest.raises(StoreError, match="has no gemm rows"):
            export_csv(tmp_path / "store", tmp_path / "out.csv", op="gemm")
        with pytest.raises(FileError, match="is a folder"):
            export_csv(tmp_path / "store", tmp_path)
        with pytest.raises(FileError, match="would hold CSV"):
            export_csv(tmp_path / "store", tmp_path / "out.json")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_published_measurements_import_whole(tmp_path: Path) -> None:
    found = import_file(
        PUBLISHED, tmp_path / "store", load_arch("gfx950"), op="conv_fwd", dtype="bf16"
    )
    assert (len(found.rows), len(found.bad_lines)) == (10_690, 0)
    assert len({r.kernel for r in found.rows}) == 30
    sources = [json.loads(r.labels)["source"] for r in found.rows]
    assert (sources.count("training_20"), sources.count("validation_300")) == (3760, 6930)
    assert export_csv(tmp_path / "store", tmp_path / "out.csv") == 10_690


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample is not here")
def test_sample_imports_whole_and_marks_incomplete_results(tmp_path: Path) -> None:
    found = import_file(SAMPLE, tmp_path / "store", load_arch("gfx950"))
    assert found.statuses == {"wrong_result": 9, "ok": 7}
    with SAMPLE.open() as file:
        for given, got in zip(csv.DictReader(file), found.rows, strict=True):
            assert got.kernel == given["kernel"]
            assert got.tflops == pytest.approx(float(given["tflops"]), rel=1e-9)


data_app = typer.Typer()
data_app.command("import")(data_io.import_)
data_app.command("export")(data_io.export)


def run(app: typer.Typer, *words: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    if result.exception:
        raise result.exception
    return json.loads(result.stdout)


class TestCommandLine:
    def test_import_and_export(self, tmp_path: Path) -> None:
        path, store = tmp_path / "foreign.csv", tmp_path / "store"
        path.write_text(f"{HEADER}\n{row('64x64x32', 0.05)}\nrubbish\n")
        words = ["--arch", "gfx950", "--op", "conv_fwd", "--dtype", "bf16"]
        told = run(data_app, "import", path, store, *words)
        assert (told["rows"], told["statuses"], told["bad"]) == (1, {"ok": 1}, 1)
        assert told["bad_lines"][0]["line"] == 3
        assert run(data_app, "export", store, tmp_path / "out.csv")["rows"] == 1
        with pytest.raises(ArchError, match="gfx000"):
            run(data_app, "import", path, store, "--arch", "gfx000")

    def test_problem_sets(self, tmp_path: Path) -> None:
        app = problems_cli.app
        arch = ["--arch", "sm_90", "--dtype", "bf16"]
        drawn = tmp_path / "drawn.jsonl"
        told = run(app, "sample", "--op", "gemm", "--count", 20, "--out", drawn, *arch)
        assert (told["count"], told["file"]) == (20, str(drawn))
        wide = run(app, "sample", "--op", "conv_fwd", "--wide", "--count", 30, *arch)
        assert len(wide["problems"]) == 30
        assert run(app, "edge", "--op", "gemm", *arch)["count"] > 500
        report = run(app, "coverage", drawn, "--op", "gemm")
        assert report["distinct"] == 20
        assert "batch>=2" in report["holes"]
        more = run(app, "sample", "--op", "gemm", "--count", 20, "--avoid", drawn, *arch)
        again = run(app, "import", drawn)
        assert not {json.dumps(p) for p in more["problems"]} & {
            json.dumps(p) for p in again["problems"]
        }

    def test_networks_and_augmentation(self, tmp_path: Path) -> None:
        app = problems_cli.app
        listed = {row["network"]: row for row in run(app, "network")["networks"]}
        assert len(listed) >= 12
        assert (listed["resnet50"]["conv"], listed["resnet50"]["gemm"]) == (53, 1)
        assert run(app, "network", "bert_base")["op"] == "gemm", "it has no other layers"
        layers = run(app, "network", "resnet50", "--batch", 4, "--dtype", "bf16")
        assert layers["problems"][0]["network"] == "resnet50"
        scored = tmp_path / "oof.csv"
        scored.write_text("M,N,K,efficiency\n1,1536,7168,0.5\n4096,4096,4096,1.0\n")
        proposed = run(app, "augment", scored, "--op", "gemm", "--count", 10)
        assert {p["M"] for p in proposed["problems"]} == {1}
        scored.write_text(
            "M,N,K,efficiency\n1,1536,7168,0.5\n8,8,8,1.7\n8,8,9,fast\n8,8,10,\n8,8,11,nan\n"
        )
        told = run(app, "augment", scored, "--op", "gemm", "--count", 10)
        assert {p["M"] for p in told["problems"]} == {1}
        assert [bad["line"] for bad in told["bad_lines"]] == [3, 4, 5, 6]
        assert all("between 0 and 1" in bad["reason"] for bad in told["bad_lines"])
        scored.write_text("M,N,K\n1,1536,7168\n")
        with pytest.raises(FileError, match="no column efficiency"):
            run(app, "augment", scored, "--op", "gemm")

    def test_import_reports_bad_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "problems.csv"
        path.write_text("M,N,K\n1,2,3\n1,x,3\n")
        told = run(problems_cli.app, "import", path, "--op", "gemm")
        assert told["count"] == 1
        assert [b["line"] for b in told["bad_lines"]] == [3]
        shown = CliRunner().invoke(problems_cli.app, ["import", str(path), "--op", "gemm"])
        assert shown.exit_code == 0
        assert "1 gemm fp32 rcr" in shown.stdout

    def test_capture_of_a_program(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        script = tmp_path / "program.py"
        script.write_text(
            "import sys, torch\nprint('hello')\n"
            "rows = int(sys.argv[1])\ntorch.ones(rows, 4) @ torch.ones(4, 5)\n"
        )
        result = CliRunner().invoke(problems_cli.app, ["capture", "--json", str(script), "3"])
        told = json.loads(result.stdout)
        assert told["problems"][0]["M"] == 3
        script.write_text("def f():\n    raise ValueError('boom')\nf()\n")
        with pytest.raises(InputError, match=r"failed in .*program\.py:2: ValueError: boom"):
            run(problems_cli.app, "capture", script)
        script.write_text("raise SystemExit(3)\n")
        with pytest.raises(InputError, match="exit code 3"):
            run(problems_cli.app, "capture", script)

    def test_capture_of_a_program_that_goes_its_own_ways(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torch")
        script, elsewhere = tmp_path / "program.py", tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(tmp_path)
        script.write_text(
            f"import os, sys, torch\nos.chdir({str(elsewhere)!r})\nsys.path.pop(0)\n"
            "torch.ones(3, 4) @ torch.ones(4, 5)\n"
        )
        before = list(sys.path)
        run(problems_cli.app, "capture", script, "--out", "found.csv")
        assert (tmp_path / "found.csv").exists() and not any(elsewhere.iterdir())
        assert sys.path == before
        script.write_text(
            "class Own(BaseException):\n    def __str__(self): raise ValueError\nraise Own\n"
        )
        with pytest.raises(InputError, match=r"failed in .*program\.py:3: .*Own"):
            run(problems_cli.app, "capture", script)

    def test_coverage_says_which_empty_pairs_it_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "problems.csv"
        path.write_text("M,N,K\n64,64,64\n512,512,512\n")
        pairs = run(problems_cli.app, "coverage", path, "--op", "gemm")["pair_holes"]
        shown = CliRunner().invoke(problems_cli.app, ["coverage", str(path), "--op", "gemm"])
        told = " ".join(shown.stdout.split())
        assert f"{len(pairs)} of the empty ones have problems in each bucket" in told


@pytest.mark.parametrize("broken", ["{\n", '{"\n', '{"name"\n'])
def test_logs_of_opening_braces_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A decoder that fails counts the lines before: 400 kB of braces took three minutes."""
    seen: list[int] = []

    def spy(text: str, at: int, line: int) -> tuple[JsonPart, int]:
        seen.append(len(text))
        return json_value_at(text, at, line)

    monkeypatch.setattr(importing, "json_value_at", spy)
    monkeypatch.setattr(importing, "_MOST_CHARACTERS", 64)
    (tmp_path / "log").write_text(broken * 1000 + 'x {"name": "nosuch", "latency_ms": 1}')
    with pytest.raises(FileError, match="holds no measurement"):
        read_measurements(tmp_path / "log", load_arch("gfx950"), op="gemm")
    assert len(seen) in (1, 1001) and max(seen[1:], default=0) <= 64
