"""What is shown while something runs: bars on a terminal, lines in a log, JSON for programs."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilewise.cli.console import err
from tilewise.core.telling import Tell

Emit = Callable[[dict[str, Any]], None]

PATIENCE_S = 2.0
"""What takes less is not worth a line; after each line the next one waits twice as long."""
LONGEST_WAIT_S = 32.0


@contextmanager
def telling(first: str) -> Iterator[Tell]:
    """Shows on stderr what is under way: in place on a terminal, else in a line now and then."""
    if err.is_terminal:
        with err.status(first) as status:
            yield status.update
        return
    log = _Log(first)
    try:
        yield log.update
    finally:
        log.end()


class _Log:
    """Writes what is under way to a log, less and less often; nothing of what is soon over."""

    def __init__(self, first: str) -> None:
        self._text = first
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def update(self, text: str) -> None:
        self._text = text

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _write(self) -> None:
        wait, written = PATIENCE_S, ""
        while not self._is_over.wait(wait):
            if self._text != written:
                written = self._text
                err.print(written, soft_wrap=True)
                wait = min(2 * wait, LONGEST_WAIT_S)


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


class _Events:
    """What the events of a sweep come to."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.done = 0
        self.doing = "starting"
        self._built = 0
        self._failures: Counter[str] = Counter()

    @property
    def failures(self) -> str:
        return " ".join(f"{k} {n}" for k, n in sorted(self._failures.items()) if n)

    def __str__(self) -> str:
        count = "" if self.total is None else f": {self.done:,} of {self.total:,}"
        return f"{self.doing}{count}{'; ' if self.failures else ''}{self.failures}"

    def take(self, event: dict[str, Any]) -> list[str]:
        """Notes an event; gives back the lines that should stay to be read."""
        match event["event"]:
            case "start":
                self.total, self.doing = event["total"], "measuring"
                return _at_start(event)
            case "built":
                self._built += 1
                self.doing = f"built {self._built}, measuring"
            case "row":
                self._failures[event["status"]] += event["status"] != "ok"
                self.done += event["stage"] != "leader"
            case "node_lost" | "slot_refused" | "builder_lost":
                return [f"{event['event'].replace('_', ' ')}: {event['message']}"]
            case "waiting":
                self.doing = "waiting for another sweep"
        return []


def _at_start(event: dict[str, Any]) -> list[str]:
    lines = []
    if event["known"]:
        lines.append(f"{event['known']:,} measurements are there already")
    if event["forgotten"]:
        again = f"{event['forgotten']:,} measured again: only faults of the machine"
        lines.append(f"{again} were recorded of them")
    if event["skipped"]:
        lines.append(f"{event['skipped']:,} left out: known to fail (--retry-failed)")
    return lines


@contextmanager
def progress_bar() -> Iterator[Emit]:
    """A bar with rate, time left and failures by kind, on stderr; lines where that is a log.

    It leaves nothing behind until the sweep has started: a refusal stands alone there.
    """
    events = _Events()
    if err.is_terminal:
        with _bar(events) as update:
            yield update
        return
    with telling("starting") as tell:

        def log(event: dict[str, Any]) -> None:
            for line in events.take(event):
                err.print(line)
            tell(str(events))

        yield log


@contextmanager
def _bar(events: _Events) -> Iterator[Emit]:
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
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None, rate="", failures="")

        def update(event: dict[str, Any]) -> None:
            for line in events.take(event):
                err.print(line)
            if event["event"] == "start":
                bar.live.transient = False
                bar.reset(task, total=events.total)
            bar.update(
                task,
                completed=events.done,
                description=events.doing,
                rate=f"{bar.tasks[0].speed or 0:.1f}/s" if events.done else "",
                failures=events.failures,
            )

        yield update
