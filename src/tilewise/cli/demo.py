"""`demo`: the whole idea in a few minutes, all of it real."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import typer

from tilewise.cli.build import compile_all
from tilewise.cli.console import JsonFlag, emit, out, say, table
from tilewise.cli.progress import telling
from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.core.problem import Problem
from tilewise.dispatch import default_registry
from tilewise.dispatch.registry import Registry
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.judge.ratios import NOISY, Reading, ratio
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.timing import CpuTimer, measure_in_turn

CANDIDATES = 4
"""Kernels built per problem: the head of the ranking."""
POLICY = Policy()
"""How kernels and libraries are timed."""
OWN = "the library's"
"""Where the library's own routine is what was chosen."""

PROBLEMS: dict[str, Problem] = {
    "square GEMM": GemmProblem(m=768, n=768, k=768, layout="rrr"),
    "linear layer": GemmProblem(m=128, n=3072, k=768),
    "skinny GEMM": GemmProblem(m=4, n=4096, k=4096),
    "small GEMM": GemmProblem(m=48, n=48, k=48, layout="rrr"),
    "3x3 conv": ConvProblem(n=4, c=64, k=64, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1, layout="nchw"),
    "1x1 conv": ConvProblem(n=4, c=256, k=64, h=28, w=28, y=1, x=1, layout="nhwc"),
    "depthwise 3x3": ConvProblem(
        n=8, c=144, k=144, g=144, h=28, w=28, y=3, x=3, pad_h=1, pad_w=1, layout="nhwc"
    ),
    "conv gradient": ConvProblem(
        direction="bwd_weight",
        n=4,
        c=64,
        k=64,
        h=28,
        w=28,
        y=3,
        x=3,
        pad_h=1,
        pad_w=1,
        layout="nchw",
    ),
}


@dataclass(slots=True)
class DemoRow:
    """One line of the demo's table."""

    label: str
    problem: Problem
    kernel: str = ""
    summary: str = ""
    path: str = ""
    error: float = 0.0
    is_right: bool = False
    gflops: float = 0.0
    spread: float = 0.0
    """Of the chosen kernel's times, over their median."""
    vendors: dict[str, float] | None = None
    vs_best: float | None = None
    """Speed over the fastest library's; None where the readings do not tell."""
    vs_best_interval: tuple[float, float] | None = None
    comparison: str = ""


def demo(as_json: JsonFlag = False) -> None:
    """Tries everything on this machine, in about a minute.

    Builds kernels, times them, trains a model, judges it, runs what is chosen, and asks about an
    H200. If there is a GPU, it runs there too. Exits with 1 if a result is wrong.
    """
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        rows, found = _steps()
    if as_json:
        shown = [{**vars_of(row), "problem": row.problem.to_dict()} for row in rows]
        emit({"rows": shown, **found})
    wrong = [row for row in rows if not row.is_right]
    raise typer.Exit(1 if wrong or found["gpu"]["wrong"] else 0)


def _steps() -> tuple[list[DemoRow], dict[str, Any]]:
    from tilewise.cli.demo_gpu import live, nothing, why_not
    from tilewise.cli.demo_h200 import of_h200
    from tilewise.cli.demo_learning import learned

    arch = detect("cpu")
    with telling("looking for a GPU"):
        no_gpu = why_not()
    _heading("1. This machine")
    cores = "1 core" if arch.compute_units == 1 else f"{arch.compute_units} cores"
    say(f"CPU: {arch.device or arch.label}, {cores} ({arch.name})")
    say(f"GPU: {no_gpu or detect('gpu').device}")
    registries = {op: default_registry(op, arch) for op in {p.op for p in PROBLEMS.values()}}
    _heading(
        f"2. Build: the most promising of {sum(map(len, registries.values()))} kernels for this "
        f"CPU, for {len(PROBLEMS)} problems"
    )
    kernels = _build(registries, arch)
    found: dict[str, Any] = {}
    products = [kernel for kernel in kernels if kernel.op == "gemm"]
    _heading("3. Learn: time them on other matrix products, then train and judge a small model")
    why = _why_not_learning(products)
    if why is None:
        found["learned"] = learned([*products, VendorKernel(op_name="gemm", library="numpy")])
    else:
        say(f"skipped: {why}")
    _heading("4. Run: the model shipped for this CPU chooses kernels for the problems of step 2")
    with telling("running and timing"):
        rows = [_run(label, p, registries[p.op]) for label, p in PROBLEMS.items()]
    _show(rows)
    _heading("5. Ask about a GPU that you do not have: an NVIDIA H200")
    found["h200"] = of_h200(Path("datasets"))
    found["gpu"] = nothing(no_gpu)
    if no_gpu is None:
        _heading(f"6. Run on the GPU: {detect('gpu').device}")
        found["gpu"] = live()
    _conclude(rows, found)
    return rows, found


def _heading(text: str) -> None:
    out.print(f"\n{text}", soft_wrap=True, style="bold")


def _build(registries: Mapping[str, Registry], arch: Arch) -> list[Kernel]:
    """Compiles the heads of the rankings; gives back what is there afterwards."""
    wanted: dict[Kernel, None] = {}
    with telling("ranking"):
        for problem in PROBLEMS.values():
            for ranked in registries[problem.op].select(problem).ranking[:CANDIDATES]:
                wanted[ranked.kernel] = None
    kernels = [kernel for kernel in wanted if kernel.engine == "cpu"]
    why = get_engine("cpu").why_unavailable()
    if why is not None:
        say(f"nothing can be compiled: {why}. NumPy or PyTorch is used instead.")
        return []
    started = time.perf_counter()
    builds = compile_all(kernels, arch, None) if kernels else []
    fresh = sum(not build.was_cached for build in builds)
    seconds = time.perf_counter() - started
    say(f"{len(builds)} kernels are ready; {fresh} were compiled just now, in {seconds:.1f} s")
    return [build.kernel for build in builds if build.status == "ok"]


def _why_not_learning(kernels: Sequence[Kernel]) -> str | None:
    """Why there is nothing to learn from, or nothing to learn with, or None."""
    missing = [name for name in ("lightgbm", "scipy", "plotly") if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; `pip install 'tilewise[demo]'`"
    return None if kernels else "nothing was compiled"


def _conclude(rows: Sequence[DemoRow], found: Mapping[str, Any]) -> None:
    """What was seen, in words."""
    _heading("In short")
    shown = [verdict(rows)]
    if "learned" in found:
        mean = found["learned"]["efficiency"]["mean"]
        shown.append(
            f"The small model of step 3 chooses kernels that run at {mean:.0f} % of the best one's "
            "speed, on average, for products it has never seen."
        )
    for line in (*shown, gpu_verdict(found["gpu"])):
        say(line)
    if "learned" in found:
        out.print("\nEverything measured in step 3, as a report to open in your browser:")
        out.print(found["learned"]["report"], soft_wrap=True)


def verdict(rows: Sequence[DemoRow]) -> str:
    """How the choices on the CPU did, in words."""
    right = sum(row.is_right for row in rows)
    text = f"On the CPU {right} of {len(rows)} results are right."
    compared = [row for row in rows if row.vendors and row.comparison != OWN]
    if not compared:
        return text
    libraries = " and ".join({name: None for row in compared for name in row.vendors or ()})
    return f"{text} Beside {libraries}: {tally([row.vs_best for row in compared])}."


def gpu_verdict(gpu: Mapping[str, Any]) -> str:
    """How the choices on the GPU did, in words."""
    if not gpu["rows"]:
        return "Nothing ran on a GPU here; the H200's figures were measured on one earlier."
    tried = len(gpu["rows"]) + gpu["unjudged"]
    text = f"On the GPU {tried - gpu['wrong']} of {tried} results are right. Beside PyTorch: "
    return f"{text}{tally([row['ratio'] for row in gpu['rows']])}."


def tally(ratios: Sequence[float | None]) -> str:
    """How many choices are as fast as a library's routine; None is a ratio that says nothing."""
    clear = [ratio for ratio in ratios if ratio is not None]
    counts = {
        "at least as fast": sum(ratio >= 1 for ratio in clear),
        "slower": sum(ratio < 1 for ratio in clear),
        "too noisy to tell": len(ratios) - len(clear),
    }
    return ", ".join(f"{count} {words}" for words, count in counts.items() if count)


def vars_of(row: DemoRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in DemoRow.__dataclass_fields__}


def random_operands(problem: Problem) -> list[Any]:
    """Seeded fp32 operands, stored as the problem's layout says."""
    op, generator = get_op(problem.op), np.random.default_rng(0)
    made = []
    for shape, storage in zip(op.shapes(problem)[:-1], op.storage(problem)[:-1], strict=True):
        stored = generator.standard_normal([shape[a] for a in storage.axes], dtype=np.float32)
        made.append(stored.transpose([storage.axes.index(a) for a in range(len(shape))]))
    return made


def _run(label: str, problem: Problem, registry: Registry) -> DemoRow:
    operands = random_operands(problem)
    result = registry.run(problem, *operands)
    expected = get_op(problem.op).reference(problem, *operands)
    row = DemoRow(label, problem, kernel=result.kernel.name, path=result.path)
    row.summary = summary(result.kernel)
    row.error = float(np.linalg.norm(result.out - expected) / np.linalg.norm(expected))
    row.is_right = row.error <= tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    plans = {result.kernel: registry.dispatcher.plan(problem)[0]}
    libraries = {"NumPy": "numpy"} if isinstance(problem, GemmProblem) else {}
    libraries |= {"PyTorch": "torch"} if find_spec("torch") else {}
    vendors = {n: VendorKernel(op_name=problem.op, library=lib) for n, lib in libraries.items()}
    for kernel in vendors.values():  # timed once, where it is what was chosen
        plans.setdefault(kernel, get_engine("vendor").plan(kernel, problem, registry.arch))
    calls = [plan.bind(operands, result.out) for plan in plans.values()]
    readings = dict(zip(plans, _timed(calls), strict=True))
    named = {name: readings[kernel] for name, kernel in vendors.items()}
    compare(row, readings[result.kernel], named)
    return row


def compare(row: DemoRow, ours: Reading, vendors: Mapping[str, Reading]) -> None:
    """Notes what the readings say, and no more than that."""
    flops = row.problem.flops
    row.gflops, row.spread = flops / ours.time_us / 1e3, ours.share
    row.vendors = {name: flops / reading.time_us / 1e3 for name, reading in vendors.items()}
    best = min(vendors.values(), key=lambda reading: reading.time_us, default=None)
    if ours in vendors.values():
        row.comparison = OWN
    elif best is not None:
        found = ratio(best, ours)
        row.vs_best, row.vs_best_interval = found.if_clear, (found.low, found.high)
        row.comparison = found.spell()


def summary(kernel: Kernel) -> str:
    """A kernel in two words: its family and its register tile."""
    family = getattr(kernel, "family", kernel.engine)
    if kernel.engine == "vendor":
        return f"vendor ({kernel.to_dict()['library']})"
    return f"{family} {'x'.join(map(str, kernel.tile[:2]))}"


def _timed(calls: Sequence[Callable[[], Any]]) -> list[Reading]:
    """Every call's time, in turn, so that what else the machine does falls on all alike."""
    timer = CpuTimer(POLICY, cache_bytes=0)
    found = measure_in_turn(calls, timer, POLICY, lambda index: None)
    return [Reading(time_us=t.time_us, spread_us=t.spread_us, rounds=POLICY.rounds) for t in found]


def _show(rows: list[DemoRow]) -> None:
    libraries = [n for n in ("NumPy", "PyTorch") if any(n in (row.vendors or {}) for row in rows)]
    shown = []
    for row in rows:
        vendors = row.vendors or {}
        shown.append(
            [
                *(row.label, row.summary),
                "right" if row.is_right else f"WRONG ({row.error:.1e})",
                f"{row.gflops:.1f}",
                *(f"{vendors[name]:.1f}" if name in vendors else "-" for name in libraries),
                row.comparison or "-",
            ]
        )
    columns = ["problem", "kernel", "result", "GFLOPS", *libraries, "speed-up"]
    table("", columns, shown)
    if "PyTorch" not in libraries:
        say("PyTorch is not installed, so there is nothing to compare convolutions with.")
    if any(row.comparison == NOISY for row in rows):
        say("This machine is busy: where timings vary too much, no speed-up is given.")
