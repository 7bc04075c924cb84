"""`data import|export|merge|publish|show|check`: stores as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import data_io
from tilewise.cli.console import JsonFlag, emit, out, table
from tilewise.cli.progress import telling
from tilewise.errors import NoStoreError

app = typer.Typer(help="Stores of measurements: import, export, merge, show.", no_args_is_help=True)
app.command("import")(data_io.import_)
app.command("export")(data_io.export)

StoreArgument = Annotated[Path, typer.Argument(help="A folder that `sweep` made.")]


@app.command()
def merge(
    target: Annotated[Path, typer.Argument(help="The store to merge into; created if needed.")],
    sources: Annotated[list[Path], typer.Argument(help="Stores to merge.")],
    as_json: JsonFlag = False,
) -> None:
    """Merges stores into one, and reports contradictions."""
    from tilewise.data.merge import merge as run

    with telling("reading stores") as tell:
        merged = run(target, sources, tell)
    if as_json:
        return emit(merged.to_dict())
    out.print(
        f"{merged.added:,} rows added ({merged.repeated:,} of them measure a known key again), "
        f"{merged.known:,} were there; {target} has {merged.rows:,}",
        soft_wrap=True,
    )
    if merged.conflicts:
        table(
            f"{len(merged.conflicts):,} measurements disagree; "
            "all are kept, the last verdict on a key holds",
            ["kernel", "problem", "what"],
            [[c.kernel, c.problem, c.what] for c in merged.conflicts[:20]],
        )
    return None


@app.command()
def publish(
    store: StoreArgument,
    target: Annotated[Path, typer.Argument(help="A new folder for the smaller copy.")],
    as_json: JsonFlag = False,
) -> None:
    """Writes a smaller copy of a store, for sharing.

    It leaves out what can be derived, and can be used like the original.
    """
    from dataclasses import asdict

    from tilewise.data.publish import publish as run

    with telling(f"reading {store}") as tell:
        done = run(store, target, tell)
    if as_json:
        return emit(asdict(done))
    sizes = f"{done.bytes_before / 1e3:,.0f} kB became {done.bytes_after / 1e3:,.0f}"
    out.print(f"{done.rows:,} rows in {_files(done.shards)}: {sizes}", soft_wrap=True)
    return None


@app.command()
def show(store: StoreArgument, as_json: JsonFlag = False) -> None:
    """Shows what a store holds."""
    from tilewise.data.show import overview

    with telling(f"reading {store}") as tell:
        found = overview(store, tell)
    if as_json:
        return emit(found.to_dict())
    counts = ", ".join(f"{n:,} {status}" for status, n in found.by_status.items() if n)
    out.print(
        f"{found.rows:,} measurements ({counts}), {found.attempts:,} attempts in "
        f"{_files(found.shards)}, {found.bytes / 1e3:,.0f} kB",
        soft_wrap=True,
    )
    for s in found.slices:
        vendor = "" if s.vendor_wins is None else f", the vendor on {s.vendor_wins:.0%} of problems"
        moved = "" if s.leaders_moved is None else f", leaders moved {s.leaders_moved:.1%}"
        out.print(f"\n{s.op} {s.dtype} on {s.device}, policy {s.policy_key[:8]}", soft_wrap=True)
        out.print(
            f"  {s.problems:,} problems x {s.kernels:,} kernels: {s.rows:,} rows, {s.ok:,} ok\n"
            f"  fastest: {s.winners:,} kernels somewhere{vendor}; best {s.best_tflops:.4g} TFLOPS\n"
            f"  noise: {s.noise:.1%} median spread{moved}",
            soft_wrap=True,
        )
    return None


@app.command()
def check(
    store: StoreArgument,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove rows that only record a machine fault.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Looks for damage in a store.

    Torn shards, duplicates, impossible rows and machine faults; exits with 1 if there are any.
    """
    from tilewise.data.check import check as run
    from tilewise.data.forget import forget_faults

    with telling(f"reading {store}") as tell:
        forgotten = forget_faults(store) if forget else 0
        report = run(store, tell)
    if not report.rows and report.is_sound and not forgotten:
        raise NoStoreError(f"{store} holds no measurements; name a folder that `sweep` made")
    if as_json:
        emit({**report.to_dict(), "forgotten": forgotten})
    else:
        if forgotten:
            out.print(f"{forgotten:,} rows about the machine alone are forgotten", soft_wrap=True)
        for finding in report.findings:
            out.print(f"{finding.kind}: {finding.where}: {finding.what}", soft_wrap=True)
        counts = ", ".join(f"{n:,} {kind}" for kind, n in report.counts.items()) or "nothing wrong"
        out.print(f"{report.rows:,} rows in {_files(report.shards)}: {counts}", soft_wrap=True)
    raise typer.Exit(0 if report.is_sound else 1)


def _files(shards: int) -> str:
    return "1 shard" if shards == 1 else f"{shards:,} shards"
