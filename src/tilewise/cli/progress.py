"""What a sweep shows while it runs: a progress bar for people, JSON lines for programs."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilewise.cli.console import err

Emit = Callable[[dict[str, Any]], None]


@contextmanager
def shown(as_json: bool) -> Iterator[Emit]:
    """A listener that prints JSON lines or keeps a progress bar; SIGTERM stops like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if as_json:
            yield print_line
        else:
            with progress_bar() as update:
                yield update
    finally:
        signal.signal(signal.SIGTERM, before)


def print_line(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event, default=str) + "\n")
    sys.stdout.flush()


@contextmanager
def progress_bar() -> Iterator[Emit]:
    """A bar with rate, time left and failures by kind, on stderr.

    It leaves nothing behind until the sweep has started: a refusal stands alone there.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
        TextColumn("{task.fields[failures]}"),
    )
    failures: Counter[str] = Counter()
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None, rate="", failures="")
        built = 0

        def update(event: dict[str, Any]) -> None:
            nonlocal built
            match event["event"]:
                case "start":
                    bar.live.transient = False
                    bar.reset(task, total=event["total"], description="measuring")
                    if event["known"]:
                        err.print(f"{event['known']:,} measurements are there already")
                    if event["forgotten"]:
                        told = f"{event['forgotten']:,} measured again: only faults of the machine"
                        err.print(f"{told} were recorded of them")
                    if event["skipped"]:
                        err.print(f"{event['skipped']:,} left out: known to fail (--retry-failed)")
                case "built":
                    built += 1
                    bar.update(task, description=f"built {built}, measuring")
                case "row":
                    failures[event["status"]] += event["status"] != "ok"
                    bar.update(
                        task,
                        advance=event["stage"] != "leader",
                        rate=f"{bar.tasks[0].speed or 0:.1f}/s",
                        failures=" ".join(f"{k} {n}" for k, n in sorted(failures.items()) if n),
                    )
                case "node_lost" | "slot_refused" | "builder_lost":
                    err.print(f"{event['event'].replace('_', ' ')}: {event['message']}")
                case "waiting":
                    bar.update(task, description="waiting for another sweep")

        yield update
