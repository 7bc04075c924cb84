"""Runs a sweep on this machine: one supervised worker per slot, each in a thread that waits."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tilewise.core.arch import Arch
from tilewise.errors import InputError
from tilewise.sweep.compiling import Upcoming
from tilewise.sweep.crew import Crew, WorkerConfig
from tilewise.sweep.device_info import DeviceInfo
from tilewise.sweep.plan import Assignment
from tilewise.sweep.supervisor import Result

TICK_S = 0.2
MOST_WORKERS = 4096

Step = tuple[Assignment | None, list[Result] | None]
"""An assignment with a group of its results; with None when done; none at all for a tick."""


class Executor(ABC):
    """Where tasks run."""

    config: WorkerConfig

    @abstractmethod
    def start(self) -> DeviceInfo:
        """Starts the first worker; returns what it says about its device."""

    @abstractmethod
    def run(
        self,
        next_work: Callable[[], Assignment | None],
        kernels: Sequence[tuple[str, Any]],
        arch: Arch,
        problems: Sequence[Upcoming] = (),
    ) -> Iterator[Step]:
        """Results as they come; ends when `next_work` raises StopIteration and all is done.

        `next_work` gives None where there is nothing to do just now. `kernels` will be needed
        sooner or later, for `problems` in about this order; they are compiled ahead where that
        disturbs no measurement.
        """

    @abstractmethod
    def notices(self) -> Iterator[dict[str, Any]]:
        """What workers and builders had to say since last asked."""

    @abstractmethod
    def close(self) -> None:
        """Stops everything at once; what was not reported yet is lost."""


def check_workers(workers: int) -> None:
    """Raises on more workers than any machine or cluster has devices for."""
    if workers > MOST_WORKERS:
        raise InputError(
            f"--workers is {workers}; give at most {MOST_WORKERS}, or 0 for the default"
        )


class LocalExecutor(Executor):
    """Workers of this machine; on a GPU machine one per GPU."""

    def __init__(
        self, config: WorkerConfig, *, workers: int = 1, gpus: Sequence[Mapping[str, str]] = ()
    ) -> None:
        check_workers(workers)
        self.config = config
        self._events: queue.SimpleQueue[tuple[int, Assignment | None, Any]] = queue.SimpleQueue()
        self._notices: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        pinned = gpus or [{}]
        self._crews = [
            Crew(config, self._notices.put, **pinned[slot % len(pinned)])
            for slot in range(max(1, workers))
        ]
        self._orders: list[queue.SimpleQueue[Assignment | None]] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> DeviceInfo:
        return self._crews[0].start()

    def notices(self) -> Iterator[dict[str, Any]]:
        while not self._notices.empty():
            yield self._notices.get()

    def run(
        self,
        next_work: Callable[[], Assignment | None],
        kernels: Sequence[tuple[str, Any]],
        arch: Arch,
        problems: Sequence[Upcoming] = (),
    ) -> Iterator[Step]:
        builder = self._crews[0].make_builder(arch)
        if arch.kind == "gpu" and not self.config.replay:
            builder.request(kernels)
            builder.prepare(problems)
        for slot, crew in enumerate(self._crews):
            crew.builder = builder
            self._orders.append(queue.SimpleQueue())
            thread = threading.Thread(target=self._serve, args=(slot, arch), daemon=True)
            self._threads.append(thread)
            thread.start()
        free = list(range(len(self._crews)))
        has_more = True
        while has_more or len(free) < len(self._crews):
            while free and has_more:
                try:
                    work = next_work()
                except StopIteration:
                    has_more = False
                    break
                if work is None:
                    break
                self._orders[free.pop()].put(work)
            try:
                slot, done, group = self._events.get(timeout=TICK_S)
            except queue.Empty:
                yield None, None
                continue
            if isinstance(group, Exception):
                raise group
            if group is None:
                free.append(slot)
            yield done, group

    def _serve(self, slot: int, arch: Arch) -> None:
        crew = self._crews[slot]
        while (work := self._orders[slot].get()) is not None:
            try:
                for group in crew.run(work.task, arch):
                    self._events.put((slot, work, group))
            except Exception as failure:  # raised again in the thread of the sweep
                self._events.put((slot, work, failure))
                return
            self._events.put((slot, work, None))

    def close(self) -> None:
        for crew in self._crews:
            crew.stop()
        for order in self._orders:
            order.put(None)
        for thread in self._threads:
            thread.join(timeout=30)
        for crew in self._crews:
            crew.close()
