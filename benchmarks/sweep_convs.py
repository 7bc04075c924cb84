#!/usr/bin/env python3
"""Sweeps convolutions of every direction on a GPU within a given time, shared out fairly.

usage: python benchmarks/sweep_convs.py STORE [--minutes 30] [--sets bf16:700,fp16:250]
                                        [--ops conv_fwd,conv_bwd_data,conv_bwd_weight]
                                        [--top 16] [--whole 0.2] [--seed 0] [--arch sm_90:H200]
                                        [--engines cuda,vendor] [--without FAMILIES]
                                        [--problems FOLDER | --check | --compile | --dry-run]
                                        [--json]

The problems of a set are the convolutions of real networks and drawn ones, a third of them grouped
or depthwise, some in one and in three dimensions, in an order in which every beginning is a fair
sample; equal seeds give equal sets. Of the first --whole of them every legal kernel is measured, of
the rest the --top that the analytic model expects most of, each family having its turn; leaders
are measured again in turns. Sets share the time by their size, and what one leaves the next one
has. Every result is checked against the vendor's in fp32.

All kernels of all sets are compiled beside the measuring, in the order in which they are needed, by
all cores but those that measuring takes. --compile does that alone, with or without a device.
--problems writes the sets as CSV files and measures nothing. --check works out, without a device,
every launch that the sweep would make. --dry-run sweeps a few small problems on this CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy, parse_policy
from tilewise.dispatch.reshaping import simpler
from tilewise.engines import engines_for, get_engine
from tilewise.errors import TilewiseError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import VendorKernel
from tilewise.problems.files import write_problems
from tilewise.problems.networks import network, networks_with
from tilewise.problems.problem_set import ProblemSet
from tilewise.problems.sampling import families, wide_coverage
from tilewise.selection.shortlist import Shortlist
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.device_info import visible_gpus
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Options, Summary, sweep
from tilewise.sweep.supervisor import Limits

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
REAL_SHARE, GROUPED_SHARE = 0.45, 1 / 3
BATCHES = (1, 8, 32, 128, 256)
"""Of networks: one image, a server's few, a training step's many."""
MOST_MS = 1.5
"""At the device's peaks: a sweep has little time for a problem."""
DRY_KERNELS = 12
COMPILERS = max(1, (os.cpu_count() or 1) - 3)
"""Measuring takes two processes, and their timings a quiet core."""
POLICY = "graph,time_ms=1.0,max_repeats=10,rounds=4,max_leaders=5"


@dataclass(frozen=True, kw_only=True)
class Set:
    """The problems of one op and dtype."""

    op: str
    dtype: str
    problems: ProblemSet
    whole: int
    """How many from the beginning are measured with every kernel."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sets", default="bf16:700,fp16:250", help="DTYPE:PROBLEMS of each op")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--whole", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", default="sm_90:H200", help="whose limits bound the problems")
    parser.add_argument("--engines", default="", help="those alone; all that there are otherwise")
    parser.add_argument("--without", default="", help="families to leave out, by commas")
    parser.add_argument("--problems", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def is_grouped(problem: Any) -> bool:
    return bool(problem.g > 1)


def real_layers(op: str, dtype: str, limit_ms: float, arch: Arch) -> ProblemSet:
    """Layers of every network that has any, at all scales, each once."""
    found = ProblemSet()
    for name in networks_with(op):
        for batch in BATCHES:
            layers = network(name, op, dtype=dtype, batch=batch)
            for problem, labels in zip(layers.problems, layers.labels, strict=True):
                moved_ms = problem.bytes / (arch.memory_gb_s * 1e6)
                if max(moved_ms, problem.flops / (arch.peak_tflops[dtype] * 1e9)) <= limit_ms:
                    found.add(problem, labels)
    return found.distinct()


def problem_set(op: str, dtype: str, count: int, seed: int, arch: Arch) -> ProblemSet:
    """`count` problems: real ones, then drawn ones, so that a third are grouped; shuffled."""
    rng = Random(f"{seed}/{op}/{dtype}")
    real = real_layers(op, dtype, MOST_MS, arch)
    taken = rng.sample(range(len(real)), min(len(real), round(REAL_SHARE * count)))
    chosen = [(real.problems[at], real.labels[at]) for at in taken]
    wanted = round(GROUPED_SHARE * count) - sum(is_grouped(p) for p, _ in chosen)
    grouped = {"grouped", "depthwise"}
    for only, more in ((grouped, wanted), (set(families(op)) - grouped, count)):
        room = min(more, count - len(chosen))
        if room > 0:
            drawn = wide_coverage(
                *(op, arch, room),
                dtype=dtype,
                seed=seed,
                only=only,
                max_ms=MOST_MS,
                avoid=[p for p, _ in chosen],
            )
            chosen += zip(drawn.problems, drawn.labels, strict=True)
    rng.shuffle(chosen)
    made = ProblemSet()
    for problem, labels in chosen:
        made.add(problem, labels)
    return made


def with_simpler(chosen: ProblemSet, op: str) -> ProblemSet:
    """Behind each problem, the one that kernels see in its place."""
    made = ProblemSet()
    for problem, labels in zip(chosen.problems, chosen.labels, strict=True):
        for seen in dict.fromkeys((problem, simpler(get_op(op), problem))):
            made.add(seen, labels)
    return made.distinct()


def sets(args: argparse.Namespace, arch: Arch) -> list[Set]:
    made = []
    for word in args.sets.split(","):
        dtype, _, count = word.partition(":")
        for op in args.ops.split(","):
            problems = problem_set(op, dtype, int(count), args.seed, arch)
            problems = with_simpler(problems, op)
            whole = round(args.whole * len(problems))
            made.append(Set(op=op, dtype=dtype, problems=problems, whole=whole))
    return made


def told(one: Set) -> dict[str, Any]:
    """What a set holds."""
    problems: Sequence[Any] = one.problems.problems
    return {
        "set": one.name,
        "problems": len(problems),
        "grouped": sum(p.g > 1 and not p.is_depthwise for p in problems),
        "depthwise": sum(p.is_depthwise for p in problems),
        "dimensions": dict(sorted(Counter(p.ndim for p in problems).items())),
        "real": sum("network" in labels for labels in one.problems.labels),
        "whole": one.whole,
    }


def pool(
    op: str, dtype: str, arch: Arch, engines: Sequence[str], without: Collection[str] = ()
) -> list[Kernel]:
    """The kernels of a set, and the vendor's."""
    own = [k for k in load_pool(get_op(op), arch, engines) if getattr(k, "dtype", "") == dtype]
    own = [k for k in own if getattr(k, "family", "") not in without]
    return [*own, VendorKernel(op_name=op, library="torch")]


class Narrowing:
    """Legality of a sweep: every kernel on the first problems, the most promising on the rest."""

    def __init__(self, one: Set, kernels: Sequence[Kernel], top: int) -> None:
        self._whole = {problem.key for problem in one.problems.problems[: one.whole]}
        self._legal = get_op(one.op).why_unusable
        self._few = Shortlist(top, one.op, lambda arch: kernels)

    def __call__(self, kernel: Kernel, problem: Any, arch: Arch) -> str | None:
        if problem is None or problem.key in self._whole:
            return self._legal(kernel, problem, arch)
        return self._few(kernel, problem, arch)

    def labels(self, one: Set, top: int) -> Iterator[str]:
        """Those of the narrowed ones say so: they are learned from, and never scored."""
        for at, labels in enumerate(one.problems.labels):
            yield json.dumps({**labels, "top": top} if at >= one.whole else labels, default=str)


def engines_of(one: Set, args: argparse.Namespace, kind: str) -> list[str]:
    wanted = args.engines.split(",") if args.engines else None
    return [e for e in engines_for(kind, get_op(one.op)) if wanted is None or e in wanted]


def run_set(one: Set, args: argparse.Namespace, budget_s: float, kind: str) -> Summary:
    """One set swept until its time is up; what was measured before is known."""
    policy: Policy = parse_policy("quick" if kind == "cpu" else POLICY, kind)
    engines = engines_of(one, args, kind)
    config = WorkerConfig(engines=engines, policy=policy, kind=kind, limits=Limits(timeout_s=10.0))
    gpus = visible_gpus() if kind == "gpu" else []
    held: list[Narrowing] = []

    def kernels(arch: Arch) -> list[Kernel]:
        found = pool(one.op, one.dtype, arch, engines, args.without.split(","))
        if args.dry_run:  # a few will do, and compile in seconds
            found = found[:: max(1, len(found) // DRY_KERNELS)]
        held.append(Narrowing(one, found, args.top))
        return found

    def why_unusable(kernel: Kernel, problem: Any, arch: Arch) -> str | None:
        return held[0](kernel, problem, arch)

    return sweep(
        args.store,
        one.problems.problems,
        kernels,
        LocalExecutor(config, workers=max(1, len(gpus)), gpus=gpus),
        policy,
        options=Options(budget_s=budget_s),
        labels=list(Narrowing(one, [], args.top).labels(one, args.top)),
        why_unusable=why_unusable,
    )


def compile_sets(listed: Sequence[Set], args: argparse.Namespace, arch: Arch) -> dict[str, Any]:
    """Compiles what the sets need, in their order; what does not compile is told by its sweep."""
    failed = pairs = 0
    for one in listed:
        engines = engines_of(one, args, "gpu")
        kernels = pool(one.op, one.dtype, arch, engines, args.without.split(","))
        narrow, usual = Narrowing(one, kernels, args.top), get_op(one.op).module("launch")
        for name in engines:
            own = [k for k in kernels if k.engine == name != "vendor"]
            wanted = [(k, usual.representative(k)) for k in own]
            for p in one.problems.problems:
                wanted += [(k, p) for k in own if narrow(k, p, arch) is None]
            pairs += len(wanted)
            failed += len(get_engine(name).compile_ahead(wanted, arch, max_workers=COMPILERS))
    return {"pairs": pairs, "failed": failed}


@contextmanager
def compiled_beside() -> Iterator[None]:
    """A process that compiles, of no other use; it and its children end with the block."""
    # The same command with --compile at its end, in whose output nobody is interested.
    command = [sys.executable, __file__, *sys.argv[1:], "--compile"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(listed: Sequence[Set], args: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """All sets, each with its share of what time is left."""
    end, rows = time.monotonic() + 60 * args.minutes, []
    for at, one in enumerate(listed):
        left = end - time.monotonic()
        share = len(one.problems) / sum(len(other.problems) for other in listed[at:])
        if left <= 0:
            break
        summary = run_set(one, args, max(1.0, left * share), kind)
        rows.append({**told(one), **summary.to_dict()})
        if not args.json:
            print(
                f"{one.name}: {summary.rows} rows {dict(summary.by_status)}, "
                f"{summary.remaining} left, {summary.seconds:.0f} s",
                flush=True,
            )
    return rows


def check(listed: Sequence[Set], args: argparse.Namespace, arch: Arch) -> list[dict[str, Any]]:
    """Every launch of the sweep, worked out as the device would make it; raises where one fails."""
    rows = []
    for one in listed:
        engines = engines_of(one, args, "gpu")
        kernels = pool(one.op, one.dtype, arch, engines, args.without.split(","))
        narrow, launches, sources, families_ = (
            Narrowing(one, kernels, args.top),
            0,
            set(),
            Counter(),
        )
        module = get_op(one.op).module("launch")
        for problem in one.problems.problems:
            for kernel in kernels:
                if kernel.engine != "vendor" and narrow(kernel, problem, arch) is None:
                    made = module.launch(kernel, problem, arch)
                    launches += 1
                    families_[str(getattr(kernel, "family", ""))] += 1
                    sources |= {repr(source) for source in made.sources}
        found = {"launches": launches, "sources": len(sources), "families": dict(families_)}
        rows.append({**told(one), **found})
    return rows


def small(args: argparse.Namespace) -> list[Set]:
    """A few problems that this CPU does in no time."""
    arch = load_arch("x86_avx2")
    made = []
    for op in args.ops.split(","):
        problems = wide_coverage(op, arch, 6, dtype="fp32", seed=args.seed, max_ms=0.05)
        made.append(Set(op=op, dtype="fp32", problems=problems, whole=1))
    return made


def main() -> int:
    args = arguments()
    try:
        arch = load_arch(args.arch)
        listed = small(args) if args.dry_run else sets(args, arch)
        if args.problems:
            args.problems.mkdir(parents=True, exist_ok=True)
            for one in listed:
                path = args.problems / f"{one.op}_{one.dtype}.csv"
                write_problems(path, one.problems.problems, one.problems.labels)
            rows = [told(one) for one in listed]
        elif args.check:
            rows = check(listed, args, arch)
        elif args.compile:
            rows = [compile_sets(listed, args, arch)]
        elif args.dry_run:
            rows = run(listed, args, "cpu")
        else:
            with compiled_beside():
                rows = run(listed, args, "gpu")
    except TilewiseError as error:
        print(f"sweep_convs: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"rows": rows}, default=str))
    elif args.check or args.problems or args.compile:
        for row in rows:
            print(" ".join(f"{name}={value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
