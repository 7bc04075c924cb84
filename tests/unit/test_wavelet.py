"""Kernels with load warps of their own: what the pool has, and the benchmarks that judge them."""

from __future__ import annotations

import json
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.fields import kernel_values

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import conv_contest
import gpu_vs_vendor
import vendor_tables
import wavelet
import wavelet_counters

H200 = load_arch("sm_90:H200")
OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
LAYER = {"n": 8, "c": 256, "k": 256, "h": 50, "w": 50, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
POINTWISE = {**LAYER, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0}
VOLUME = {**LAYER, "n": 1, "d": 9, "z": 3, "pad_d": 1}
CK_TILES = {(64, 64), (64, 128), (128, 64), (128, 128)}


def pool_of(op: str) -> list[Kernel]:
    return load_pool(get_op(op), H200)


def dense(op: str, family: str, dtype: str) -> list[DenseConvKernel]:
    listed = [k for k in pool_of(op) if type(k) is DenseConvKernel]
    return [k for k in listed if (k.family, k.dtype) == (family, dtype)]


def problem(op: str, sizes: dict[str, int], dtype: str = "bf16") -> ConvProblem:
    return ConvProblem(direction=op.removeprefix("conv_"), dtype=dtype, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["im2col", "rows", "gather", "halo"])
@pytest.mark.parametrize("op", OPS)
def test_the_pool_has_every_way_to_divide_the_warps(op: str, family: str, dtype: str) -> None:
    kernels = dense(op, family, dtype)
    assert {k.math_groups for k in kernels} == {1, 2, 3}
    assert len({k.load_warps / (4 * k.math_groups) for k in kernels}) >= 2
    assert len({k.load_warps for k in kernels}) == 2
    takes_turns = op != "conv_bwd_weight" and family != "halo"
    assert any(k.pingpong for k in kernels) == takes_turns


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("op", OPS)
def test_layers_are_served_by_every_loader_in_every_tile(op: str, dtype: str) -> None:
    why = get_op(op).why_unusable
    for sizes, families in (
        (LAYER, {"im2col", "gather", "halo"}),
        (POINTWISE, {"im2col", "rows", "gather", "halo", "gemm"}),
        (VOLUME, {"im2col", "gather", "halo"}),
        ({**LAYER, "c": 255, "k": 21}, {"gather"}),
    ):
        p = problem(op, sizes, dtype)
        legal = [k for k in pool_of(op) if wavelet.is_wavelet(k) and why(k, p, H200) is None]
        assert {k.family for k in legal} == families  # type: ignore[attr-defined]
        tiles = {k.tile[:2] for k in legal}  # type: ignore[attr-defined]
        assert tiles >= CK_TILES and max(m * n for m, n in tiles) >= 128 * 256


@pytest.mark.parametrize("op", OPS)
def test_a_selector_sees_who_loads(op: str) -> None:
    told = {(k.engine, getattr(k, "product", k.family)): kernel_values(k) for k in pool_of(op)}  # type: ignore[attr-defined]
    loads = {kind for kind, values in told.items() if values.get("k_load_warps")}
    own = {("triton", name) for name in ("ws", "duo", "pingpong")}
    own -= {("triton", "pingpong")} if op == "conv_bwd_weight" else set()  # the pool lists none
    own |= {("cuda", name) for name in ("im2col", "rows", "gather", "halo")}
    if op != "conv_bwd_weight":  # a thread that multiplies starts the gradient's copies
        own |= {("cuda", name) for name in ("grouped", "padded", "ragged", "taps")}
        own |= {("cuda", "stem" if op == "conv_fwd" else "image")}
    assert loads == own
    assert "kernel_load_warps" in get_op(op).features.features


def stand() -> Any:
    """An H200 that is not there, for what is decided before a launch."""
    return conv_contest.Offer.ahead("conv_bwd_weight", "bf16")


def args(**more: Any) -> Namespace:
    usual = {"dtype": "bf16", "batch": 8, "most": 10, "others": 4, "minutes": 0.0, "without": ""}
    usual |= {"ops": "conv_bwd_weight", "names": False, "dry_run": False}
    return Namespace(**usual | more)


def test_both_sides_and_every_family_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wavelet.Stand, "gpu", lambda op, dtype: stand())
    monkeypatch.setattr(wavelet, "ranker_for", lambda *_: conv_contest.AnalyticRanker())
    without = stand().pool[0].name
    cases = list(wavelet.cases("conv_bwd_weight", args(without=f"{without},implicit")))
    assert not any(getattr(k, "family", "") == "implicit" for c in cases for k in c.tried)
    assert len(cases) == 37 and sum(case.layer in wavelet.TWINS for case in cases) == 1
    for case in cases:
        own = [k for k in case.tried if wavelet.is_wavelet(k)]
        assert len(own) <= 10 and len(case.tried) <= 14
        why = get_op(case.given.op).why_unusable
        legal = [k for k in stand().pool if why(k, case.given, H200) is None]
        for side in (True, False):
            families = {k.family for k in legal if wavelet.is_wavelet(k) == side} - {"implicit"}
            assert {k.family for k in case.tried if wavelet.is_wavelet(k) == side} == families
        assert without not in {k.name for k in case.tried}


def test_kernels_are_compiled_in_the_order_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[str]] = []

    def compile_pairs(_: Any, pairs: Sequence[tuple[str, str]], workers: int) -> None:
        compiled.append([kernel for kernel, _ in pairs])
        if len(compiled) == 2:
            raise OSError("no compiler")  # later parts are compiled when they are measured

    monkeypatch.setattr(wavelet, "compile_pairs", compile_pairs)
    shared = stand()
    cases = [
        wavelet.Case(layer=str(at), given=problem("conv_fwd", LAYER), stand=shared, tried=(at,))  # type: ignore[arg-type]
        for at in range(20)
    ]
    compiling = wavelet.Compiling(cases)
    assert all(compiling.wait_for(case, 10) for case in cases)
    assert [len(part) for part in compiled] == [6, 6, 8]


def rows() -> list[wavelet.Row]:
    """Made-up times of four layers."""
    made = []
    for at, (mine, other, vendor) in enumerate(((50, 80, 100), (90, 60, 60), (40, 60, 50))):
        p = problem("conv_bwd_weight", {**LAYER, "c": 64 * (at + 1)})
        name = stand().pool[at].name
        row = wavelet.Row(
            op=p.op, layer=f"l{at}", problem=p.to_dict(), shape_class="dense", vendor_us=vendor
        )
        made.append(
            replace(row, wavelet=name, wavelet_us=mine, other="x", other_us=other, roofline=0.5)
        )
    p = problem("conv_bwd_weight", POINTWISE)
    alone = wavelet.Row(
        op=p.op, layer="1x1", problem=p.to_dict(), shape_class="pointwise", vendor_us=40.0
    )
    return [*made, replace(alone, other="y", other_us=20.0, roofline=0.25)]


def test_the_summary_counts_wins_and_means() -> None:
    found = wavelet.summary(rows())
    assert (found["layers"], found["served"], found["wavelet_fastest"]) == (4, 4, 2)
    assert found["dense"] == pytest.approx(
        {
            "count": 3,
            "geomean": (2 * 1 * 1.25) ** (1 / 3),
            "min": 1.0,
            "behind": 0,
            "roofline": 0.5,
        },
        abs=1e-3,
    )
    assert found["all"]["geomean"] == pytest.approx((2 * 1 * 1.25 * 2) ** 0.25, abs=1e-3)


def test_rows_come_back_from_a_file_that_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(wavelet.asdict(row)) for row in rows()]
    path.write_text("\n".join(lines)[:-20])
    assert wavelet.read(path) == rows()[:3]
    assert "no row" in capsys.readouterr().err
    assert "| l1 | 8 128-> 256 g1 50x50 3x3 s1 | 90.0 | 60.0 | 60.0 | 1.00 | `x` |" in (
        wavelet.tables(wavelet.read(path))
    )


def test_layers_are_measured_once_and_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    listed = wavelet.layers("conv_fwd", "bf16", 8)[4:7]
    monkeypatch.setattr(wavelet, "layers", lambda *_: listed[:2])
    command = ["wavelet.py", "--dry-run", "--ops", "conv_fwd", "--most", "1", "--others", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    assert wavelet.main() == 0
    names = ["layer2.1.conv1", "fpn.inner.c3", "layer2.1.conv2"]
    first = wavelet.read(out)
    assert [row.layer for row in first] == names
    assert first[1] == replace(first[0], layer="fpn.inner.c3") and first[0].vendor_us > 0
    monkeypatch.setattr(wavelet, "layers", lambda *_: listed)
    assert wavelet.main() == 0
    again = wavelet.read(out)
    assert again[:3] == first and len(again) == 4
    assert "1 of 1 layers" in capsys.readouterr().err


def test_the_time_may_be_up_before_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wavelet, "layers", lambda *_: [("one", problem("conv_fwd", LAYER))])
    asked = args(ops="conv_fwd", dry_run=True, minutes=1e-9, most=1, others=1)
    assert list(wavelet.rows_of(asked, [])) == []


def test_a_side_that_is_slower_is_timed_in_turn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = conv_contest.Stand.dry("conv_fwd")
    p = made.fitted(problem("conv_fwd", LAYER))
    tried = conv_contest.shortlist(p, made, 6)
    alone = conv_contest.contest(p, made, tried, leaders=1)
    slower = min(set(alone.screened_us) - set(alone.times_us))
    found = conv_contest.contest(p, made, tried, is_rival=lambda k: k.name == slower, leaders=1)
    assert len(alone.times_us) == 2 and len(found.times_us) == 3


def test_a_kernel_that_hangs_ends_the_run_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(wavelet.os, "_exit", lambda code: ended.set())
    first, second = stand().pool[:2]
    watch = wavelet.Watch(600.0)
    watch.note(first)
    held = watch._timer
    watch._seconds = 0.01
    watch.note(second)
    assert held is not None and held.finished.is_set(), "the first one came back"
    assert ended.wait(60)
    told = capsys.readouterr().err
    assert second.name in told and first.name not in told
    watch.stop()


def counter_lines(counts: Sequence[int]) -> list[str]:
    """What the profiler prints: a kernel that waits, then those of a call, for each pick."""
    head = ["ID", "Process ID", "Kernel Name", *wavelet_counters.METRICS]
    units = ["", "", "", "ns", *["%"] * (len(wavelet_counters.METRICS) - 1)]
    lines, number = [head, units], 0
    for at, launches in enumerate(counts):
        for launch in range(launches + 1):
            name = f"kernel_{at}_{launch}" if launch else "spin_kernel(long)"
            values = [f"{1000 * (10 * at + launch):,}", *["1,234.5"] * (len(head) - 4)]
            lines.append([str(number), "7", name, *values])
            number += 1
    return [",".join(f'"{cell}"' for cell in line) for line in lines]


def test_counters_are_those_of_the_longest_launch() -> None:
    chosen = wavelet_counters.picks(rows(), "conv_bwd_weight", 2)
    assert [(pick.layer, pick.side) for pick in chosen] == [
        ("l0", "wavelet"), ("l0", "other"), ("l1", "wavelet"), ("l1", "other"),
    ]  # fmt: skip
    table = list(wavelet_counters.csv.reader(counter_lines([2, 1, 0, 1])))
    found = wavelet_counters.counted(table, chosen)
    assert [entry.launches for entry in found] == [2, 1, 0, 1]
    assert [e.values.get(wavelet_counters.DURATION) for e in found] == [2, 11, None, 31]
    shown = wavelet_counters.columns(found[0])
    assert shown["issue %"] == "1234.5" and shown["conflicts %"] == "100.0"
    lines = wavelet_counters.table_of(found).splitlines()
    assert len(lines) == 6 and len({line.count("|") for line in lines}) == 1
    assert lines[4].count(" - ") == len(shown)


def test_counters_in_a_line_each_are_read_too() -> None:
    head = ["ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"]
    duration = wavelet_counters.DURATION
    table = [head, ["0", "wait", duration, "us", "1"], ["1", "own", duration, "ms", "0.5"]]
    table += [["1", "own", "lts__t_sector_hit_rate.pct", "%", "n/a"]]
    assert wavelet_counters.launches(table) == [("wait", {duration: 1.0}), ("own", {duration: 500})]


PROFILER = r"""#!{python}
import sys
if "--query-metrics" in sys.argv:
    print("sm__inst_issued    # of instructions\ngpu__time_duration  duration")
elif "{says}":
    print("{says}")
else:
    asked = sys.argv[sys.argv.index("--metrics") + 1]
    assert asked == "gpu__time_duration.sum,sm__inst_issued.avg.pct_of_peak_sustained_active"
    assert "--launch" in sys.argv and "--clock-control" in sys.argv
    open(sys.argv[sys.argv.index("--log-file") + 1], "w").write(open("{lines}").read())
"""


@pytest.mark.parametrize("says", ["", "==ERROR== ERR_NVGPUCTRPERM"])
def test_the_profiler_is_asked_for_what_it_knows(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, lines, profiler = (tmp_path / name for name in ("rows.jsonl", "lines", "ncu"))
    results.write_text("\n".join(json.dumps(wavelet.asdict(row)) for row in rows()))
    lines.write_text("==PROF== Connected\n" + "\n".join(counter_lines([1, 1, 2, 1])))
    profiler.write_text(PROFILER.format(python=sys.executable, says=says, lines=lines))
    profiler.chmod(0o755)
    command = ["wavelet_counters.py", str(results), "--layers", "2", "--ncu", str(profiler)]
    monkeypatch.setattr(sys, "argv", command)
    assert wavelet_counters.main() == (2 if says else 0)
    told = capsys.readouterr()
    assert "does not know lts__t_sector_hit_rate.pct" in told.err
    assert says in told.err and (bool(says) or told.out.count("| l0 |") == 2)


def test_a_profiler_that_hangs_is_ended() -> None:
    told = wavelet_counters._run(["sh", "-c", "sleep 60 & sleep 60"], 0.2)
    assert "fewer --layers" in told


def test_what_was_timed_beside_the_vendor_is_shown_and_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By class, and by every family whose kernels were timed in turn."""
    names = [next(k.name for k in dense("conv_fwd", f, "bf16")) for f in ("halo", "im2col")]
    rows = [
        gpu_vs_vendor.Row(
            model="a network",
            problem=problem("conv_fwd", sizes).to_dict(),
            shape_class=shape_class,
            vendor_us=100.0,
            best_us=50.0,
            best=names[0],
            ratio=2.0,
            kernels=2,
            search_s=1.0,
            selected_ratio=0.9,
            roofline=0.5,
            final_us={names[0]: 50.0, names[1]: 80.0, "conv_fwd_vendor_torch": 100.0},
        )
        for sizes, shape_class in ((LAYER, "dense"), (VOLUME, "3-D"))
    ]
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows) + '{"model": "cut o')
    assert gpu_vs_vendor.rows_in(out, "conv_fwd", "bf16") == rows
    assert not gpu_vs_vendor.rows_in(out, "conv_fwd", "fp16")
    assert not gpu_vs_vendor.rows_in(out, "conv_bwd_data", "bf16")
    monkeypatch.setattr(sys, "argv", ["vendor_tables.py", str(out)])
    assert vendor_tables.main() == 0
    told = capsys.readouterr().out.splitlines()
    assert "| 3-D | 2.00 (2.00, 1) | 0.90 (0.90, 1) | 1 | 50 % | 0 / 1 |" in told
    assert any(line.startswith("| all | 2.00 (2.00, 2) | 0.90 (0.90, 2) | 2 |") for line in told)
    assert any(line.startswith("| halo | 2 | 2.00 (2.00, 2) |") for line in told)
    assert any(line.startswith("| im2col | 0 | 1.25 (1.25, 2) |") for line in told)
