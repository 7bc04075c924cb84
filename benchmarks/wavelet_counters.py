#!/usr/bin/env python3
"""Why load warps win or lose: the profiler's counters for layers that wavelet.py has measured.

usage: python benchmarks/wavelet_counters.py RESULTS [--op conv_bwd_weight] [--layers 8]
                                             [--minutes 1.5] [--ncu PATH] [--json]

RESULTS is what `wavelet.py --out` wrote. Of some of its layers, of every class and with wins and
losses among them, the fastest kernel with load warps and the fastest of the others run once under
Nsight Compute (ncu) with cold caches. Told are the shares of issue slots and of the matrix units'
time that are used, the warps that wait, for each instruction issued, by what they wait for, what
shared memory loses to conflicts of banks, and the shares of the peak throughput of L2 and memory.
Of a kernel in several launches the longest is told. Counters that this ncu does not know are left
out. Clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wavelet import Row, read

STALLS = (
    *("long_scoreboard", "short_scoreboard", "mio_throttle", "barrier", "gmma"),
    *("math_pipe_throttle", "wait"),
)
DURATION = "gpu__time_duration.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
METRICS = {
    DURATION: "us",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue %",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "matrix %",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU %",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active": "LSU %",
    **{f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio": s for s in STALLS},
    CONFLICTS: "",
    WAVEFRONTS: "",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "lts__t_sector_hit_rate.pct": "L2 hits %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
}
"""What is asked of the profiler, and how its column is headed."""
MICROSECONDS = {
    "ns": 1e-3,
    "us": 1.0,
    "ms": 1e3,
    "s": 1e6,
    "nsecond": 1e-3,
    "usecond": 1.0,
    "msecond": 1e3,
}


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One kernel on one layer."""

    layer: str
    side: str
    kernel: str
    problem: dict[str, Any]
    us: float


@dataclass(kw_only=True)
class Counted:
    """What the profiler says of a pick; `launches` are the device kernels of a call."""

    pick: Pick
    launches: int
    values: dict[str, float] = field(default_factory=dict)


class CountersError(Exception):
    """The profiler does not answer."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--op", default="conv_bwd_weight")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=1.5, help="the profiler is ended then")
    parser.add_argument("--ncu", default="ncu", help="where Nsight Compute is")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def picks(rows: Sequence[Row], op: str, count: int) -> list[Pick]:
    """Both sides of about `count` layers: classes, and wins and losses in them, take turns."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row.op == op and row.wavelet_us is not None and row.other_us is not None:
            groups.setdefault((row.shape_class, row.is_won), []).append(row)
    for members in groups.values():  # the clearest cases first
        members.sort(key=lambda row: abs((row.other_us or 1) / (row.wavelet_us or 1) - 1))
        members.reverse()
    turns = (own[turn] for turn in range(len(rows)) for own in groups.values() if turn < len(own))
    found = []
    for row in [row for row, _ in zip(turns, range(count), strict=False)]:
        for side, kernel, us in (
            ("wavelet", row.wavelet, row.wavelet_us),
            ("other", row.other, row.other_us),
        ):
            pick = Pick(
                layer=row.layer, side=side, kernel=kernel, problem=row.problem, us=us or 0.0
            )
            found.append(pick)
    return found


def launch(chosen: Iterable[Pick]) -> None:
    """Runs every pick once where the profiler looks, and before each a kernel that only waits.

    That one, which comes first, parts the launches of one pick from those of the next.
    """
    import torch
    from conv_contest import Stand, plan

    from tilewise.ops.contract import get_op
    from tilewise.ops.conv.problem import ConvProblem

    stand: Stand | None = None
    for pick in chosen:
        problem = ConvProblem.from_dict(pick.problem)
        stand = stand or Stand.gpu(problem.op, problem.dtype)
        made = plan(get_op(problem.op).kernel_from_name(pick.kernel), problem, stand)
        piece = stand.bench.piece(problem)
        call = made.bind(piece.operands, piece.out)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def known_metrics(ncu: str) -> list[str]:
    """Those of METRICS whose counters this profiler has for Hopper."""
    asked = [ncu, "--query-metrics", "--chips", "gh100"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    names = {line.split()[0] for line in found.stdout.splitlines() if line.split()}
    known = [metric for metric in METRICS if metric.split(".")[0] in names]
    if not known:
        raise CountersError(f"{ncu} lists no counters: {_end_of(found.stdout + found.stderr)}")
    return known


def profile(ncu: str, results: Path, args: argparse.Namespace) -> list[list[str]]:
    """The profiler's table, a line of cells for each launch, headings first."""
    known = known_metrics(ncu)
    for missing in sorted(set(METRICS) - set(known)):
        print(f"{ncu} does not know {missing}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        told = _run(
            [
                *(ncu, "--clock-control", "none", "--profile-from-start", "off"),
                *("--metrics", ",".join(known), "--csv", "--page", "raw"),
                *("--log-file", str(log), sys.executable, __file__, str(results), "--launch"),
                *("--op", args.op, "--layers", str(args.layers)),
            ],
            60 * args.minutes,
        )
        written = log.read_text() if log.exists() else ""
    lines = [line for line in written.splitlines() if line.startswith('"')]
    if not lines:
        raise CountersError(f"{ncu} counted nothing: {_end_of(written + told)}")
    return list(csv.reader(lines))


def _run(command: Sequence[str], seconds: float) -> str:
    """What a command says; it is ended, with all that it started, when the time is up."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            return running.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return f"it took more than {seconds:.0f} s; ask for fewer --layers"


def _end_of(text: str) -> str:
    return " / ".join(line.strip() for line in text.splitlines()[-4:] if line.strip())[-600:]


def launches(table: Sequence[Sequence[str]]) -> list[tuple[str, dict[str, float]]]:
    """The profiled kernels in order, with what was counted; durations in microseconds.

    The profiler writes a column for each counter, with units in the second line, or, as some of its
    versions do, a line for each.
    """
    head, *rest = table
    name, number = head.index("Kernel Name"), head.index("ID")
    found: dict[str, tuple[str, dict[str, float]]] = {}
    if "Metric Name" in head:
        places = [head.index(f"Metric {what}") for what in ("Name", "Unit", "Value")]
        told = [(cells, [tuple(cells[at] for at in places)]) for cells in rest]
    else:
        units, *rest = rest
        told = [(cells, list(zip(head, units, cells, strict=True))) for cells in rest]
    for cells, counters in told:
        values = found.setdefault(cells[number], (cells[name], {}))[1]
        for metric, unit, cell in counters:
            text = cell.replace(",", "")
            if metric in METRICS and _is_number(text):
                values[metric] = float(text) * (MICROSECONDS[unit] if metric == DURATION else 1.0)
    return list(found.values())


def counted(table: Sequence[Sequence[str]], chosen: Sequence[Pick]) -> list[Counted]:
    """The longest launch of each pick."""
    listed = launches(table)
    groups: list[list[dict[str, float]]] = []
    for name, values in listed:
        if name == listed[0][0]:
            groups.append([])
        else:
            groups[-1].append(values)
    found = []
    for pick, group in zip(chosen, groups, strict=False):
        longest = max(group, key=lambda values: values.get(DURATION, 0.0), default={})
        found.append(Counted(pick=pick, launches=len(group), values=longest))
    return found


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def columns(entry: Counted) -> dict[str, str]:
    """The cells of a line of the table; conflicts are told as a share of all passes."""
    values = entry.values
    cells = {
        head: f"{values[metric]:.2f}" if head in STALLS else f"{values[metric]:.1f}"
        for metric, head in METRICS.items()
        if head and metric in values
    }
    if values.get(WAVEFRONTS):
        cells["conflicts %"] = f"{100 * values.get(CONFLICTS, 0.0) / values[WAVEFRONTS]:.1f}"
    return cells


def table_of(entries: Sequence[Counted]) -> str:
    """In Markdown."""
    heads = list(dict.fromkeys(head for entry in entries for head in columns(entry)))
    lines = [f"| layer | side | {' | '.join(heads)} | kernel |"]
    lines.append("|" + "---|" * (len(heads) + 3))
    for entry in entries:
        pick, cells = entry.pick, columns(entry)
        middle = " | ".join(cells.get(head, "-") for head in heads)
        more = f" ({entry.launches} launches)" if entry.launches > 1 else ""
        lines.append(f"| {pick.layer} | {pick.side} | {middle} | `{pick.kernel}`{more} |")
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    chosen = picks(read(args.results), args.op, args.layers)
    if not chosen:
        print(f"{args.results} has no layers of {args.op} with both sides", file=sys.stderr)
        return 2
    if args.launch:
        launch(chosen)
        return 0
    ncu = shutil.which(args.ncu)
    if ncu is None:
        print(f"{args.ncu} is not installed; it comes with CUDA's toolkit", file=sys.stderr)
        return 2
    try:
        entries = counted(profile(ncu, args.results, args), chosen)
    except (CountersError, subprocess.SubprocessError) as error:
        print(f"wavelet_counters: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(entry) for entry in entries]) if args.json else table_of(entries))
    return 0 if len(entries) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
