"""A worker process: takes batches of kernels as JSON lines, answers each with one.

The first line configures it; see `main`. Standard output is kept for the answers alone: whatever
kernels and libraries print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

from tilewise.core.arch import Arch
from tilewise.core.faults import fault_of
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.engines import get_engine
from tilewise.engines.contract import Build, Engine
from tilewise.engines.replay import ReplayEngine
from tilewise.errors import InputError, MachineError, TilewiseError
from tilewise.ops.contract import all_ops, get_op
from tilewise.sweep.bench import Bench
from tilewise.sweep.device_info import DeviceInfo, as_arch, kernels_of
from tilewise.sweep.recording import Recording
from tilewise.sweep.turns import Turns

MOST_OUTPUT_BYTES = 1 << 30
"""A kernel that prints without end must not fill the disk."""

Item = Mapping[str, Any]


class Turn(NamedTuple):
    """What a worker says to those who share its device: `Turns` of one order."""

    prepare: Callable[[], None]
    measure: Callable[[], None]
    rest: Callable[[], None]


class Worker:
    """One configured worker and its channel to the supervisor."""

    def __init__(self, config: Mapping[str, Any], channel: IO[str]) -> None:
        self.config = config
        self.channel = channel
        self.policy = Policy.from_dict(config["policy"])
        self._lock = threading.Lock()
        self.engines: dict[str, Engine] = {}
        self.recording: Recording | None = None
        self.bench: Bench | None = None
        self._kind = config.get("kind", "")
        self._turns: Turns | None = None
        self._current = 0
        """The item at work."""

    def say(self, event: str, **values: Any) -> None:
        with self._lock:
            self.channel.write(json.dumps({"event": event, **values}) + "\n")
            self.channel.flush()

    def load_engines(self) -> None:
        if self.config.get("replay"):
            self.recording = Recording.load(
                self.config["replay"], arch=self.config.get("arch", ""), policy=self.policy.key
            )
            self.engines = dict.fromkeys(
                sorted(self.recording.toolchains), ReplayEngine(self.recording.rows)
            )
            return
        for spec in self.config["engines"]:
            loaded = load_engine(spec)
            self.engines[loaded.name] = loaded

    def kernel(self, values: Mapping[str, Any]) -> Kernel:
        kinds: Sequence[type[Kernel]] = getattr(self.engines[values["engine"]], "kernel_types", ())
        if kinds:
            return kinds[0].from_dict(values)
        return get_op(values["op"]).kernel_from_dict(dict(values))

    def describe(self) -> DeviceInfo:
        if self.recording is not None:
            return DeviceInfo(
                arch=self.recording.arch, toolchains=self.recording.toolchains, unavailable={}
            )
        from tilewise.engines.device import detect

        unavailable = {name: e.why_unavailable() for name, e in self.engines.items()}
        return DeviceInfo(
            arch=as_arch(detect(self._kind), self.config.get("arch", "")),
            toolchains={
                name: {
                    kernels_of(op.name, family): engine.toolchain(op, family)
                    for op in all_ops().values()
                    for family in ("", *engine.families(op))
                }
                for name, engine in self.engines.items()
            },
            unavailable={name: why for name, why in unavailable.items() if why},
        )

    def start(self) -> None:
        """Becomes able to measure, and says so."""
        self.load_engines()
        info = self.describe()
        self._kind = info.arch.kind
        if not self.config.get("replay"):
            self._turns = Turns(self._kind)  # refused now, not under some kernel
        if info.arch.kind == "gpu" and not self.config.get("replay"):
            from tilewise.sweep.bench_cuda import CudaBench

            self.bench = CudaBench(info.arch, self.policy, self.engines)
        else:
            from tilewise.sweep.bench_cpu import CpuBench

            limit_memory(int(self.config.get("memory_bytes", 0)))
            self.bench = CpuBench(info.arch, self.policy, self.engines)
        self.say("ready", **info.to_dict())

    @contextmanager
    def device(self, first: int) -> Iterator[Turn]:
        """The device's turns for the items of an order; it is this process's to the end."""
        if self.config.get("replay"):
            yield Turn(lambda: None, lambda: None, lambda: None)
            return
        turns = self._turns = self._turns or Turns(self._kind)

        def say(event: str) -> None:
            self.say(event, id=self._current)

        self._current = first
        try:
            yield Turn(lambda: turns.prepare(say), lambda: turns.measure(say), turns.rest)
        finally:
            turns.end()

    def batch(self, order: Mapping[str, Any]) -> None:
        """Measures kernels one by one; a poisoned worker stops after the one that did it."""
        assert self.bench is not None
        problem = self._problem(order)
        began = 0.0
        with self.device(order["items"][0]["id"]) as turn:

            def launched() -> None:
                nonlocal began
                turn.measure()
                began = time.perf_counter()
                self.say("launch", id=self._current)

            def preparing() -> None:
                if self._kind == "gpu":  # on a CPU workers have cores of their own
                    turn.prepare()

            for item in order["items"]:
                self._current, began = item["id"], 0.0
                self.say("prepare", id=item["id"])
                kernel = self.kernel(item["kernel"])
                outcome = self.bench.run(kernel, problem, launched, preparing)
                busy = time.perf_counter() - began if began else 0.0
                turn.rest()
                self.say("result", id=item["id"], busy_s=busy, **outcome.to_dict())
                if outcome.is_poisoned:
                    return
        self.say("end")

    def leaders(self, order: Mapping[str, Any]) -> None:
        """Measures the leaders of a problem in turn; all results come together at the end."""
        assert self.bench is not None
        items, at, began = order["items"], 0, 0.0
        self.say("prepare", id=items[0]["id"])
        with self.device(items[0]["id"]) as turn:

            def launched(index: int) -> None:
                nonlocal at, began
                if not began:
                    turn.measure()
                    began = time.perf_counter()
                at = index
                self.say("launch", id=items[index]["id"])

            kernels = [self.kernel(item["kernel"]) for item in items]
            try:
                found = self.bench.run_in_turn(kernels, self._problem(order), launched)
            except Exception as failure:
                outcome = self.bench.failed(failure, "launch_error")
                self.say("result", id=items[at]["id"], busy_s=0.0, **outcome.to_dict())
                if not outcome.is_poisoned:
                    self.say("end")
                return
        busy = (time.perf_counter() - began) / len(items)
        for item, outcome in zip(items, found, strict=True):
            self.say("result", id=item["id"], busy_s=busy, **outcome.to_dict())
        self.say("end")

    def build(self, order: Mapping[str, Any]) -> None:
        """Compiles kernels in parallel. On a CPU nobody measures meanwhile."""
        arch = Arch.from_dict(order["arch"])
        self._kind = arch.kind
        by_engine: dict[str, list[Item]] = {}
        for item in order["items"]:
            by_engine.setdefault(item["kernel"]["engine"], []).append(item)
        with self.device(order["items"][0]["id"]) as turn:
            if arch.kind == "cpu":
                turn.measure()
            for name, items in by_engine.items():
                self._build(self.engines[name], items, arch, order.get("jobs") or None)
        self.say("end")

    def ahead(self, order: Mapping[str, Any]) -> None:
        """Compiles what some problems need beyond the kernels themselves; says nothing of it.

        What fails here fails again where it is measured, and is recorded there.
        """
        arch = Arch.from_dict(order["arch"])
        kernels = {key: self.kernel(values) for key, values in order["kernels"].items()}
        pairs = [
            (kernels[key], problem)
            for values, keys in order["problems"]
            for problem in [get_op(values["op"]).problem.from_dict(values)]
            for key in keys
        ]
        for name, engine in self.engines.items():
            own = [pair for pair in pairs if pair[0].engine == name]
            engine.compile_ahead(own, arch, max_workers=order.get("jobs") or None)
        self.say("end")

    def _build(self, engine: Engine, items: Sequence[Item], arch: Arch, jobs: int | None) -> None:
        ids = {self.kernel(item["kernel"]): item["id"] for item in items}
        faults: list[str] = []

        def done(build: Build) -> None:
            fault = fault_of(build.status, build.message)
            if fault is not None:
                faults.append(fault)
                return
            self.say(
                "built",
                id=ids[build.kernel],
                status=build.status,
                message=build.message[-2000:],
                compile_s=build.seconds,
                was_cached=build.was_cached,
                registers=build.resources.registers,
                spills=build.resources.spills,
                smem_bytes=build.resources.smem_bytes,
                threads=build.resources.threads,
            )

        engine.build(list(ids), arch, max_workers=jobs, on_done=done)
        if faults:
            raise MachineError(faults[0])

    def _problem(self, order: Mapping[str, Any]) -> Any:
        return get_op(order["problem"]["op"]).problem.from_dict(order["problem"])


def load_engine(spec: str) -> Engine:
    """An engine by its name, or by `module:Class` for one that tilewise does not ship."""
    if ":" not in spec:
        return get_engine(spec)
    module, _, name = spec.partition(":")
    engine: Engine = getattr(import_module(module), name)()
    return engine


def die_with(parent: int) -> None:
    """Has the system kill this process when its supervisor dies, whatever it is doing then."""
    with suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def end_group_with_me() -> None:
    """Leaves a guard behind that kills this process's children when it dies, however it does.

    The system tells only direct children of a death; compilers have children of their own.
    """
    ours, guards = os.pipe()
    if os.fork():
        os.close(ours)
        return  # the other end stays open, and closes with this process alone
    for descriptor in (0, 1, 2, guards):
        os.close(descriptor)
    os.read(ours, 1)
    os.killpg(0, signal.SIGKILL)


def limit_memory(most: int) -> None:
    """Turns exhausted memory into a failed allocation here, before it is felt elsewhere."""
    if most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(OSError):  # and if the system runs short all the same, it takes us first
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """Reads orders until standard input ends."""
    config = json.loads(sys.stdin.readline())
    die_with(int(config.get("parent", 0)))
    if config["role"] == "build":
        end_group_with_me()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = Worker(config, channel)
    try:
        if config["role"] == "build":
            worker.load_engines()
            worker.say("ready")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OUTPUT_BYTES, MOST_OUTPUT_BYTES))
            worker.start()
    except TilewiseError as error:
        worker.say("refused", message=str(error), is_input=isinstance(error, InputError))
        return
    orders = {
        "batch": worker.batch,
        "leaders": worker.leaders,
        "build": worker.build,
        "ahead": worker.ahead,
    }
    for line in sys.stdin:
        order = json.loads(line)
        try:
            orders[order["do"]](order)
        except MachineError as error:  # no kernel's: the supervisor tries again, then gives up
            worker.say("fault", message=str(error))


if __name__ == "__main__":
    main()
