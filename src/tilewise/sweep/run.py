"""The sweep itself: hands out problems, keeps results, stops when asked, and resumes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement, Policy
from tilewise.core.problem import Problem
from tilewise.data.journal import LockedFile, read_journal
from tilewise.data.schema import from_table
from tilewise.data.store import Store, Writer, new_run_id, read_shard
from tilewise.errors import InputError, MachineError
from tilewise.ops.contract import WhyUnusable
from tilewise.sweep.compiling import Upcoming
from tilewise.sweep.known import Known
from tilewise.sweep.local import Executor
from tilewise.sweep.plan import Assignment, Pick, Rivals, SweepPlan, leaders, make_plan
from tilewise.sweep.recording import Recording

Emit = Callable[[dict[str, Any]], None]
Kernels = Sequence[Kernel] | Callable[[Arch], Sequence[Kernel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a sweep goes about its work; none of it changes what a measurement means."""

    budget_s: float = 0.0
    """Stop after this long; 0 for no limit."""
    retry_failed: bool = False
    give_up_after: int = 3
    """A kernel that cost this many workers and never succeeded is left out; 0 for never."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a sweep did."""

    run_id: str = ""
    device: str = ""
    rows: int = 0
    known: int = 0
    """Pairs that were in the store before."""
    forgotten: int = 0
    """Pairs measured again, for what was kept of them tells of the machine."""
    skipped: int = 0
    """Pairs left out because the kernel is known to be bad."""
    remaining: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    workers_lost: int = 0
    seconds: float = 0.0
    measuring_s: float = 0.0
    """Time that a kernel was on the device, its check included."""
    stopped: str = ""
    """Empty when all was done; otherwise `budget` or `interrupted`."""

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "by_status": dict(self.by_status)}


def sweep(
    store_path: Path | str,
    problems: Sequence[Problem],
    kernels: Kernels,
    executor: Executor,
    policy: Policy,
    *,
    options: Options | None = None,
    labels: Sequence[str] = (),
    why_unusable: WhyUnusable | None = None,
    rivals: Rivals | None = None,
    pick: Pick | None = None,
    known: Sequence[Store] = (),
    on_event: Emit = lambda event: None,
) -> Summary:
    """Measures every legal kernel on every problem that the store does not know yet.

    `rivals` are measured among a problem's leaders, in turn with them, however slow they are.
    `pick` says which kernels are measured on a problem, and in what order, in place of legality.
    What stores `known` besides hold is not measured again.
    Interrupt it in any way: what was measured is in the store, and the next call does the rest.
    """
    began = time.monotonic()
    options = options or Options()
    if Path(store_path).exists():
        Store(store_path)  # what is wrong with it is raised now, before workers start
    if executor.config.replay and why_unusable is None:
        tape = executor.config
        recording = Recording.load(tape.replay, arch=tape.arch, policy=tape.policy.key)
        why_unusable = recording.why_unusable
    with closing(executor):
        device = executor.start()
        chosen = kernels(device.arch) if callable(kernels) else kernels
        plan = make_plan(
            *(problems, chosen, device, policy),
            labels=labels,
            retry_failed=options.retry_failed,
            why_unusable=why_unusable,
            rivals=rivals,
            pick=pick,
        )
        if plan.is_empty:
            raise InputError(plan.why_empty())
        store = Store(store_path, create=True)  # not before: a refused sweep leaves none behind
        with store.writer(new_run_id()) as writer:
            run = _Run(plan, store, writer, options, on_event, began, known)
            run.summary.device = device.name
            return run.go(executor)


class _Run:
    """One run over one plan."""

    def __init__(
        self,
        plan: SweepPlan,
        store: Store,
        writer: Writer,
        options: Options,
        on_event: Emit,
        began: float,
        known: Sequence[Store],
    ) -> None:
        self.plan = plan
        self.store = store
        self.writer = writer
        self.options = options
        self.emit = on_event
        self.began = began
        self.summary = Summary(run_id=writer.run_id)
        self._read: dict[str, int] = {}
        """How much of each file of other runs is known, by name."""
        self._grown()  # before the reading: what is added meanwhile is looked at again
        stores = (store, *known)
        self.known = Known(stores, plan.settings, give_up_after=options.give_up_after)
        self._claims: dict[int, LockedFile] = {}
        self._queue: deque[int] = deque()
        self._todo: dict[int, int] = {}
        """Pairs left to measure of each problem in the queue, as last seen."""
        self._needed: dict[int, None] = {}
        """Kernels that are left to measure on any problem, in the order of their turn."""
        self._upcoming: list[Upcoming] = []
        self._is_waiting = False

    def go(self, executor: Executor) -> Summary:
        total = self._survey()
        arch = self.plan.arch
        self.emit(
            {
                "event": "start",
                "run_id": self.writer.run_id,
                "arch": arch.name,
                "device": self.summary.device,
                "problems": len(self.plan.problems),
                "kernels": len(self.plan.kernels),
                "total": total,
                "known": self.summary.known,
                "skipped": self.summary.skipped,
                "forgotten": self.summary.forgotten,
                "startup_s": time.monotonic() - self.began,
            }
        )
        keys, values = self.plan.kernel_keys, self.plan.kernel_fields
        built = [(keys[at], values[at]) for at in self._needed]
        self.summary.remaining = total
        try:
            for work, group in executor.run(self._next, built, arch, self._upcoming):
                if work is not None:
                    self._take(work, group)
                for notice in executor.notices():
                    self.summary.workers_lost += notice["event"] == "worker_lost"
                    self.emit(notice)
                if self._is_over():
                    self.summary.stopped = "budget"
                    break
        except KeyboardInterrupt:
            self.summary.stopped = "interrupted"
        except MachineError as error:
            raise MachineError(
                f"the sweep stopped at a fault of the machine, which is no kernel's: {error}; "
                "what was measured is kept: fix it, then run the same command"
            ) from None
        finally:
            for claim in self._claims.values():
                claim.remove()
            self._claims.clear()
        self.summary.seconds = time.monotonic() - self.began
        self.emit({"event": "end", **self.summary.to_dict()})
        return self.summary

    def _survey(self) -> int:
        """Queues the problems with something left to do; returns how many pairs that is."""
        total = 0
        for index in range(len(self.plan.problems)):
            work = self.plan.work(index, self.known)
            total += len(work.task.todo)
            self._needed.update(dict.fromkeys(work.task.todo))
            self.summary.skipped += work.skipped
            self.summary.known += len(work.attempts) - sum(
                at in work.attempts for at in work.task.todo
            )
            self.summary.forgotten += work.forgotten
            if self._is_needed(work):
                self._queue.append(index)
                self._todo[index] = len(work.task.todo)
                self._upcoming.append(work.task.upcoming)
        return total

    def _is_needed(self, work: Assignment) -> bool:
        best = leaders(work.task.prior, self.plan.policy, work.task.rivals)
        return bool(work.task.todo) or any(at not in work.task.confirmed for at in best)

    def _next(self) -> Assignment | None:
        """The next problem that no other sweep is at; None while all that is left is claimed."""
        for _ in range(len(self._queue)):
            index = self._queue.popleft()
            claim = self.store.claim(self._claim_name(index))
            if claim is None:
                self._queue.append(index)
                continue
            self._learn_from_others()
            work = self.plan.work(index, self.known)
            # Less than there was: another sweep has measured some, or a kernel was given up.
            self.summary.remaining -= self._todo.pop(index) - len(work.task.todo)
            if self._is_needed(work):
                self._claims[index] = claim
                return work
            claim.remove()
        if not self._queue:
            raise StopIteration
        if not self._is_waiting:
            self._is_waiting = True
            self.emit({"event": "waiting", "problems": len(self._queue)})
        return None

    def _claim_name(self, index: int) -> str:
        """By problem alone: sweeps with other kernels may have some in common with this one."""
        return self.plan.problems[index].key[:32]

    def _take(self, work: Assignment, group: list[dict[str, Any]] | None) -> None:
        if group is None:
            self._claims.pop(work.index).remove()
            self.emit({"event": "problem_done", "problem": work.task.problem})
            return
        from tilewise import __version__

        now = time.time()
        busy = sum(result.get("busy_s", 0.0) for result in group)
        rows = [
            self.plan.row(work, {**result, "measured_at": now}, self.writer.run_id, __version__)
            for result in group
        ]
        self.writer.append(rows)
        self.summary.measuring_s += busy
        for row in rows:
            self.summary.rows += 1
            self.summary.by_status[row.status] += 1
            self.summary.remaining -= row.stage != "leader"
            self.known.learn(row, keep=False)
            self.emit(
                {
                    "event": "row",
                    "problem": work.task.problem,
                    "kernel": row.kernel,
                    "stage": row.stage,
                    "status": row.status,
                    "message": row.message,
                    "time_us": row.time_us,
                    "tflops": row.tflops,
                    "remaining": self.summary.remaining,
                }
            )

    def _is_over(self) -> bool:
        budget = self.options.budget_s
        return budget > 0 and time.monotonic() - self.began >= budget

    def _grown(self) -> list[tuple[Path, int]]:
        """Files of other runs that have grown, and where the part that was read ends."""
        try:
            files = [*self.store.journals(), *self.store.shards()]
            sizes = {f: f.stat().st_size for f in files if not self.writer.owns(f)}
        except FileNotFoundError:  # folded since it was listed: its shard is listed now
            return self._grown()
        found = [(f, self._read.get(f.name, 0)) for f in sizes]
        self._read |= {f.name: size for f, size in sizes.items() if f.suffix == ".parquet"}
        return [(f, before) for f, before in found if sizes[f] > before]

    def _learn_from_others(self) -> None:
        """Takes in what other sweeps have stored since this one looked last."""
        while [f for f, before in self._grown() if not self._learn_from(f, before)]:
            pass  # some were folded under our eyes: once more, with their shards

    def _learn_from(self, file: Path, before: int) -> bool:
        """Takes in what was added to a file; False where it was folded: its shard is there now."""
        if file.suffix == ".parquet":
            rows: Iterable[Measurement] = from_table(read_shard(file))
        else:
            try:
                contents = read_journal(file, before)
            except FileNotFoundError:
                return False
            self._read[file.name] = contents.end
            rows = contents.rows
        for row in rows:
            self.known.learn(row, keep=True)
        return True
