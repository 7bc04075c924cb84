#!/usr/bin/env python3
"""Sweeps convolutions of every direction on a GPU within a given time, shared out fairly.

usage: python benchmarks/sweep_convs.py STORE [--minutes 30] [--sets bf16:700,fp16:250]
                                        [--ops conv_fwd,conv_bwd_data,conv_bwd_weight]
                                        [--top 16] [--whole 0.2] [--seed 0] [--arch sm_90:H200]
                                        [--engines cuda,vendor] [--without FAMILIES]
                                        [--model FOLDER,FOLDER] [--known STORE,STORE]
                                        [--problems FOLDER | --check | --compile | --dry-run]
                                        [--workers 3] [--jobs N] [--json]

The problems of all sets are swept together, in an order in which every beginning holds its share
of each set: layers of whole models first, then other layers of real networks and drawn ones, those
of which models know least before others; a third are grouped or depthwise, some in one and in three
dimensions (`conv_sets.py`); equal seeds give equal sets. Of each the vendor's routine comes first,
which is what a ratio needs, then the --top kernels that a model expects most of (--model, a shipped
one, or the analytic estimate), families that would have none among them; of --whole of them, drawn
by lot, every legal kernel. Leaders are measured again in turns. Every result is checked against the
vendor's in fp32. What a --known store has is not measured again. Some --workers lay out problems
and have cuDNN search at once, which leaves a GPU idle most of the time; while one measures, the
others wait.

Kernels are compiled beside the measuring, in the order in which they are needed, by all cores but
those that measuring takes. --compile does that alone, with or without a device: what it leaves in
the cache (`TILEWISE_CACHE_DIR`) serves elsewhere, under the same version of NVRTC
(`benchmarks/objects.py`). --problems writes the sets as CSV files and measures nothing. --check
works out, without a device, every launch that the sweep would make. --dry-run sweeps a few small
problems on this CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conv_sets import OPS, Picks, Set, in_order, make_set, pool

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy, parse_policy
from tilewise.core.model import Model, load_model
from tilewise.data.store import Store
from tilewise.engines import engines_for, get_engine
from tilewise.errors import TilewiseError
from tilewise.ops.contract import get_op
from tilewise.problems.files import write_problems
from tilewise.problems.sampling import wide_coverage
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.device_info import visible_gpus
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Options, Summary, sweep
from tilewise.sweep.supervisor import Limits

DRY_KERNELS = 12
COMPILERS = max(1, (os.cpu_count() or 1) - 8)
"""Workers and the sweep itself take some four to six cores, and their timings quiet ones."""
POLICY = "graph,time_ms=1.0,max_repeats=10,rounds=4,max_leaders=5"
TOLD_S = 15.0


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
    parser.add_argument("--model", default="", help="folders of models that choose, by commas")
    parser.add_argument("--known", default="", help="stores whose pairs are not measured again")
    parser.add_argument("--problems", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--workers", type=int, default=3, help="that take turns on a GPU")
    parser.add_argument("--jobs", type=int, default=COMPILERS, help="compilers at once")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def sets(args: argparse.Namespace, arch: Arch) -> list[Set]:
    made = []
    for word in args.sets.split(","):
        dtype, _, count = word.partition(":")
        options = {"seed": args.seed, "whole": args.whole, "top": args.top}
        made += [make_set(op, dtype, int(count), arch, **options) for op in args.ops.split(",")]
    return made


def small(args: argparse.Namespace) -> list[Set]:
    """A few problems that this CPU does in no time."""
    arch, made = load_arch("x86_avx2"), []
    for op in args.ops.split(","):
        found = wide_coverage(op, arch, 6, dtype="fp32", seed=args.seed, max_ms=0.05)
        whole = frozenset(found.problems[:1])
        made.append(Set(op=op, dtype="fp32", problems=found, first=0, whole=whole, top=args.top))
    return made


def engines_of(op: str, args: argparse.Namespace, kind: str) -> list[str]:
    wanted = args.engines.split(",") if args.engines else None
    return [e for e in engines_for(kind, get_op(op)) if wanted is None or e in wanted]


def picks(listed: Sequence[Set], args: argparse.Namespace, kind: str) -> Picks:
    def kernels(one: Set, arch: Arch) -> list[Kernel]:
        engines = engines_of(one.op, args, kind)
        vendors, *own = pool(one.op, one.dtype, arch, engines, args.without.split(","))
        if args.dry_run:  # a few will do, and compile in seconds
            own = own[:: max(1, len(own) // DRY_KERNELS)]
        return [vendors, *own]

    return Picks(listed, kernels, models(args.model))


def models(folders: str) -> list[Model]:
    return [load_model(Path(folder)) for folder in folders.split(",") if folder]


def run(listed: Sequence[Set], args: argparse.Namespace, kind: str) -> Summary:
    """All sets within the time; what was measured before is known."""
    policy: Policy = parse_policy("quick" if kind == "cpu" else POLICY, kind)
    engines = {name: None for one in listed for name in engines_of(one.op, args, kind)}
    config = WorkerConfig(
        engines=tuple(engines),
        policy=policy,
        kind=kind,
        limits=Limits(timeout_s=6.0, prepare_s=60.0, batch=100),
        jobs=args.jobs,
    )
    gpus = visible_gpus() if kind == "gpu" else []
    pick = picks(listed, args, kind)
    problems, labels = in_order(listed)
    return sweep(
        args.store,
        problems,
        pick.all,
        LocalExecutor(config, workers=args.workers * max(1, len(gpus)), gpus=gpus),
        policy,
        options=Options(budget_s=60 * args.minutes),
        labels=labels,
        pick=pick,
        known=[Store(name) for name in args.known.split(",") if name],
        on_event=Teller(args.json),
    )


class Teller:
    """Says now and then how far a sweep has come."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._began = self._told = time.monotonic()
        self._statuses: Counter[str] = Counter()
        self._problems = 0

    def __call__(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        self._problems += event["event"] == "problem_done"
        if event["event"] == "row":
            self._statuses[event["status"]] += 1
            if event["status"] not in ("ok", "over_limit"):
                self.say(f"{event['status']} {event['kernel']}: {event['message'][:200]}")
        elif event["event"] in ("start", "worker_lost", "builder_lost"):
            self.say(json.dumps(event, default=str)[:400])
        if now - self._told > TOLD_S:
            self._told, took = now, now - self._began
            rows = sum(self._statuses.values())
            self.say(
                f"{took:4.0f} s: {self._problems} problems, {rows} rows ({rows / took:.0f}/s), "
                f"{dict(self._statuses)}"
            )

    def say(self, text: str) -> None:
        if not self._is_quiet:
            print(text, flush=True)


def compile_sets(listed: Sequence[Set], args: argparse.Namespace, arch: Arch) -> dict[str, Any]:
    """Compiles what the sets need; what does not compile is told by its sweep."""
    pick, failed, wanted = picks(listed, args, "gpu"), 0, []
    met: set[Kernel] = set()
    for p in in_order(listed)[0]:
        own = [k for k in pick(p, arch) if k.engine != "vendor"]
        usual = get_op(p.op).module("launch").representative
        wanted += [(k, usual(k)) for k in own if k not in met]  # which a sweep builds first
        wanted += [(k, p) for k in own]
        met.update(own)
    for name in {kernel.engine for kernel, _ in wanted}:
        pairs = [pair for pair in wanted if pair[0].engine == name]
        failed += len(get_engine(name).compile_ahead(pairs, arch, max_workers=args.jobs))
    return {"pairs": len(wanted), "failed": failed}


def check(listed: Sequence[Set], args: argparse.Namespace, arch: Arch) -> list[dict[str, Any]]:
    """Every launch of the sweep, worked out as the device would make it; raises where one fails."""
    rows, pick = [], picks(listed, args, "gpu")
    for one in listed:
        launches, sources, named = 0, set(), Counter()
        module = get_op(one.op).module("launch")
        for problem in one.problems.problems:
            for kernel in pick(problem, arch):
                if kernel.engine != "vendor":
                    made = module.launch(kernel, problem, arch)
                    launches += 1
                    named[str(getattr(kernel, "family", ""))] += 1
                    sources |= {repr(source) for source in made.sources}
        found = {"launches": launches, "sources": len(sources), "families": dict(named)}
        rows.append({**one.told(), **found})
    return rows


def answer(listed: Sequence[Set], args: argparse.Namespace, arch: Arch) -> list[dict[str, Any]]:
    if args.problems:
        args.problems.mkdir(parents=True, exist_ok=True)
        for one in listed:
            path = args.problems / f"{one.op}_{one.dtype}.csv"
            write_problems(path, one.problems.problems, one.problems.labels)
        return [one.told() for one in listed]
    if args.check:
        return check(listed, args, arch)
    if args.compile:
        return [compile_sets(listed, args, arch)]
    summary = run(listed, args, "cpu" if args.dry_run else "gpu").to_dict()
    return [*(one.told() for one in listed), summary]


def main() -> int:
    args = arguments()
    try:
        arch = load_arch(args.arch)
        rows = answer(small(args) if args.dry_run else sets(args, arch), args, arch)
    except TilewiseError as error:
        print(f"sweep_convs: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"rows": rows}, default=str))
    else:
        for row in rows:
            print(" ".join(f"{name}={value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
