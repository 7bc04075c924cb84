"""The inside of a worker: inputs, the reference, and one kernel after another put to the test."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.core.faults import fault_of
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.core.problem import Problem
from tilewise.engines.contract import Engine, Plan
from tilewise.engines.replay import ReplayPlan
from tilewise.errors import BuildError, MachineError
from tilewise.sweep.timing import Timer, Timing, measure, measure_in_turn

GUARD_BYTES = 4096
"""Watched memory on both sides of the output; a kernel that writes there is wrong."""
PATTERN = 0xA5
"""What is written there."""

BUILD_COLUMNS = ("registers", "spills", "smem_bytes", "threads", "compile_s")

Launched = Callable[[int], None]


def alone() -> None:
    """Nobody else uses the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one kernel inside a worker."""

    status: str
    message: str = ""
    timing: Timing | None = None
    rel_error: float | None = None
    workspace_bytes: int | None = None
    tactic: str = ""
    is_poisoned: bool = False
    """Whether the worker can no longer be trusted."""
    build: Mapping[str, Any] = field(default_factory=dict)
    """What a recording knows about the kernel's build."""

    def to_dict(self) -> dict[str, Any]:
        apart = ("timing", "build")
        values = {k: v for k, v in asdict(self).items() if v is not None and k not in apart}
        return {**self.build, **values, **(asdict(self.timing) if self.timing else {})}


class WrongResultError(Exception):
    """A kernel's result or manners are wrong."""

    def __init__(self, message: str, *, rel_error: float | None = None, is_poisoned: bool = False):
        super().__init__(message)
        self.rel_error = rel_error
        self.is_poisoned = is_poisoned


@dataclass(slots=True)
class Workpiece:
    """A problem laid out in memory: operands, a guarded output and what it must become."""

    operands: tuple[Any, ...]
    out: Any
    stored: Any
    """`out` as it lies in memory, flat."""
    buffer: Any
    """The bytes that `out` is cut from, guards included."""
    expected: Any
    """The reference, flat, in the memory order of `out`."""


class Bench(ABC):
    """Measures kernels on one device; remembers the last problem's inputs and reference."""

    timer: Timer
    """The device's clock."""

    def __init__(self, arch: Arch, policy: Policy, engines: Mapping[str, Engine]) -> None:
        self.arch = arch
        self.policy = policy
        self.engines = engines
        self._held: tuple[Problem, Workpiece] | None = None

    @abstractmethod
    def lay_out(self, problem: Problem) -> Workpiece:
        """Seeded random inputs, the output's memory and the reference."""

    @abstractmethod
    def errors(self, piece: Workpiece) -> tuple[float, float]:
        """Relative error by norm, and largest single error over the largest expected value."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for the device."""

    @abstractmethod
    def is_sound(self) -> bool:
        """Whether the device still answers after a failure."""

    def poison(self, piece: Workpiece) -> None:
        """Fills the output with what no kernel computes, and its guards with a pattern."""
        piece.buffer[:GUARD_BYTES] = PATTERN
        piece.buffer[-GUARD_BYTES:] = PATTERN
        is_integer = "int" in str(piece.stored.dtype)
        piece.stored[...] = 0x55555555 if is_integer else float("nan")

    def guards_hold(self, piece: Workpiece) -> bool:
        """Whether the memory around the output is untouched."""
        low, high = piece.buffer[:GUARD_BYTES], piece.buffer[-GUARD_BYTES:]
        return bool((low == PATTERN).all() & (high == PATTERN).all())

    def piece(self, problem: Problem) -> Workpiece:
        """The problem laid out, from memory where it was the last one."""
        if not self.holds(problem):
            self._held = None  # freed before the next is made
            self._held = (problem, self.lay_out(problem))
        assert self._held is not None
        return self._held[1]

    def holds(self, problem: Problem) -> bool:
        """Whether the problem is laid out."""
        return self._held is not None and self._held[0] == problem

    def forget(self) -> None:
        """Drops inputs and reference; the next kernel gets fresh ones."""
        self._held = None

    def plan(self, kernel: Kernel, problem: Problem) -> Plan:
        return self.engines[kernel.engine].plan(kernel, problem, self.arch)

    def searches(self, plan: Plan) -> bool:
        """Whether the first call of a plan looks for its best way, for long and untimed."""
        return False

    def run(
        self,
        kernel: Kernel,
        problem: Problem,
        launched: Callable[[], None],
        preparing: Callable[[], None] = alone,
    ) -> Outcome:
        """One kernel from plan to timing; its every failure becomes an outcome.

        `preparing` is called ahead of what takes long and is not timed, `launched` of the rest.
        """
        phase = "compile_error"
        try:
            plan = self.plan(kernel, problem)
            if isinstance(plan, ReplayPlan):
                launched()
                return replayed(plan)
            phase = "launch_error"
            if self.searches(plan) or not self.holds(problem):
                preparing()
            piece = self.piece(problem)
            phase = "compile_error"
            plan.prepare(piece.operands, piece.out)
            phase = "launch_error"
            if self.searches(plan):
                plan.execute(piece.operands, piece.out)
                self.synchronize()
            launched()
            error = self.verify(plan, problem)
            piece = self.piece(problem)
            timing = measure(plan.bind(piece.operands, piece.out), self.timer, self.policy)
            self.synchronize()
        except Exception as failure:
            return self.failed(failure, phase)
        return served(plan, timing, error)

    def run_in_turn(
        self, kernels: Sequence[Kernel], problem: Problem, launched: Launched
    ) -> list[Outcome]:
        """The leaders of a problem, timed in turn; raises where one of them fails."""
        plans = [self.plan(kernel, problem) for kernel in kernels]
        if isinstance(plans[0], ReplayPlan):
            for index in range(len(plans)):
                launched(index)
            return [replayed(plan) for plan in plans if isinstance(plan, ReplayPlan)]
        piece, found = self.piece(problem), []
        for plan in plans:
            plan.prepare(piece.operands, piece.out)
        for index, plan in enumerate(plans):
            launched(index)
            found.append(self.verify(plan, problem))
        piece = self.piece(problem)
        calls = [plan.bind(piece.operands, piece.out) for plan in plans]
        timings = measure_in_turn(calls, self.timer, self.policy, launched)
        self.synchronize()
        return [
            served(plan, timing, error)
            for plan, timing, error in zip(plans, timings, found, strict=True)
        ]

    def verify(self, plan: Plan, problem: Problem) -> float:
        """The relative error of a right result; raises on a wrong one.

        A wrong result is put down to the kernel only if it is wrong on fresh inputs too: an
        earlier kernel may have written where it should not.
        """
        try:
            return self._verify_once(plan, problem)
        except WrongResultError as error:
            if error.is_poisoned:
                raise
            self.forget()
            return self._verify_once(plan, problem)

    def _verify_once(self, plan: Plan, problem: Problem) -> float:
        piece = self.piece(problem)
        self.poison(piece)
        plan.execute(piece.operands, piece.out)
        self.synchronize()
        if not self.guards_hold(piece):
            raise WrongResultError("it wrote outside its output", is_poisoned=True)
        allowed = tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
        error, worst = self.errors(piece)
        if not isfinite(error):
            raise WrongResultError("the result has values that are not numbers, or was not written")
        if error > allowed or worst > allowed:
            raise WrongResultError(
                f"relative error {error:.3g} (worst element {worst:.3g}); "
                f"{allowed:.3g} is explained by rounding",
                rel_error=error,
            )
        return error

    def failed(self, failure: Exception, phase: str) -> Outcome:
        """A failure as an outcome; the device is asked whether it survived.

        One that is the machine's and not the kernel's is raised as such.
        """
        message = f"{type(failure).__name__}: {failure}"
        if isinstance(failure, WrongResultError):
            self.forget()
            return Outcome(
                status="wrong_result",
                message=str(failure),
                rel_error=failure.rel_error,
                is_poisoned=failure.is_poisoned,
            )
        if isinstance(failure, MachineError):
            raise failure
        status = classify(failure, phase)
        fault = fault_of(status, message)
        if fault is not None:
            raise MachineError(fault) from failure
        if status == "out_of_memory":
            self.forget()
        return Outcome(status=status, message=message[:2000], is_poisoned=not self.is_sound())


TOO_MUCH = (
    *("out of memory", "outofmemory", "can't allocate memory", "cannot be addressed"),
    # NumPy and PyTorch, of sizes that no address space holds.
    *(
        "array is too big",
        "maximum allowed dimension exceeded",
        "storage size calculation overflow",
    ),
)
"""What libraries say, in lower case, where memory cannot be had."""


def classify(failure: Exception, phase: str) -> str:
    """The status that an exception stands for."""
    text = f"{type(failure).__name__}: {failure}".lower()
    if isinstance(failure, MemoryError) or any(words in text for words in TOO_MUCH):
        return "out_of_memory"
    if "outofresources" in text or "out of resource" in text:
        return "over_limit"
    return "compile_error" if isinstance(failure, BuildError) else phase


def served(plan: Plan, timing: Timing, error: float) -> Outcome:
    """A kernel that ran to its end with a right result."""
    return Outcome(
        status="ok",
        timing=timing,
        rel_error=error,
        workspace_bytes=plan.workspace_bytes,
        tactic=plan.tactic,
    )


def replayed(plan: ReplayPlan) -> Outcome:
    """A recorded measurement, given as if it had just been made."""
    row = plan.recorded
    timing = None
    if row.time_us is not None:
        timing = Timing(
            time_us=row.time_us,
            spread_us=row.spread_us or 0.0,
            min_us=row.min_us or row.time_us,
            repeats=row.repeats,
        )
    return Outcome(
        status=row.status,
        message=row.message,
        timing=timing,
        rel_error=row.rel_error,
        workspace_bytes=row.workspace_bytes,
        tactic=row.tactic,
        build={name: getattr(row, name) for name in BUILD_COLUMNS},
    )


def stored_shape(
    shape: Sequence[int], axes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A logical shape as it lies in memory, and the permutation that leads back."""
    return tuple(shape[a] for a in axes), tuple(axes.index(i) for i in range(len(shape)))


def input_seed(policy: Policy, problem: Problem, operand: int) -> int:
    """The same inputs for a problem in every worker, run and machine."""
    text = f"{policy.seed}:{problem.key}:{operand}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def random_values(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """Random float32 values, or int8 ones, none of them zero."""
    random = np.random.default_rng(seed)
    if dtype == "int8":
        values = random.integers(-127, 128, size=shape, dtype=np.int8)
        values[values == 0] = 1
        return values
    drawn = random.random(size=shape, dtype=np.float32) - np.float32(0.5)
    # Away from zero: 1/64 is a value of every float type, so no rounding brings zeros back.
    return np.asarray(np.where(np.abs(drawn) < 1 / 64, np.float32(1 / 64), drawn))
