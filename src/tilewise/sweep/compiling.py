"""Compiles kernels ahead of their measurement, in a process of its own.

Compilers crash and hang too. What they take down is the builder process; the kernels that were
under way are then built one at a time, and the one that does it again is recorded as the culprit.
A fault of the machine is nobody's: the builder has as many attempts as workers, then all ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tilewise.core.faults import ATTEMPTS
from tilewise.errors import ExecutionError, MachineError
from tilewise.sweep.process import KILLED, WorkerGoneError, WorkerProcess
from tilewise.sweep.supervisor import WAIT_S

BUILD_S = 600.0
"""For one kernel; the compiler's own limit comes first."""

AHEAD = 100
"""Problems that are compiled for at once: enough to share the start of the compilers."""

Upcoming = tuple[Mapping[str, Any], Sequence[str]]
"""A problem and the keys of the kernels that will be measured on it."""
Facts = dict[str, Any]
"""What became of a kernel: `status`, `message`, `compile_s` and the resources it needs."""


class Builder:
    """Builds by kernel key. Requests are served in order by one thread; waiting is for results."""

    def __init__(
        self,
        spawn: Callable[[], WorkerProcess],
        arch: Mapping[str, Any],
        *,
        jobs: int = 0,
        on_built: Callable[[Facts], None] = lambda facts: None,
        on_lost: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._spawn = spawn
        self._arch = arch
        self._jobs = jobs
        self._on_built = on_built
        self._on_lost = on_lost
        self._process: WorkerProcess | None = None
        self._facts: dict[str, Facts] = {}
        self._queue: dict[str, Mapping[str, Any]] = {}
        self._known: set[str] = set()
        self._ahead: deque[Sequence[Upcoming]] = deque()
        self._kernels: dict[str, Mapping[str, Any]] = {}
        """What has been built, by key."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def request(self, kernels: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Asks for kernels, given as key and fields; those asked for before are left alone."""
        with self._changed:
            for key, fields in kernels:
                if key not in self._known:
                    self._known.add(key)
                    self._queue[key] = fields
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def prepare(self, problems: Sequence[Upcoming]) -> None:
        """Has kernels compiled for the problems that they will be measured on, once all is built.

        Nobody waits for it: a worker compiles what it needs and does not find.
        """
        with self._changed:
            self._ahead.extend(problems[at : at + AHEAD] for at in range(0, len(problems), AHEAD))
            self._changed.notify_all()

    def wait(self, kernels: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Facts]:
        """What became of the kernels, once all of them are built."""
        self.request(kernels)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed or self._failure or all(k in self._facts for k, _ in kernels)
                )
            )
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise ExecutionError("the sweep was stopped")
            return {key: self._facts[key] for key, _ in kernels}

    def close(self) -> None:
        """Stops compiling."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        process = self._process
        if process is not None:
            process.signal_kill()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closed or self._queue or (self._ahead and self._kernels)
                    )
                    if self._is_closed:
                        return
                    order, self._queue = self._queue, {}
                if order:
                    self._build_all(order)
                    self._kernels |= {key: of for key, of in order.items() if self._is_built(key)}
                else:
                    self._compile_ahead(self._ahead.popleft())
        except Exception as failure:  # raised in the thread that waits
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
        finally:
            if self._process is not None:
                self._process.kill()

    def _is_built(self, key: str) -> bool:
        return self._facts.get(key, {}).get("status") == "ok"

    def _compile_ahead(self, problems: Sequence[Upcoming]) -> None:
        process = self._ready()
        needed = {key for _, keys in problems for key in keys if key in self._kernels}
        order = {
            "arch": self._arch,
            "kernels": {key: self._kernels[key] for key in needed},
            "problems": [(problem, [k for k in keys if k in needed]) for problem, keys in problems],
        }
        process.send({"do": "ahead", "jobs": self._jobs, **order})
        try:
            process.receive(time.monotonic() + BUILD_S)
            return
        except TimeoutError:
            words = f"it took over {BUILD_S:.0f} s"
            process.kill()
        except WorkerGoneError:
            words = process.ending()[1]
        self._process = None
        if not self._is_closed:  # measuring goes on, with whatever was compiled
            self._on_lost(f"compiling ahead for {len(problems)} problems was given up: {words}")

    def _ready(self) -> WorkerProcess:
        """The builder process, started where there is none."""
        if self._process is None:
            for attempt in range(ATTEMPTS):
                self._process = self._spawn()
                if self._is_closed:  # by another thread, too late for it to see this process
                    self._process.signal_kill()
                try:
                    self._process.wait_ready()
                    break
                except ExecutionError:
                    self._process.kill()
                    if attempt == ATTEMPTS - 1 or self._is_closed:
                        raise
        assert self._process is not None
        return self._process

    def _build_all(self, order: Mapping[str, Mapping[str, Any]]) -> None:
        if self._try(order) is None:
            return
        for key, fields in order.items():
            if key not in self._facts and not self._is_closed:
                words = self._try({key: fields})
                if words is not None and not self._is_closed:
                    self._keep(key, {"status": "compile_error", "message": words})

    def _try(self, order: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Builds what is not built yet; what to say of a kernel that took the builder down.

        A fault of the machine may pass, and raises where it does not.
        """
        words = ""
        for _ in range(ATTEMPTS):
            left = {key: fields for key, fields in order.items() if key not in self._facts}
            ending = self._build(left)
            if ending is None or self._is_closed:
                return None
            status, words = ending
            if status != KILLED:
                return words
            self._on_lost(f"the builder was lost: {words}")
        raise MachineError(words)

    def _build(self, order: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
        """Builds kernels in one process; how that ended where it did not live to the end."""
        process = self._ready()
        keys = list(order)
        items = [{"id": at, "kernel": order[key]} for at, key in enumerate(keys)]
        process.send({"do": "build", "arch": self._arch, "items": items, "jobs": self._jobs})
        allowed = BUILD_S
        while True:
            try:
                answer = process.receive(time.monotonic() + allowed)
            except TimeoutError:
                ending = "timeout", f"no kernel finished compiling in {BUILD_S:.0f} s"
                break
            except WorkerGoneError:
                ending = process.ending()
                break
            event = answer.pop("event")
            allowed = WAIT_S if event == "waiting" else BUILD_S
            if event == "end":
                return None
            if event == "fault":
                ending = KILLED, str(answer["message"])
                break
            if event == "built":
                self._keep(keys[answer.pop("id")], answer)
        process.kill()
        self._process = None
        return ending

    def _keep(self, key: str, facts: Facts) -> None:
        with self._changed:
            self._facts[key] = facts
            self._changed.notify_all()
        self._on_built(facts)
