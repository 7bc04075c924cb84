"""Workers that share a device: they prepare together, and whoever measures is alone."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewise.sweep.turns import Turns

PATIENCE_S = 60.0


class Worker:
    """One of those who share, waiting in a thread of its own."""

    def __init__(self) -> None:
        self.turns = Turns("gpu")
        self.said: list[str] = []
        self.waits = threading.Event()
        self.has_it = threading.Event()

    def say(self, event: str) -> None:
        self.said.append(event)
        if event == "waiting":
            self.waits.set()

    def ask(self, what: Callable[[Callable[[str], None]], None]) -> None:
        def take() -> None:
            what(self.say)
            self.has_it.set()

        self.waits.clear()
        self.has_it.clear()
        threading.Thread(target=take, daemon=True).start()

    def gets(self) -> bool:
        return self.has_it.wait(PATIENCE_S)

    def must_wait(self) -> bool:
        return self.waits.wait(PATIENCE_S) and not self.has_it.is_set()


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, Worker, Worker]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Worker(), Worker(), Worker()


def test_all_prepare_at_once_and_one_measures(workers: tuple[Worker, Worker, Worker]) -> None:
    first, second, third = workers
    for worker in workers:
        worker.turns.prepare(worker.say)
    assert not any(worker.said for worker in workers)
    first.ask(first.turns.measure)
    assert first.must_wait()  # for those who prepare
    second.turns.end()
    third.ask(third.turns.measure)
    while not (first.has_it.is_set() or third.has_it.is_set()):
        time.sleep(0.01)
    holder, other = (first, third) if first.has_it.is_set() else (third, first)
    assert other.must_wait()
    holder.turns.rest()
    assert other.gets()  # whose turn comes between two kernels of the holder's


def test_who_can_measure_does_so_before_anybody_prepares(
    workers: tuple[Worker, Worker, Worker],
) -> None:
    first, second, _ = workers
    first.turns.measure(first.say)
    second.ask(second.turns.prepare)
    assert second.must_wait()
    first.turns.rest()
    first.turns.measure(first.say)  # its next kernel: nobody came between
    assert not second.has_it.is_set() and not first.said
    first.turns.end()
    assert second.gets()
    assert second.said[-1] == "preparing"  # its time counts again
    first.ask(first.turns.measure)
    assert first.must_wait()
    second.turns.measure(second.say)  # who prepared goes on to measure
    second.turns.end()
    assert first.gets()
