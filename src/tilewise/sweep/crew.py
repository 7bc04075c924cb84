"""One slot of a sweep: a supervised worker and the builder behind it, given one task at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.measurement import Policy
from tilewise.engines.contract import Resources
from tilewise.engines.gpu.objects import over_limit
from tilewise.sweep.compiling import Builder, Facts
from tilewise.sweep.device_info import DeviceInfo
from tilewise.sweep.plan import Task, leaders
from tilewise.sweep.process import WorkerProcess
from tilewise.sweep.supervisor import Limits, Result, Supervisor

Emit = Callable[[dict[str, Any]], None]
MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The settings of every worker of a sweep: plain data that may travel to another machine."""

    engines: tuple[str, ...]
    policy: Policy
    kind: str = ""
    """`cpu` or `gpu`; empty for the best there is."""
    arch: str = ""
    """An architecture whose kernels the device must be able to run; empty for its own."""
    replay: str = ""
    """A store to replay in place of measuring: the rows under `policy`, on `arch` if given."""
    limits: Limits = field(default_factory=Limits)
    jobs: int = 0
    """Compilers at once; 0 for one per core."""
    memory_bytes: int = 0
    """What a worker on a CPU may allocate; 0 for most of what is free."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def spawn(self, role: str, **environment: str) -> WorkerProcess:
        """A new worker process."""
        import tilewise

        threads = self.policy.threads
        names = ("TILEWISE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        set_threads = dict.fromkeys(names, str(threads)) if threads and role == "measure" else {}
        package = str(Path(tilewise.__file__).parent.parent)
        return WorkerProcess(
            {
                "role": role,
                "kind": self.kind,
                "arch": self.arch,
                "engines": list(self.engines),
                "policy": self.policy.to_dict(),
                "replay": self.replay,
                "memory_bytes": 0 if self.replay else self.memory_bytes or _memory_limit(),
            },
            {**set_threads, **self.environment, **environment},
            package,
        )


def _memory_limit() -> int:
    text = Path("/proc/meminfo").read_text()
    free = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
    return int(int(free.split()[1]) * 1024 * MEMORY_SHARE)


class Crew:
    """Measures tasks on one device slot."""

    def __init__(self, config: WorkerConfig, on_event: Emit, **environment: str) -> None:
        self.config = config
        self._on_event = on_event
        self.supervisor = Supervisor(
            lambda: config.spawn("measure", **environment),
            *(config.limits, on_event),
            is_replay=bool(config.replay),
        )
        self.builder: Builder | None = None

    def start(self) -> DeviceInfo:
        """Starts the worker; returns what it says about its device."""
        return DeviceInfo.from_dict(self.supervisor.start())

    def make_builder(self, arch: Arch) -> Builder:
        """A builder for this slot, or to be shared with others of the same machine."""
        self.builder = Builder(
            lambda: self.config.spawn("build"),
            arch.to_dict(),
            jobs=self.config.jobs,
            on_built=lambda facts: self._on_event({"event": "built", **facts}),
            on_lost=lambda words: self._on_event({"event": "builder_lost", "message": words}),
        )
        return self.builder

    def run(self, task: Task, arch: Arch) -> Iterator[list[Result]]:
        """Results in groups that belong together: one a kernel, then the leaders at once.

        A batch is built, then measured, then the next: rows come early even where, as on a CPU,
        nothing can be compiled while something is measured.
        """
        times = dict(task.prior)
        facts: dict[int, Facts] = {}
        size = self.config.limits.batch
        for start in range(0, len(task.todo), size):
            batch = task.todo[start : start + size]
            facts |= self._build(task, batch, arch)
            broken = [at for at in batch if facts[at]["status"] != "ok"]
            if broken:
                yield [{"id": at, "stage": "first", **facts[at]} for at in broken]
            fit = [at for at in batch if facts[at]["status"] == "ok"]
            for result in self.supervisor.run(task.problem, self._items(task, fit)):
                at = result["id"]
                if result["status"] == "ok":
                    times[at] = (result["time_us"], result["spread_us"])
                yield [{"stage": "first", **facts[at], **result}]
        best = leaders(times, Policy.from_dict(task.policy), task.rivals)
        if any(at not in task.confirmed for at in best):
            found = self.supervisor.run_in_turn(task.problem, self._items(task, best))
            yield [{"stage": "leader", **facts.get(r["id"], {}), **r} for r in found]

    def _build(self, task: Task, batch: Sequence[int], arch: Arch) -> dict[int, Facts]:
        if self.config.replay:  # a recording tells about builds with its results
            return {at: {"status": "ok"} for at in batch}
        assert self.builder is not None
        builds = self.builder.wait([(task.keys[at], task.kernels[at]) for at in batch])
        return {at: judged(builds[task.keys[at]], arch) for at in batch}

    @staticmethod
    def _items(task: Task, wanted: list[int]) -> list[dict[str, Any]]:
        return [{"id": at, "kernel": task.kernels[at]} for at in wanted]

    def stop(self) -> None:
        """Kills the worker and the builder, from any thread."""
        self.supervisor.stop()
        if self.builder is not None:
            self.builder.close()

    def close(self) -> None:
        self.supervisor.close()
        if self.builder is not None:
            self.builder.close()


def judged(facts: Facts, arch: Arch) -> Facts:
    """The build's facts; a kernel that needs more than the device has is not to be launched."""
    if facts["status"] != "ok":
        return facts
    needs = {one.name: facts.get(one.name) or 0 for one in fields(Resources)}
    why = over_limit(Resources(**needs), arch)
    return {**facts, "status": "over_limit", "message": why} if why else facts
