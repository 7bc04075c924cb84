"""`demo`: builds kernels, chooses, runs and checks them beside NumPy and PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import typer

from tilewise.cli.build import compile_all
from tilewise.cli.console import JsonFlag, emit, err, out, table
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.dispatch import default_registry
from tilewise.dispatch.registry import Registry
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel

CANDIDATES = 4
"""Kernels built per problem: the head of the ranking."""

PROBLEMS: dict[str, Problem] = {
    "square GEMM": GemmProblem(m=768, n=768, k=768, layout="rrr"),
    "linear layer": GemmProblem(m=128, n=3072, k=768),
    "skinny GEMM, M=4": GemmProblem(m=4, n=4096, k=4096),
    "small GEMM": GemmProblem(m=48, n=48, k=48, layout="rrr"),
    "3x3 convolution": ConvProblem(
        n=4, c=64, k=64, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1, layout="nchw"
    ),
    "1x1 convolution": ConvProblem(n=4, c=256, k=64, h=28, w=28, y=1, x=1, layout="nhwc"),
    "depthwise 3x3": ConvProblem(
        n=8, c=144, k=144, g=144, h=28, w=28, y=3, x=3, pad_h=1, pad_w=1, layout="nhwc"
    ),
    "weight gradient": ConvProblem(
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
class Row:
    """One line of the demo's table."""

    label: str
    problem: Problem
    kernel: str = ""
    summary: str = ""
    path: str = ""
    error: float = 0.0
    is_right: bool = False
    gflops: float = 0.0
    vendors: dict[str, float] | None = None


def demo(as_json: JsonFlag = False) -> None:
    """Generates, compiles, chooses, runs and checks kernels on this machine's CPU."""
    arch = detect("cpu")
    registries = {op: default_registry(op, arch) for op in {p.op for p in PROBLEMS.values()}}
    wanted: dict[Kernel, None] = {}
    for problem in PROBLEMS.values():
        for ranked in registries[problem.op].select(problem).ranking[:CANDIDATES]:
            wanted[ranked.kernel] = None
    kernels = [kernel for kernel in wanted if kernel.engine == "cpu"]
    why = get_engine("cpu").why_unavailable()
    if why is not None:
        err.print(f"No kernel can be compiled: {why}. The vendor serves instead.")
        kernels = []
    started = time.perf_counter()
    builds = compile_all(kernels, arch, None) if kernels else []
    seconds = time.perf_counter() - started
    rows = [_run(label, p, registries[p.op]) for label, p in PROBLEMS.items()]
    fresh = sum(not b.was_cached for b in builds)
    if as_json:
        emit([{**vars_of(row), "problem": row.problem.to_dict()} for row in rows])
    else:
        out.print(
            f"{sum(len(r) for r in registries.values())} kernels are declared for {arch.label}; "
            f"{len(builds)} were wanted, {fresh} compiled in {seconds:.1f} s\n"
        )
        _show(rows)
    raise typer.Exit(0 if all(row.is_right for row in rows) else 1)


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def random_operands(problem: Problem, seed: int = 0) -> list[Any]:
    """Seeded fp32 operands, stored as the problem's layout says."""
    op, generator = get_op(problem.op), np.random.default_rng(seed)
    made = []
    for shape, storage in zip(op.shapes(problem)[:-1], op.storage(problem)[:-1], strict=True):
        stored = generator.standard_normal([shape[a] for a in storage.axes], dtype=np.float32)
        made.append(stored.transpose([storage.axes.index(a) for a in range(len(shape))]))
    return made


def _run(label: str, problem: Problem, registry: Registry) -> Row:
    operands = random_operands(problem)
    result = registry.run(problem, *operands)
    expected = get_op(problem.op).reference(problem, *operands)
    row = Row(label, problem, kernel=result.kernel.name, path=result.path)
    row.summary = _summary(result.kernel)
    row.error = float(np.linalg.norm(result.out - expected) / np.linalg.norm(expected))
    row.is_right = row.error <= tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    plan, _ = registry.dispatcher.plan(problem)
    row.gflops = _gflops(problem, plan.bind(operands, result.out))
    row.vendors = {}
    libraries = [("NumPy", "numpy")] if problem.op == "gemm" else []
    libraries += [("PyTorch", "torch")] if find_spec("torch") else []
    for name, library in libraries:
        kernel = VendorKernel(op_name=problem.op, library=library)
        vendor = get_engine("vendor").plan(kernel, problem, registry.arch)
        row.vendors[name] = _gflops(problem, vendor.bind(operands, result.out))
    return row


def _summary(kernel: Kernel) -> str:
    """A kernel in two words: its family and its register tile."""
    family = getattr(kernel, "family", kernel.engine)
    if kernel.engine == "vendor":
        return f"vendor ({kernel.to_dict()['library']})"
    return f"{family} {'x'.join(map(str, getattr(kernel, 'tile', ())[:2]))}"


def _gflops(problem: Problem, call: Callable[[], Any], seconds: float = 0.15) -> float:
    """The median speed over about `seconds` of calls, after a warm-up."""
    time.sleep(0.2)  # the idle threads of whoever ran last hold their cores for a while
    call()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < stop and len(times) < 10_000):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return problem.flops / float(np.median(times)) / 1e9


def _show(rows: list[Row]) -> None:
    shown = []
    for row in rows:
        vendors = row.vendors or {}
        best = max(vendors.values(), default=0.0)
        shown.append(
            [
                *(row.label, row.summary, row.path),
                "right" if row.is_right else f"WRONG ({row.error:.1e})",
                f"{row.gflops:.1f}",
                *(f"{vendors[v]:.1f}" if v in vendors else "" for v in ("NumPy", "PyTorch")),
                f"{row.gflops / best:.2f}x" if best else "",
            ]
        )
    columns = ["problem", "kernel", "chosen by", "against float64"]
    columns += ["tilewise GFLOPS", "NumPy", "PyTorch", "vs best"]
    table("Chosen, compiled and run on this machine", columns, shown)
