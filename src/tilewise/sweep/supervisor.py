"""Keeps one worker at work: times, kills and replaces it, and blames the kernel that did it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core.faults import ATTEMPTS
from tilewise.errors import ExecutionError, MachineError
from tilewise.sweep.process import KILLED, WorkerGoneError, WorkerProcess

Item = Mapping[str, Any]
"""One kernel of a batch: `id` and `kernel`."""
Result = dict[str, Any]
"""What became of an item: `id`, `status`, `message` and the numbers."""

WAIT_S = 86_400.0
"""Another sweep may hold the device for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a worker may take, and how much it is handed at once."""

    timeout_s: float = 5.0
    """For one kernel, from its first launch to its last."""
    prepare_s: float = 300.0
    """For loading a kernel and, once per problem, making inputs and the reference."""
    batch: int = 20


class Supervisor:
    """Runs items on a worker of its own; every item gets exactly one result."""

    def __init__(
        self,
        spawn: Callable[[], WorkerProcess],
        limits: Limits,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        *,
        is_replay: bool = False,
    ) -> None:
        self._spawn = spawn
        self._limits = limits
        self._on_event = on_event
        self._is_replay = is_replay
        self._worker: WorkerProcess | None = None
        self._is_closed = False
        self._faults = 0
        """Faults of the machine since the last result."""

    def start(self) -> dict[str, Any]:
        """Starts the worker; returns what it says about its device."""
        if self._is_closed:
            raise ExecutionError("the sweep was stopped")
        for attempt in range(ATTEMPTS):
            self._worker = self._spawn()
            if self._is_closed:  # by another thread, too late for it to see this worker
                self._worker.signal_kill()
            try:
                return self._worker.wait_ready()
            except ExecutionError:
                self._discard()
                if attempt == ATTEMPTS - 1 or self._is_closed:
                    raise
        raise AssertionError("unreachable")

    def run(self, problem: Mapping[str, Any], items: Sequence[Item]) -> Iterator[Result]:
        """Measures items batch by batch, in the order given."""
        left = list(items)
        while left:
            worker = self._ready()
            batch = left[: self._limits.batch]
            worker.send({"do": "batch", "problem": problem, "items": batch})
            for result in self._answers(worker, batch):
                left.remove(next(item for item in left if item["id"] == result["id"]))
                yield result

    def run_in_turn(self, problem: Mapping[str, Any], items: Sequence[Item]) -> list[Result]:
        """Measures items interleaved in one worker, each of which has run well before.

        One that fails there is tried alone in a fresh worker. If it fails again it is left out
        and the rest start over; if not, they do not get on, and each is measured alone.
        """
        left = list(items)
        failed: list[Result] = []
        while left:
            found, suspect = self._together(problem, left)
            if suspect is None:
                return failed + found
            alone = self._alone(problem, suspect)
            if alone["status"] == "ok":
                others = [item for item in left if item is not suspect]
                return [*failed, alone, *(self._alone(problem, item) for item in others)]
            failed.append(alone)
            left.remove(suspect)
        return failed

    def _together(
        self, problem: Mapping[str, Any], items: Sequence[Item]
    ) -> tuple[list[Result], Item | None]:
        """The results of items measured in turn, or none and the one that seems to have failed."""
        found: list[Result] = []
        faults = -1
        while faults != self._faults:  # again where it was the machine's fault
            worker, faults = self._ready(), self._faults
            worker.send({"do": "leaders", "problem": problem, "items": items})
            found = list(self._answers(worker, items, in_turn=True))
        if len(found) == len(items) and all(r["status"] == "ok" for r in found):
            return found, None
        bad = next((r["id"] for r in found if r["status"] != "ok"), items[0]["id"])
        return [], next(item for item in items if item["id"] == bad)

    def _alone(self, problem: Mapping[str, Any], item: Item) -> Result:
        """The result of one item in a worker of its own, for which nobody else can be blamed."""
        self._discard()
        (result,) = self.run(problem, [item])
        return result

    def _ready(self) -> WorkerProcess:
        if self._worker is None:
            self.start()
        assert self._worker is not None
        return self._worker

    def _answers(
        self, worker: WorkerProcess, batch: Sequence[Item], *, in_turn: bool = False
    ) -> Iterator[Result]:
        """Results until the batch ends or the worker does; a lost worker is discarded.

        A worker that was not fresh for the kernel it dies, hangs or fails under may have been
        spoilt by an earlier one. Then nobody is blamed: the kernel comes first in the next batch,
        on a fresh worker. Nor is anybody for a fault of the machine, which may pass.
        """
        current, phase = None, "start"
        deadline = time.monotonic() + self._limits.prepare_s
        while True:
            try:
                answer = worker.receive(deadline)
            except (TimeoutError, WorkerGoneError) as loss:
                can_tell = in_turn or worker.items_run <= 1
                status, message = self._lost(worker, phase, isinstance(loss, TimeoutError))
                if status == KILLED:
                    return self._fault(message)
                if current is None and worker.items_run == 0:
                    current = batch[0]["id"]  # it cannot even be taken: do not try for ever
                if current is not None and can_tell:
                    self._faults = 0
                    yield {"id": current, "status": status, "message": message}
                return None
            event = phase = answer.pop("event")
            if event == "end":
                return None
            if event == "fault":
                self._discard()
                return self._fault(answer["message"])
            deadline = time.monotonic() + self._allowed(event)
            current = answer["id"] if event != "result" else None
            worker.items_run += event == "prepare"
            if event != "result":
                continue
            is_poisoned = answer.pop("is_poisoned", False)
            is_doubtful = not in_turn and self._is_doubtful(worker, answer["status"], is_poisoned)
            worker.has_succeeded |= answer["status"] == "ok"
            if is_poisoned or is_doubtful:
                words = {"status": "poisoned", "message": answer.get("message", "")}
                self._on_event({"event": "worker_lost", **words})
                self._discard()
            if not is_doubtful:
                self._faults = 0
                yield answer
            if is_poisoned or is_doubtful:
                return None

    def _fault(self, words: str) -> None:
        """Counts a fault of the machine; raises where one follows another."""
        self._faults += 1
        if self._faults >= ATTEMPTS:
            raise MachineError(words)

    def _is_doubtful(self, worker: WorkerProcess, status: str, is_poisoned: bool) -> bool:
        """Whether an earlier kernel may be to blame for a failure; a recorded one is settled.

        Memory counts only where something fitted before: a problem that is too large would
        otherwise cost every kernel a worker.
        """
        is_full = status == "out_of_memory" and worker.has_succeeded
        is_spoilt = is_poisoned and worker.items_run > 1
        return (is_spoilt or is_full) and not self._is_replay

    def _allowed(self, phase: str) -> float:
        """Seconds until the next answer is due."""
        others = {"launch": self._limits.timeout_s, "waiting": WAIT_S}
        return others.get(phase, self._limits.prepare_s)

    def _lost(self, worker: WorkerProcess, phase: str, is_late: bool) -> tuple[str, str]:
        """What to say about a worker that hangs or is gone; it is discarded."""
        if is_late:
            allowed = self._allowed(phase)
            doing = "running" if phase == "launch" else "preparing"
            status = "timeout"
            message = f"still {doing} after {allowed:g} s; the worker was killed"
        else:
            status, message = worker.ending()
        self._discard()
        if self._is_closed:
            raise ExecutionError("the sweep was stopped")
        self._on_event({"event": "worker_lost", "status": status, "message": message})
        return status, message

    def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def stop(self) -> None:
        """Kills the worker from another thread; the one here sees it end."""
        self._is_closed = True
        worker = self._worker
        if worker is not None:
            worker.signal_kill()

    def close(self) -> None:
        """Ends the worker."""
        self._is_closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
