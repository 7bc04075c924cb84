"""`sweep`: measures kernels x problems into a store, and carries on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    FilterOption,
    OpOption,
    bearable,
    err,
    out,
)
from tilewise.cli.kernels import ConfigOption, pick
from tilewise.cli.models import ModelOption, given_model
from tilewise.cli.progress import shown
from tilewise.cli.session import Session, TimeoutOption, executor, libraries_here, with_vendor
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.errors import InputError
from tilewise.ops.configs import filter_kernels
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import LIBRARIES

if TYPE_CHECKING:
    from tilewise.problems.files import ProblemFile
    from tilewise.sweep.run import Summary

StoreArgument = Annotated[str, typer.Argument(help="The folder to store measurements in.")]
ProblemsOption = Annotated[
    str,
    typer.Option(
        "--problems",
        help="CSV, JSON, JSON lines, Parquet or MIOpenDriver commands; - reads standard input.",
    ),
]
EnginesOption = Annotated[
    str, typer.Option("--engines", help="Comma-separated; default: all that run on the device.")
]
PolicyOption = Annotated[
    str,
    typer.Option(
        help="cpu, gpu, graph, quick or careful, and FIELD=VALUE words; "
        "with --replay the beginning of a recorded policy's key."
    ),
]
BudgetOption = Annotated[
    float, typer.Option(min=0, callback=bearable, help="Stop after this many seconds; 0 for never.")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Kernels handed to a worker at a time.")]
WorkersOption = Annotated[
    int, typer.Option(min=0, help="Worker processes; 0: one per GPU, or one on a CPU.")
]
JobsOption = Annotated[
    int, typer.Option(min=0, help="How many compilers to run at once; 0: one per core.")
]
OnOption = Annotated[str, typer.Option("--on", help="local or ray.")]
AddressOption = Annotated[str, typer.Option(help="Address of a running Ray cluster.")]
TopOption = Annotated[
    int,
    typer.Option(
        min=0, help="Measure only this many kernels per problem, the most promising; 0: all."
    ),
]
RetryFlag = Annotated[
    bool, typer.Option("--retry-failed", help="Measure again what failed earlier.")
]
GiveUpOption = Annotated[
    int,
    typer.Option(min=0, help="Give up on a kernel after it has cost this many workers; 0: never."),
]
ReplayOption = Annotated[Path | None, typer.Option(help="Replay this store instead of measuring.")]
EventsFlag = Annotated[bool, typer.Option("--json", help="Events as JSON lines on stdout.")]


def sweep(
    store: StoreArgument,
    op: OpOption,
    problems: ProblemsOption,
    dtype: DtypeOption = None,
    arch: ArchOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    engines: EnginesOption = "",
    policy: PolicyOption = "",
    budget: BudgetOption = 0.0,
    timeout: TimeoutOption = 5.0,
    batch: BatchOption = 20,
    workers: WorkersOption = 0,
    jobs: JobsOption = 0,
    on: OnOption = "local",
    address: AddressOption = "",
    top: TopOption = 0,
    model: ModelOption = None,
    retry_failed: RetryFlag = False,
    give_up_after: GiveUpOption = 3,
    replay: ReplayOption = None,
    as_json: EventsFlag = False,
) -> None:
    """Measures kernels on problems, into a store.

    Every legal kernel is measured on every problem, unless the store has the result already. Stop
    it in any way: what was measured is kept, and the same command does the rest.
    """
    from tilewise.sweep.run import Options
    from tilewise.sweep.run import sweep as run

    if not store.strip():
        raise InputError("the store's path is empty; name the folder to store measurements in")
    found = problems_of(problems, op, dtype)
    session = Session.of(arch, policy, timeout, replay)
    names = tuple(word.strip() for word in engines.split(",") if word.strip())
    for name in names:
        get_op(op).types_of(name)  # raises where there is none
    workers_of = session.config(op, names, batch=batch, jobs=jobs)
    # Workers of a cluster may have what is not installed here.
    libraries = LIBRARIES if on == "ray" else libraries_here()
    kernels = _kernels(session, op, dtype, expression, config, names, libraries)
    _check_top(top, model, replay, found)
    place = executor(on, workers_of, workers, address)
    with shown(as_json) as on_event:
        summary = run(
            *(store, found.problems, kernels, place, session.policy),
            options=Options(
                budget_s=budget, retry_failed=retry_failed, give_up_after=give_up_after
            ),
            labels=_labels(session, found, top),
            why_unusable=_why_unusable(session, op, kernels, top, model),
            on_event=on_event,
        )
    if not as_json:
        tell(summary)
    raise typer.Exit(130 if summary.stopped == "interrupted" else 0)


def problems_of(problems: str, op: str, dtype: str | None) -> ProblemFile:
    """The problems of a file, all of one dtype where one is asked for; bad lines are shown."""
    from tilewise.problems.files import read_problems

    found = read_problems(problems, op, **({"dtype": dtype} if dtype else {}))
    if dtype and any(p.dtype != dtype for p in found.problems):
        raise InputError(f"{problems} has problems that are not {dtype}; drop --dtype or split it")
    for line in found.bad_lines:
        err.print(f"{problems}, {line}")
    return found


def _kernels(
    session: Session,
    op: str,
    dtype: str | None,
    expression: str | None,
    config: Path | None,
    names: tuple[str, ...],
    libraries: Sequence[str],
) -> Callable[[Arch], list[Kernel]]:
    """What to measure on a live device: what was recorded, or what the options pick."""

    def kernels(live: Arch) -> list[Kernel]:
        if session.recording:
            recorded = [k for k in session.recording.kernels(op) if not names or k.engine in names]
            return filter_kernels(recorded, expression) if expression else recorded
        wanted = list(names or session.engines(op))
        picked = pick(op, live, dtype, wanted, expression, config)
        return with_vendor(picked, op, wanted, expression, libraries)

    return kernels


def _check_top(top: int, model: Path | None, replay: Path | None, found: ProblemFile) -> None:
    if model and not top:
        raise InputError(
            "--model predicts which kernels are fast and only makes sense with --top N; add it"
        )
    if top and replay:
        raise InputError("--top chooses what to measure; a --replay holds what was measured")
    if not top and any("top" in labels for labels in found.labels):
        raise InputError(
            "the problems have a column 'top', which marks those of which only the most promising "
            "kernels are measured, to be learned from alone; rename or drop it, or give --top N"
        )


def _why_unusable(
    session: Session,
    op: str,
    kernels: Callable[[Arch], list[Kernel]],
    top: int,
    model: Path | None,
) -> Any:
    """What narrows the pool of a problem beyond legality, or None."""
    if not top:
        return session.recording.why_unusable if session.recording else None
    from tilewise.selection.shortlist import Shortlist

    return Shortlist(top, op, kernels, given_model(model) if model else None)


def _labels(session: Session, found: ProblemFile, top: int) -> list[str]:
    """Labels as JSON, with `top` where only the most promising kernels are measured."""
    tried = session.recording.tried if session.recording else {}
    counts = [tried.get(problem.key, top) for problem in found.problems]
    return [
        json.dumps({**labels, "top": count} if count else labels, default=str)
        for labels, count in zip(found.labels, counts, strict=True)
    ]


def tell(summary: Summary) -> None:
    """The end of the sweep, for people."""
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.by_status.most_common())
    counts = counts or ("none yet" if summary.stopped else "nothing to do")
    share = summary.measuring_s / summary.seconds if summary.seconds else 0
    out.print(
        f"{summary.rows:,} rows ({counts}) in {summary.seconds:.1f} s on "
        f"{summary.device}; {share:.0%} of it measuring, {summary.workers_lost} workers replaced"
    )
    if summary.stopped:
        why = "the budget is spent" if summary.stopped == "budget" else "stopped"
        out.print(f"{why}; {summary.remaining:,} to go: run the same command to carry on")
