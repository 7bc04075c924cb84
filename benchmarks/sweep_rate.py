"""How much of a sweep's time is measuring, how fast rows come, and what 100,000 of them cost.

Three sweeps on the CPU, each an orchestrator process of its own:

- steady: real GEMM kernels, compiled before; the share of wall time a kernel is on the device.
- rows: an engine that answers at once, so that nothing but the sweep is seen; memory after each
  tenth of the rows must stay flat.
- resume: the same list with one problem more; the time from the start of the process to the first
  new row.

    python benchmarks/sweep_rate.py [--rows 100000] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

STARTED = time.time()

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from tilewise.core.arch import Arch  # noqa: E402
from tilewise.core.kernel import Kernel, trait  # noqa: E402
from tilewise.core.measurement import Measurement, Policy, Setting  # noqa: E402
from tilewise.core.problem import Problem  # noqa: E402
from tilewise.engines.contract import Engine  # noqa: E402
from tilewise.engines.replay import ReplayPlan  # noqa: E402
from tilewise.ops.contract import Op  # noqa: E402
from tilewise.ops.gemm.problem import GemmProblem  # noqa: E402
from tilewise.sweep.crew import WorkerConfig  # noqa: E402
from tilewise.sweep.local import LocalExecutor  # noqa: E402
from tilewise.sweep.run import sweep  # noqa: E402

INSTANT_KERNELS = 100
POLICY = Policy(rounds=0, threads=1)
MOST_GROWTH_MB = 20.0
"""Between the most in the first half of the rows and the most in the second: what a shard takes to
write is there in both, and rows must not stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantKernel(Kernel):
    """A kernel that takes no time at all."""

    engine: ClassVar[str] = "instant"
    serial: int = trait("s", tuple(range(INSTANT_KERNELS)))

    @property
    def op(self) -> str:
        return "gemm"


class InstantEngine(Engine):
    """Answers with an invented measurement."""

    name = "instant"
    kinds = ("cpu",)
    kernel_types = (InstantKernel,)

    def toolchain(self, op: Op, family: str = "") -> str:
        return "none"

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> ReplayPlan:
        setting = Setting(arch=arch.name, device="", toolchain="", policy=POLICY)
        row = Measurement.of(problem, kernel, setting, status="ok", time_us=100.0, spread_us=1.0)
        return ReplayPlan(kernel, problem, row)


def resident_mb(pid: int | str = "self") -> float:
    """What a process holds in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run_instant(store: Path, problems: int, tenths: int = 10) -> dict[str, Any]:
    """A sweep of instant kernels in this process; memory after each tenth."""
    config = WorkerConfig(
        engines=("sweep_rate:InstantEngine",),
        policy=POLICY,
        kind="cpu",
        environment={"PYTHONPATH": f"{HERE}:{HERE.parent / 'src'}"},
    )
    seen = 0
    first_row_s = 0.0
    memory: list[float] = []
    total = problems * INSTANT_KERNELS

    def listen(event: dict[str, Any]) -> None:
        nonlocal seen, first_row_s
        if event["event"] != "row":
            return
        first_row_s = first_row_s or time.time() - STARTED
        seen += 1
        if seen % (total // tenths) == 0:
            memory.append(round(resident_mb(), 1))

    summary = sweep(
        *(store, [GemmProblem(m=at + 1, n=8, k=8) for at in range(problems)]),
        [InstantKernel(serial=at) for at in range(INSTANT_KERNELS)],
        *(LocalExecutor(config), POLICY),
        why_unusable=lambda kernel, problem, arch: None,
        on_event=listen,
    )
    return {
        "rows": summary.rows,
        "known": summary.known,
        "seconds": summary.seconds,
        "rows_per_s": summary.rows / summary.seconds,
        "first_row_s": first_row_s,
        "memory_mb": memory,
    }


def run_steady(store: Path, kernel_count: int) -> dict[str, Any]:
    """A sweep of real kernels; only the time from the first row on counts."""
    from tilewise.engines.device import detect
    from tilewise.ops.configs import load_pool
    from tilewise.ops.contract import get_op

    sizes = [(256, 256, 256), (64, 1024, 512), (1000, 200, 300), (384, 768, 128), (2048, 64, 256)]
    problems = [GemmProblem(m=m, n=n, k=k) for m, n, k in sizes]
    op, arch = get_op("gemm"), detect("cpu")
    legal = [
        kernel
        for kernel in load_pool(op, arch, ["cpu"])
        if all(op.why_unusable(kernel, problem, arch) is None for problem in problems)
    ]
    kernels = legal[:: max(1, len(legal) // kernel_count)][:kernel_count]
    policy = Policy(threads=1)
    times: list[float] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "row":
            times.append(time.monotonic())

    config = WorkerConfig(engines=("cpu",), policy=policy, kind="cpu")
    # The first sweep compiles; the second, into another store, is the steady one.
    sweep(store / "compiled", problems[:1], kernels, LocalExecutor(config), policy)
    summary = sweep(
        *(store / "steady", problems, kernels, LocalExecutor(config), policy), on_event=listen
    )
    wall = times[-1] - times[0]
    return {
        "rows": summary.rows,
        "kernels": len(kernels),
        "problems": len(problems),
        "wall_s": wall,
        "rows_per_s": (len(times) - 1) / wall,
        "measuring_share": summary.measuring_s * (1 - 1 / len(times)) / wall,
        "by_status": dict(summary.by_status),
    }


def child(part: str, *words: str) -> dict[str, Any]:
    """A part of the benchmark in a process of its own."""
    ended = subprocess.run(
        [sys.executable, __file__, "--part", part, *words], stdout=subprocess.PIPE, check=True
    )
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kernels", type=int, default=12, help="real kernels of the steady sweep")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    problems = max(10, given.rows // INSTANT_KERNELS)
    if given.part:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "steady": lambda: run_steady(given.store, given.kernels),
            "rows": lambda: run_instant(given.store, problems),
            "resume": lambda: run_instant(given.store, problems + 1),
        }
        print(json.dumps(parts[given.part]()))
        return
    with tempfile.TemporaryDirectory() as folder:
        size = ("--rows", str(given.rows))
        steady = child("steady", "--store", folder, "--kernels", str(given.kernels))
        rows = child("rows", *size, "--store", f"{folder}/rows")
        resume = child("resume", *size, "--store", f"{folder}/rows")
    memory = rows["memory_mb"]
    half = len(memory) // 2
    growth = max(memory[half:]) - max(memory[:half])
    summary = {
        "measuring_share": steady["measuring_share"],
        "rows_per_s": rows["rows_per_s"],
        "memory_growth_mb": growth,
        "resume_first_row_s": resume["first_row_s"],
        "passed": steady["measuring_share"] >= 0.8
        and resume["first_row_s"] <= 5.0
        and growth <= MOST_GROWTH_MB,
    }
    if given.json:
        print(json.dumps({"steady": steady, "rows": rows, "resume": resume, "summary": summary}))
        return
    print(
        f"steady    {steady['measuring_share']:.1%} of the time measuring, "
        f"{steady['rows_per_s']:.1f} rows/s over {steady['rows']} rows of real kernels"
    )
    print(
        f"rows      {rows['rows']:,} rows at {rows['rows_per_s']:.0f} rows/s; "
        f"memory {memory[0]:.0f} MB after a tenth, {memory[-1]:.0f} MB at the end"
    )
    print(
        f"resume    {resume['known']:,} known rows; first new row after "
        f"{resume['first_row_s']:.2f} s"
    )


if __name__ == "__main__":
    main()
