#!/usr/bin/env python3
"""Whole models, PyTorch's own against patched ones: what a user feels.

usage: python benchmarks/whole_models.py [--minutes 3] [--models TEXT,TEXT]
                                         [--modes eager,graph,compile] [--batch 256,64]
                                         [--tasks training,inference] [--sides patched,fused]
                                         [--layers] [--profile] [--out FILE.jsonl [--resume]]
                                         [--device cpu --tiny]

Each model runs several times in one process, in turns: as PyTorch made it, after `tilewise.patch`
(`patched`), and after `tilewise.patch(fuse=True)` (`fused`); `tuned` is fused after
`tilewise.tune`, `always` is fused with tilewise serving whatever it can. Vision models are
channels-last in bf16 (training: autocast with fp32 weights). The ratio is PyTorch's time over
ours. Beside it: the time until the host is free again, the first step (start-up), peak memory
beyond the weights, how far results and gradients are apart, and who serves how many layers.

The most telling cases come first, compiled ones last, and all ends after `--minutes`. They run in
a process of their own, which is started again behind a case that breaks it or hangs. A case's row
is printed and appended to `--out` as soon as it is there; a table of ratios is the end. With
`--resume` cases that `--out` holds in every mode are left out, and in the table. What our models
launch is compiled by `tilewise.prepare` before their first step, and counts as part of it.
Under torch.compile the last of the sides alone stands beside PyTorch's: chains are the compiler's.

Where a GPU's time goes, plain and fused:
    python benchmarks/whole_models.py --models resnext --tasks training --batch 256 --profile
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model_sides import MODES, SHARING, SIDES, Job, Row, profile, run, shown

HANGS_S, COMPILES_S = 90, 150
"""A case that gives no row for longer is ended, or one that is being compiled."""
TASKS = ("training", "inference")


def work(args: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """All jobs, one after the other, in this process."""
    import torch
    from model_cases import cases

    import tilewise

    known = {case.name: case for case in cases(args.tiny)}
    torch.backends.cudnn.benchmark = True
    names = args.sides.split(",")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    tell(args, {"on": {"device": where, "torch": torch.__version__}})
    for job in jobs:
        tell(args, {"start": asdict(job)})
        kept: dict[str, Any] = {}
        for mode in job.modes:
            row = Row(model=job.model, task=job.task, mode=mode, batch=job.batch)
            try:
                x = known[job.model].feed(job.batch, args.device)
                x = x.to(torch.bfloat16) if job.task == "inference" else x
                row = run(job, known[job.model], mode, names, x, kept)
            except Exception as error:  # one model's failure is a row, not the end
                row.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                kept.clear()
            print(shown(row), flush=True)
            sides = kept.get("eager", [])
            if args.layers and mode == "eager" and sides:
                print(tilewise.layers(sides[-1].model), flush=True)
            if args.profile and mode == "eager" and sides:
                for name, side in zip(("PyTorch", *names), sides, strict=True):
                    told = f"{job.model} {job.task} {job.batch}, {name}:\n{profile(side)}"
                    print(told, flush=True)
            tell(args, asdict(row))
            if "CUDA error" in row.failed:
                os._exit(3)  # nothing runs in this process any more
        kept.clear()
        x = sides = None
        if args.device == "cuda":
            torch.cuda.empty_cache()


def tell(args: argparse.Namespace, what: dict[str, Any]) -> None:
    """Appends a line for whoever watches."""
    with Path(args.notes).open("a") as file:
        file.write(json.dumps(what) + "\n")
        file.flush()
        os.fsync(file.fileno())


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """What is asked for, the most telling first."""
    from model_cases import cases

    batches = tuple(map(int, args.batch.split(",")))
    modes = args.modes.split(",")
    shared = tuple(mode for mode in modes if mode in SHARING)
    groups = [*([shared] if shared else []), *((mode,) for mode in modes if mode not in SHARING)]
    known = {case.name: case for case in cases(args.tiny)}
    found = [
        Job(model=case.name, task=task, batch=batch, modes=group)
        for group in groups
        for case in known.values()
        for task in args.tasks.split(",")
        for batch in case.batches or batches
        if any(text in case.name for text in args.models.split(",")) and task in case.tasks
    ]

    def rank(job: Job) -> tuple[int, ...]:
        group = groups.index(job.modes)
        if known[job.model].batches:
            return group, 1, 0
        late = job.model == "vit_b_16"
        return group, 2 * batches.index(job.batch) + late, TASKS.index(job.task)

    return sorted(found, key=rank)


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that did not fail; a line that was cut off is none."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if not row["failed"]]


def undone(jobs: Sequence[Job], rows: Sequence[dict[str, Any]]) -> list[Job]:
    """Those of which some mode has no row."""
    done = {(row["model"], row["task"], row["batch"], row["mode"]) for row in rows}
    return [
        job
        for job in jobs
        if any((job.model, job.task, job.batch, mode) not in done for mode in job.modes)
    ]


def whole_lines(notes: Path) -> list[str]:
    """What has been told; a line that is being written is not there yet."""
    return notes.read_text().rpartition("\n")[0].splitlines()


def supervise(args: argparse.Namespace, jobs: list[Job]) -> int:
    """Runs jobs in a process of their own, started again behind one that breaks it."""
    end = time.monotonic() + 60 * args.minutes
    notes, read, broken = Path(args.notes), 0, 0
    while jobs and time.monotonic() < end:
        asked = json.dumps([asdict(job) for job in jobs])
        command = [sys.executable, __file__, *sys.argv[1:], "--notes", args.notes, "--jobs", asked]
        child = subprocess.Popen(command, start_new_session=True)
        current, since, rows = None, time.monotonic(), 0
        while True:
            is_over = child.poll() is not None
            lines = whole_lines(notes)
            for line in lines[read:]:
                told = json.loads(line)
                since = time.monotonic()
                if "on" in told:
                    args.on = told["on"]
                elif "start" in told:
                    current, rows = jobs.pop(0), 0
                else:
                    rows += 1
                    keep(args, told)
            read = len(lines)
            if is_over:
                break
            is_compiled = current is not None and not set(current.modes) <= set(SHARING)
            most_s = COMPILES_S if is_compiled else HANGS_S
            late = time.monotonic() - since > most_s
            if late or time.monotonic() > end:
                os.killpg(child.pid, signal.SIGKILL)  # its own group: what it started goes too
                child.wait()
                broken += late
                if late and current is not None:
                    lost(args, current, rows, f"no row within {most_s} s")
                if not late and current is not None:
                    jobs.insert(0, current)
                current = None
                if not late:
                    break
            time.sleep(0.05)
        if child.returncode not in (0, 3, -signal.SIGKILL) and current is not None:
            broken += 1
            lost(args, current, rows, f"the process ended with {child.returncode}")
        if current is None and child.returncode not in (0, -signal.SIGKILL):
            return child.returncode  # it never came to a job
    for job in jobs:
        what = f"{job.model} {job.task} {job.batch} {','.join(job.modes)}"
        print(f"{what}: left out, {args.minutes:g} minutes are over")
    print(table(args.rows))
    return 1 if broken else 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """PyTorch's time in each mode, and ours: over PyTorch's in the same mode, over its best."""
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if not row["failed"]:
            case = (row["model"], row["task"], row["batch"])
            cases.setdefault(case, {})[row["mode"]] = row
    lines = []
    for (model, task, batch), modes in cases.items():
        best = min(row["torch"]["ms"] for row in modes.values())
        lines.append(f"{model} {task} {batch}: PyTorch's best {best:.2f} ms")
        for mode, row in modes.items():
            told = [f"  {mode:12} PyTorch {row['torch']['ms']:8.2f} ms"]
            for name, times in row["sides"].items():
                ratios = f"x{times['ratio']:.3f}, of its best x{best / times['ms']:.3f}"
                told.append(f"{name} {times['ms']:8.2f} ms ({ratios})")
            lines.append("   ".join(told))
    return "\n".join(lines)


def keep(args: argparse.Namespace, row: dict[str, Any]) -> None:
    args.rows.append(row)
    with Path(args.out).open("a") as file:
        file.write(json.dumps(args.on | row) + "\n")


def lost(args: argparse.Namespace, job: Job, rows: int, why: str) -> None:
    mode = job.modes[min(rows, len(job.modes) - 1)]
    row = Row(model=job.model, task=job.task, mode=mode, batch=job.batch, failed=why)
    keep(args, asdict(row))
    print(shown(row), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="all ends after these")
    parser.add_argument("--models", default="", help="those with one of these in their names")
    parser.add_argument("--modes", default="eager,graph", help=",".join(MODES))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--batch", default="256,64", help="images of a step, several by commas")
    parser.add_argument("--sides", default="patched,fused", help="what stands beside PyTorch's")
    parser.add_argument("--layers", action="store_true", help="who serves each, of the last side")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by kernel")
    parser.add_argument("--out", default="whole_models.jsonl", help="where rows are appended")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="stand-ins, to try the benchmark out")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    return parser.parse_args()


def why_wrong(args: argparse.Namespace) -> str | None:
    for what, known in (("modes", MODES), ("tasks", TASKS), ("sides", tuple(SIDES))):
        if set(getattr(args, what).split(",")) - set(known):
            return f"--{what} takes {','.join(known)}"
    if not all(text.isdecimal() and int(text) for text in args.batch.split(",")):
        return "--batch takes numbers, by commas"
    if args.device == "cpu" and "graph" in args.modes.split(","):
        return "--modes graph needs a GPU"
    try:
        import torch
    except ImportError:
        return "it needs PyTorch"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "it needs a GPU; --device cpu --tiny --modes eager tries it out"
    return None


def main() -> int:
    args = arguments()
    if args.jobs:
        work(args, [Job(**job | {"modes": tuple(job["modes"])}) for job in json.loads(args.jobs)])
        return 0
    why = why_wrong(args)
    if why is not None:
        print(f"whole_models: {why}", file=sys.stderr)
        return 2
    args.rows = rows_in(Path(args.out)) if args.resume else []
    jobs = undone(jobs_of(args), args.rows)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as notes:
        args.notes = notes.name
        return supervise(args, jobs)


if __name__ == "__main__":
    sys.exit(main())
