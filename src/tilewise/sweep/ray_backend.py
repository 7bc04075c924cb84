"""Runs a sweep over a Ray cluster: one actor per GPU or CPU slot, each with a crew of its own.

The driver hands out problems and writes the store; actors supervise workers on their nodes, so a
kernel that hangs or crashes is dealt with there. An actor that is lost with its node costs
nothing but time: what it had not reported yet is measured by another.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.core.arch import Arch
from tilewise.errors import ExecutionError, InputError, TilewiseError, why_missing
from tilewise.sweep.compiling import Upcoming
from tilewise.sweep.crew import Crew, WorkerConfig
from tilewise.sweep.device_info import DeviceInfo
from tilewise.sweep.local import TICK_S, Executor, Step, check_workers
from tilewise.sweep.plan import Assignment, Task
from tilewise.sweep.supervisor import Result

MOST_LOSSES = 5
"""A problem that loses this many actors is not worth another node."""
PATIENCE_S = 600.0
"""How long a cluster without a single slot at work is waited for; it may be growing."""
AHEAD = 2
"""Problems set aside for each slot of a GPU, to be compiled for there while it measures another.

More would keep from it what is learned meanwhile about bad kernels.
"""


class Slot:
    """The actor: a crew on some node of the cluster."""

    def __init__(self, config: WorkerConfig) -> None:
        self._notices: list[dict[str, Any]] = []
        self._crew = Crew(config, self._notices.append)

    def start(self) -> dict[str, Any]:
        """Starts the worker; returns what it says about its device."""
        return self._crew.start().to_dict()

    def run(
        self,
        task: Task,
        arch: dict[str, Any],
        kernels: Sequence[tuple[str, Any]] = (),
        ahead: Sequence[Upcoming] = (),
    ) -> Iterator[tuple[list[Result], list[Any]]]:
        """Groups of results as they come, with what happened meanwhile.

        All `kernels` are compiled on the cores of this node from the first task on, then for the
        problems `ahead`, which come next to this slot.
        """
        live = Arch.from_dict(arch)
        builder = self._crew.builder or self._crew.make_builder(live)
        if kernels:
            builder.request(kernels)
            builder.prepare(ahead)
        for group in self._crew.run(task, live):
            notices, self._notices[:] = list(self._notices), []
            yield group, notices


@dataclass(slots=True)
class _Hand:
    """An actor as the driver sees it."""

    actor: Any
    pending: Any
    """What is waited for: its start, or the stream of its results."""
    work: Assignment | None = None
    ahead: deque[Assignment] = field(default_factory=deque)
    """Set aside for it; it has been sent their problems."""


class RayExecutor(Executor):
    """Slots of a Ray cluster; without an address, of a cluster started here."""

    def __init__(self, config: WorkerConfig, *, workers: int = 0, address: str = "") -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise InputError(f"--on ray: {why_missing(error) or error}") from None
        check_workers(workers)
        self._ray: Any = ray
        self.config = config
        self._workers = workers
        self._address = address
        self._owns_cluster = False
        self._hands: list[_Hand] = []
        self._first: _Hand | None = None
        self._device: DeviceInfo | None = None
        self._next_work: Callable[[], Assignment | None] | None = None
        self._retries: deque[Assignment] = deque()
        self._losses: Counter[int] = Counter()
        self._notices: deque[dict[str, Any]] = deque()

    def start(self) -> DeviceInfo:
        ray = self._ray
        if not ray.is_initialized():
            self._owns_cluster = True
            self._check_address()
            place = {"address": self._address} if self._address else {"include_dashboard": False}
            try:
                ray.init(**place, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = f"at --address {self._address}" if self._address else "on this machine"
                raise InputError(f"Ray does not start {where}: {error}") from None
        self._first = self._hire()
        failure = "no worker could be started on the cluster"
        try:
            self._device = DeviceInfo.from_dict(ray.get(self._first.pending, timeout=PATIENCE_S))
        except ray.exceptions.GetTimeoutError:
            raise ExecutionError(self._why_idle()) from None
        except ray.exceptions.RayTaskError as error:
            known = isinstance(error.cause, TilewiseError)
            raise (error.cause if known else ExecutionError(f"{failure}: {error.cause}")) from None
        except ray.exceptions.RayError as error:
            raise ExecutionError(f"{failure}: {error}") from None
        return self._device

    def _check_address(self) -> None:
        """Ray itself tries for minutes before it says that nobody answers."""
        host, colon, port = self._address.rpartition(":")
        if not colon or not port.isdecimal() or "/" in host:
            return  # `auto`, or a Ray client's address
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise InputError(
                f"no Ray cluster answers at --address {self._address}: {error}"
            ) from None

    def _hire(self) -> _Hand:
        need = {"num_gpus": 1} if self.config.kind == "gpu" else {"num_cpus": 1}
        actor = self._ray.remote(**need, max_restarts=0)(Slot).remote(self.config)
        return _Hand(actor, actor.start.remote())

    def _why_idle(self) -> str:
        needed = "GPU" if self.config.kind == "gpu" else "CPU"
        there = self._ray.cluster_resources().get(needed, 0)
        return (
            f"no slot of the cluster can go on: a task needs one {needed} of the device that the "
            f"sweep started on, and the cluster has {there:g} {needed}s, all busy, gone or "
            "different; what was measured is kept, run the same command when it has one"
        )

    def _slots(self) -> int:
        if self._workers:
            return self._workers
        kind = "GPU" if self.config.kind == "gpu" else "CPU"
        return max(1, int(self._ray.cluster_resources().get(kind, 1)))

    def run(
        self,
        next_work: Callable[[], Assignment | None],
        kernels: Sequence[tuple[str, Any]],
        arch: Arch,
        problems: Sequence[Upcoming] = (),
    ) -> Iterator[Step]:
        assert self._first is not None
        self._first.pending = None
        self._hands = [self._first, *(self._hire() for _ in range(self._slots() - 1))]
        self._next_work = next_work
        is_ahead = arch.kind == "gpu" and not self.config.replay
        # On a CPU nothing is compiled while something is measured.
        shared = (arch.to_dict(), self._ray.put(list(kernels)) if is_ahead else ())
        served = time.monotonic()
        while self._is_unfinished():
            if any(hand.work or hand.pending is None for hand in self._hands):
                served = time.monotonic()
            if not self._hands or time.monotonic() - served > PATIENCE_S:
                raise ExecutionError(self._why_idle())
            for hand in self._hands:
                if hand.pending is None:
                    self._hand_out(hand, shared, AHEAD if is_ahead else 0)
            yield from self._gather()

    def _is_unfinished(self) -> bool:
        at_work = any(hand.work or hand.ahead for hand in self._hands)
        return bool(self._next_work or self._retries or at_work)

    def _hand_out(self, hand: _Hand, shared: tuple[Any, ...], ahead: int) -> None:
        """Gives a free actor its next work, and tells it the problems that come after."""
        work = hand.ahead.popleft() if hand.ahead else self._take() or self._steal()
        if work is None:
            return
        upcoming = []
        while len(hand.ahead) < ahead and (later := self._take()) is not None:
            hand.ahead.append(later)
            upcoming.append(later.task.upcoming)
        hand.work = work
        stream = hand.actor.run.options(num_returns="streaming")
        hand.pending = stream.remote(work.task, *shared, upcoming)

    def _take(self) -> Assignment | None:
        """An assignment that nobody has; None where there is none just now."""
        if self._retries:
            return self._retries.popleft()
        try:
            return self._next_work() if self._next_work else None
        except StopIteration:
            self._next_work = None
            return None

    def _steal(self) -> Assignment | None:
        """What was set aside for another that is busy."""
        richest = max(self._hands, key=lambda hand: len(hand.ahead))
        return richest.ahead.pop() if richest.ahead else None

    def _gather(self) -> Iterator[Step]:
        """Whatever is ready; a tick where nothing is."""
        waiting = [hand.pending for hand in self._hands if hand.pending is not None]
        if not waiting:
            time.sleep(TICK_S)
            yield None, None
            return
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=TICK_S, fetch_local=False)
        if not ready:
            yield None, None
        for hand in [h for h in self._hands if any(h.pending is r for r in ready)]:
            yield from self._hear(hand)

    def _hear(self, hand: _Hand) -> Iterator[Step]:
        ray, work = self._ray, hand.work
        try:
            if work is None:
                self._welcome(hand, DeviceInfo.from_dict(ray.get(hand.pending)))
                return
            group, notices = ray.get(next(hand.pending))
        except StopIteration:
            hand.work, hand.pending = None, None
            yield work, None
            return
        except ray.exceptions.RayTaskError as error:
            if work is not None:
                raise ExecutionError(f"a worker on the cluster failed: {error.cause}") from None
            self._refuse(hand, f"a worker did not start: {error.cause}")
            return
        except ray.exceptions.RayError as error:
            self._replace(hand, error)
            return
        self._notices.extend(notices)
        hand.work = without(work, group)
        yield work, group

    def _welcome(self, hand: _Hand, device: DeviceInfo) -> None:
        assert self._device is not None
        hand.pending = None
        if (device.name, device.toolchains) != (self._device.name, self._device.toolchains):
            why = f"{device.name} differs from {self._device.name}; sweep it on its own"
            self._refuse(hand, why)

    def _refuse(self, hand: _Hand, why: str) -> None:
        """One node that cannot take part does not end the sweep of the others."""
        self._hands.remove(hand)
        with suppress(Exception):
            self._ray.kill(hand.actor)
        self._notices.append({"event": "slot_refused", "message": why})

    def _replace(self, hand: _Hand, error: Exception) -> None:
        """Another actor takes the place of a lost one; its work goes back to the queue."""
        self._notices.append({"event": "node_lost", "message": str(error).partition("\n")[0]})
        self._hands.remove(hand)
        with suppress(Exception):
            self._ray.kill(hand.actor)
        if hand.work is not None:
            self._losses[hand.work.index] += 1
            if self._losses[hand.work.index] >= MOST_LOSSES:
                raise ExecutionError(f"{MOST_LOSSES} actors were lost on one problem: {error}")
            self._retries.append(hand.work)
        self._retries.extend(hand.ahead)
        self._hands.append(self._hire())

    def notices(self) -> Iterator[dict[str, Any]]:
        while self._notices:
            yield self._notices.popleft()

    def close(self) -> None:
        for hand in self._hands or ([self._first] if self._first else []):
            with suppress(Exception):
                self._ray.kill(hand.actor)
        self._hands = []
        if self._owns_cluster:
            self._ray.shutdown()


def without(work: Assignment, group: list[Result]) -> Assignment:
    """The work less what a group of results has settled."""
    task = work.task
    settled = {result["id"] for result in group if result["stage"] == "first"}
    times = {
        r["id"]: (r["time_us"], r["spread_us"])
        for r in group
        if r["stage"] == "first" and r["status"] == "ok"
    }
    confirmed = {result["id"] for result in group if result["stage"] == "leader"}
    return replace(
        work,
        task=replace(
            task,
            todo=tuple(at for at in task.todo if at not in settled),
            prior={**task.prior, **times},
            confirmed=task.confirmed | confirmed,
        ),
        attempts={**work.attempts, **{at: work.attempts.get(at, 0) + 1 for at in settled}},
    )
