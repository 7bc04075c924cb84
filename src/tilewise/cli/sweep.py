"""`sweep`: measures kernels x problems into a store, and carries on where it was stopped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy, parse_policy
from tilewise.engines import engines_for
from tilewise.errors import ExpressionError, InputError
from tilewise.ops.configs import filter_kernels
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import LIBRARIES, VendorKernel

if TYPE_CHECKING:
    from tilewise.sweep.crew import WorkerConfig
    from tilewise.sweep.local import Executor
    from tilewise.sweep.run import Summary


def sweep(
    store: Annotated[str, typer.Argument(help="The folder that measurements go to.")],
    op: OpOption,
    problems: Annotated[
        str,
        typer.Option(
            "--problems",
            help="CSV, JSON, JSON lines, Parquet or MIOpenDriver commands; - reads standard input.",
        ),
    ],
    dtype: DtypeOption = None,
    arch: ArchOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    engines: Annotated[
        str, typer.Option("--engines", help="Comma-separated; by default all that the device has.")
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            help="cpu, gpu, graph, quick or careful, and FIELD=VALUE words; "
            "with --replay the beginning of a recorded policy's key."
        ),
    ] = "",
    budget: Annotated[
        float, typer.Option(min=0, callback=bearable, help="Stop after so many seconds.")
    ] = 0.0,
    timeout: Annotated[
        float, typer.Option(min=0.01, callback=bearable, help="Seconds for one kernel.")
    ] = 5.0,
    batch: Annotated[int, typer.Option(min=1, help="Kernels handed to a worker at once.")] = 20,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes; 0 for one per GPU, one on a CPU.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Compilers at once; 0 for all cores.")] = 0,
    on: Annotated[str, typer.Option("--on", help="local or ray.")] = "local",
    address: Annotated[str, typer.Option(help="Of a running Ray cluster.")] = "",
    top: Annotated[
        int, typer.Option(min=0, help="Only so many kernels a problem, those expected fastest.")
    ] = 0,
    model: ModelOption = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure again what failed before.")
    ] = False,
    give_up_after: Annotated[
        int, typer.Option(min=0, help="Leave a kernel that cost so many workers; 0 for never.")
    ] = 3,
    replay: Annotated[
        Path | None, typer.Option(help="Replay this store in place of measuring.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Events as JSON lines on stdout.")
    ] = False,
) -> None:
    """Measures every legal kernel on every problem that the store does not know yet.

    Stop it in any way: what was measured is kept, and the same command does the rest.
    """
    from tilewise.problems.files import read_problems
    from tilewise.sweep.crew import WorkerConfig
    from tilewise.sweep.recording import Recording
    from tilewise.sweep.run import Options
    from tilewise.sweep.run import sweep as run
    from tilewise.sweep.supervisor import Limits

    if not store.strip():
        raise InputError("the store's path is empty; name the folder that measurements go to")
    defaults = {"dtype": dtype} if dtype else {}
    found = read_problems(problems, op, **defaults)
    if dtype and any(p.dtype != dtype for p in found.problems):
        raise InputError(f"{problems} has problems that are not {dtype}; drop --dtype or split it")
    for line in found.bad_lines:
        err.print(f"{problems}, {line}", highlight=False, markup=False)
    recording = Recording.load(replay, arch=arch or "", policy=policy) if replay else None
    if recording:
        kind, chosen, device = "cpu", recording.policy, recording.where
    else:
        kind = device_kind(arch)
        chosen, device = settled_policy(policy, kind), (arch or "").partition(":")[0]
    names = tuple(word.strip() for word in engines.split(",") if word.strip())
    for name in names:
        get_op(op).types_of(name)  # raises where there is none
    settings_of_workers = WorkerConfig(
        engines=names or engines_for(kind, get_op(op)),
        policy=chosen,
        kind=kind,
        arch=device,
        replay=str(replay) if replay else "",
        limits=Limits(timeout_s=timeout, batch=batch),
        jobs=jobs,
    )

    def kernels(live: Arch) -> list[Kernel]:
        if recording:
            recorded = [k for k in recording.kernels(op) if not names or k.engine in names]
            return filter_kernels(recorded, expression) if expression else recorded
        wanted = list(settings_of_workers.engines)
        return with_vendor(
            pick(op, live, dtype, wanted, expression, config), op, wanted, expression
        )

    if model and not top:
        raise InputError("--model says who is expected to be fast; give --top N with it")
    if top and recording:
        raise InputError("--top chooses what to measure; a --replay holds what was measured")
    why_unusable = recording.why_unusable if recording else None
    tried = recording.tried if recording else {}
    if not top and any("top" in labels for labels in found.labels):
        raise InputError(
            "the problems have a column 'top', which marks those of which only the most promising "
            "kernels are measured, to be learned from alone; rename or drop it, or give --top N"
        )
    if top:
        from tilewise.selection.shortlist import Shortlist

        why_unusable = Shortlist(top, op, kernels, given_model(model) if model else None)
    counts = [tried.get(problem.key, top) for problem in found.problems]
    place = executor(on, settings_of_workers, workers, address)
    with shown(as_json) as on_event:
        summary = run(
            *(store, found.problems, kernels, place, chosen),
            options=Options(
                budget_s=budget, retry_failed=retry_failed, give_up_after=give_up_after
            ),
            labels=[
                json.dumps({**labels, "top": count} if count else labels, default=str)
                for labels, count in zip(found.labels, counts, strict=True)
            ],
            why_unusable=why_unusable,
            on_event=on_event,
        )
    if not as_json:
        tell(summary, store)
    raise typer.Exit(130 if summary.stopped == "interrupted" else 0)


def settled_policy(text: str, kind: str) -> Policy:
    """The policy asked for; on a CPU with the number of threads, which is part of its identity."""
    policy = parse_policy(text, kind)
    if kind == "cpu" and policy.launch == "graph":
        raise InputError("policy launch is 'graph'; a CPU has no graphs: use launch=eager")
    if kind != "cpu" or policy.threads:
        return policy
    from tilewise.settings import settings

    return replace(policy, threads=settings().threads)


def device_kind(arch: str | None) -> str:
    """`cpu` or `gpu`, without touching the device: that is left to workers."""
    if arch:
        return load_arch(arch).kind
    from tilewise.sweep.device_info import visible_gpus

    return "gpu" if visible_gpus() else "cpu"


def with_vendor(
    kernels: list[Kernel], op: str, engines: list[str], expression: str | None
) -> list[Kernel]:
    """The kernels and the vendor's, which is measured like any other.

    A filter on tiles would leave the vendor out, which has none; it stays unless the filter is
    about engines, or `--engines` does not name it. Where such a filter leaves no other kernel it
    is refused: the vendor alone is not what was asked for.
    """
    if "vendor" not in engines or any(k.engine == "vendor" for k in kernels):
        return kernels
    vendors: list[Kernel] = [VendorKernel(op_name=op, library=library) for library in LIBRARIES]
    is_about_engines = re.search(r"\bengine\b", expression or "") is not None
    if expression and not kernels and not is_about_engines:
        raise InputError(
            f"--filter {expression!r} leaves no kernel of {op}; `tilewise kernels list --op {op}` "
            "shows what there is, and --filter \"engine == 'vendor'\" is for the vendor alone"
        )
    if is_about_engines:
        try:
            vendors = filter_kernels(vendors, expression or "")
        except ExpressionError:  # it names fields that the vendor does not have
            vendors = []
    return [*kernels, *vendors]


def executor(on: str, config: WorkerConfig, workers: int, address: str) -> Executor:
    """Where the sweep runs."""
    if on == "ray":
        from tilewise.sweep.ray_backend import RayExecutor

        return RayExecutor(config, workers=workers, address=address)
    if on != "local":
        raise InputError(f"--on is {on!r}; use local or ray")
    if address:
        raise InputError(f"--address {address} is a Ray cluster's; add --on ray")
    from tilewise.sweep.device_info import visible_gpus
    from tilewise.sweep.local import LocalExecutor

    gpus = visible_gpus() if config.kind == "gpu" else []
    return LocalExecutor(config, workers=workers or len(gpus) or 1, gpus=gpus)


def tell(summary: Summary, store: str) -> None:
    """The end of the sweep, for people."""
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.by_status.most_common())
    counts = counts or ("none yet" if summary.stopped else "nothing to do")
    share = summary.measuring_s / summary.seconds if summary.seconds else 0
    out.print(
        f"{summary.rows:,} rows ({counts}) in {summary.seconds:.1f} s on "
        f"{summary.device}; {share:.0%} of it measuring, {summary.workers_lost} workers replaced",
        highlight=False,
    )
    if summary.stopped:
        why = "the budget is spent" if summary.stopped == "budget" else "stopped"
        out.print(f"{why}; {summary.remaining:,} to go: run the same command to carry on {store}")
