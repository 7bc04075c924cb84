"""What a sweep has to do: problems x kernels, less what is illegal, known, or known to be bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.identity import canonical_json
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.ops.contract import WhyUnusable, get_op
from tilewise.ops.fields import figures
from tilewise.sweep.compiling import Upcoming
from tilewise.sweep.device_info import DeviceInfo
from tilewise.sweep.known import Known, Record

Rivals = Callable[[Problem], Iterable[Kernel]]
"""Kernels to be compared with the leaders of a problem, such as a selection under judgement."""
Pick = Callable[[Problem, Arch], Iterable[Kernel]]
"""The kernels to measure on a problem, in this order, where not all that are legal are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work on one problem, in plain data: it may travel to another machine.

    Kernels are numbered by their place in the plan.
    """

    problem: Mapping[str, Any]
    kernels: Mapping[int, Mapping[str, Any]]
    """Everything the task may touch, by number."""
    keys: Mapping[int, str]
    """Kernel keys, by number."""
    todo: tuple[int, ...]
    """What is measured in the first pass."""
    prior: Mapping[int, tuple[float, float]]
    """Time and spread of what was measured before."""
    confirmed: frozenset[int]
    """What has been measured among leaders before."""
    policy: Mapping[str, Any]
    rivals: tuple[int, ...] = ()
    """What is measured among the leaders however slow it is."""

    @property
    def upcoming(self) -> Upcoming:
        """What may be compiled for it ahead."""
        return self.problem, tuple(self.keys[at] for at in self.todo)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task as the orchestrator holds it."""

    index: int
    """The problem's place in the plan."""
    task: Task
    attempts: Mapping[int, int]
    """How often each kernel was measured before."""
    skipped: int
    """Pairs left out because they are known to be bad."""
    forgotten: int = 0
    """Pairs of which the store has nothing but faults of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Problems and kernels on one device under one policy."""

    problems: Sequence[Problem]
    labels: Sequence[str]
    """JSON, one per problem."""
    kernels: Sequence[Kernel]
    arch: Arch
    settings: Sequence[Setting]
    """Of each kernel."""
    policy: Policy
    why_unusable: WhyUnusable
    retry_failed: bool = False
    rivals: Rivals | None = None
    pick: Pick | None = None
    kernel_keys: tuple[str, ...] = field(init=False)
    kernel_fields: tuple[Mapping[str, Any], ...] = field(init=False)
    _places: Mapping[Kernel, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel_keys", tuple(k.key for k in self.kernels))
        object.__setattr__(self, "kernel_fields", tuple(k.to_dict() for k in self.kernels))
        object.__setattr__(self, "_places", {k: at for at, k in enumerate(self.kernels)})

    def key(self, problem_key: str, kernel: int) -> str:
        return self.settings[kernel].key(problem_key, self.kernel_keys[kernel])

    def work(self, index: int, known: Known) -> Assignment:
        """What is left to do on one problem; an empty task where nothing is."""
        problem = self.problems[index]
        problem_key = problem.key
        legal = self._legal(problem)
        records = dict(
            zip(legal, known.look_up([self.key(problem_key, at) for at in legal]), strict=True)
        )
        wanted = [at for at in legal if self._is_wanted(records[at])]
        todo = [
            at for at in wanted if self.retry_failed or not self._is_bad(problem_key, at, known)
        ]
        prior = {
            at: (r.time_us, r.spread_us)
            for at, r in records.items()
            if r is not None and r.is_good and isfinite(r.time_us)
        }
        touched = {*todo, *prior}
        return Assignment(
            index,
            Task(
                problem=problem.to_dict(),
                kernels={at: self.kernel_fields[at] for at in touched},
                keys={at: self.kernel_keys[at] for at in touched},
                todo=tuple(todo),
                prior=prior,
                confirmed=frozenset(at for at, r in records.items() if r and r.is_confirmed),
                policy=self.policy.to_dict(),
                rivals=self._rivals(problem, legal),
            ),
            {at: r.attempts for at, r in records.items() if r is not None},
            len(wanted) - len(todo),
            sum(r is not None and not r.is_settled for r in records.values()),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no kernel can serve any problem."""
        return not any(map(self._legal, self.problems))

    def _legal(self, problem: Problem) -> list[int]:
        """The kernels that are measured on a problem."""
        if self.pick is not None:
            picked = self.pick(problem, self.arch)
            return [self._places[kernel] for kernel in picked if kernel in self._places]
        return [
            at
            for at, kernel in enumerate(self.kernels)
            if self.why_unusable(kernel, problem, self.arch) is None
        ]

    def why_empty(self) -> str:
        """What to say where no kernel can serve any problem."""
        problem = self.problems[0]
        reasons = Counter(self.why_unusable(k, problem, self.arch) for k in self.kernels)
        shown = "; ".join(f"{why} ({count} kernels)" for why, count in reasons.most_common(3))
        return (
            f"none of the {len(self.kernels)} kernels can serve any of the {len(self.problems)} "
            f"problems on {self.arch.label}; for the first: {shown}"
        )

    def _rivals(self, problem: Problem, legal: Sequence[int]) -> tuple[int, ...]:
        named = set(self.rivals(problem)) if self.rivals else set()
        return tuple(at for at in legal if self.kernels[at] in named) if named else ()

    def _is_wanted(self, record: Record | None) -> bool:
        if record is None or not record.is_settled:
            return True
        return self.retry_failed and not record.is_good

    def _is_bad(self, problem_key: str, kernel: int, known: Known) -> bool:
        key = self.kernel_keys[kernel]
        return known.has_failed(problem_key, key) or known.is_given_up(key)

    def row(
        self, work: Assignment, result: Mapping[str, Any], run_id: str, version: str
    ) -> Measurement:
        """A result as a row of the store."""
        values = dict(result)
        at = int(values.pop("id"))
        values.pop("busy_s", None)
        values.pop("was_cached", None)
        kernel = self.kernels[at]
        attempt = work.attempts.get(at, 0)
        stage = values.pop("stage")
        if stage == "leader" and at in work.task.todo:
            attempt += 1  # the first pass of this very run came before
        elif stage == "first" and attempt:
            stage = "retry"
        return Measurement.of(
            self.problems[work.index],
            kernel,
            self.settings[at],
            labels=self.labels[work.index],
            stage=stage,
            attempt=attempt,
            run_id=run_id,
            version=version,
            **values,
        )


def make_plan(
    problems: Sequence[Problem],
    kernels: Sequence[Kernel],
    device: DeviceInfo,
    policy: Policy,
    *,
    labels: Sequence[str] = (),
    retry_failed: bool = False,
    why_unusable: WhyUnusable | None = None,
    rivals: Rivals | None = None,
    pick: Pick | None = None,
) -> SweepPlan:
    """The plan of a sweep on a device; problems given twice count once."""
    if not kernels:
        raise InputError("there is no kernel to measure; the filter, engines or dtype leave none")
    usable = [k for k in dict.fromkeys(kernels) if k.engine in device.toolchains]
    usable = [k for k in usable if k.engine not in device.unavailable]
    if not usable:
        reasons = "; ".join(f"{name}: {why}" for name, why in device.unavailable.items())
        raise InputError(
            f"none of the {len(kernels)} kernels can run on {device.arch.label} "
            f"(engines there: {', '.join(device.toolchains)}{'; ' + reasons if reasons else ''})"
        )
    first: dict[Problem, str] = {}
    for at, problem in enumerate(problems):
        first.setdefault(problem, labels[at] if labels else "{}")
    if not first:
        raise InputError("there is no problem to measure; give at least one")
    op = next(iter(first)).op
    setting = partial(
        Setting,
        arch=device.arch.name,
        device=device.name,
        policy=policy,
        figures=canonical_json(figures(device.arch)),
    )
    settings = {text: setting(toolchain=text) for text in map(device.toolchain, usable)}
    return SweepPlan(
        problems=list(first),
        labels=list(first.values()),
        kernels=usable,
        arch=device.arch,
        settings=[settings[device.toolchain(kernel)] for kernel in usable],
        policy=policy,
        why_unusable=why_unusable or get_op(op).why_unusable,
        retry_failed=retry_failed,
        rivals=rivals,
        pick=pick,
    )


def leaders(
    times: Mapping[int, tuple[float, float]], policy: Policy, rivals: Iterable[int] = ()
) -> list[int]:
    """The kernels within noise of the fastest, fastest first; at most the policy's number.

    Within noise: medians no further apart than the policy's noise, or than both spreads together.
    Rivals that were measured come on top, whatever their time.
    """
    if not times or not policy.rounds:
        return []
    ranked = sorted(times, key=lambda at: (times[at][0], at))
    best, spread = times[ranked[0]]
    near = [
        at
        for at in ranked
        if times[at][0] - best <= max(policy.noise * best, (spread + times[at][1]) / 2)
    ]
    together = [*near[: policy.max_leaders], *(at for at in rivals if at in times)]
    found = list(dict.fromkeys(together))
    return found if len(found) > 1 else []
