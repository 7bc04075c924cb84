"""Measures selections on the device of this machine: a sweep whose contests hold the choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement, Policy
from tilewise.core.problem import Problem
from tilewise.data.schema import from_table
from tilewise.data.store import Store
from tilewise.judge.verdicts import Verdict, judge, summarise, why_unjudged
from tilewise.ops.contract import WhyUnusable, get_op
from tilewise.selection.choice import Choice
from tilewise.sweep.local import Executor
from tilewise.sweep.run import Options, Summary, sweep

Choose = Callable[[Problem], Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """What takes part on an architecture: every kernel, and how one is chosen."""

    kernels: Sequence[Kernel]
    choose: Choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The outcome of a live validation."""

    arch: Arch
    sweep: Summary
    verdicts: Sequence[Verdict]
    unjudged: Mapping[Problem, str]
    """Why there is no verdict: not fully measured, or without a right result."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "arch": self.arch.name,
            "device": self.sweep.device,
            "stopped": self.sweep.stopped,
            "rows": [verdict.to_dict() for verdict in self.verdicts],
            "unjudged": [{"problem": p.to_dict(), "why": why} for p, why in self.unjudged.items()],
            "summary": summarise(self.verdicts, unjudged=len(self.unjudged)),
        }


def validate(
    store: Path | str,
    problems: Sequence[Problem],
    field: Callable[[Arch], Contenders],
    executor: Executor,
    policy: Policy,
    *,
    options: Options | None = None,
    labels: Sequence[str] = (),
    why_unusable: WhyUnusable | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Validation:
    """Measures every legal kernel, the chosen one and the vendor's in one run, and judges.

    `field` is asked once the device is known. What the store holds of this device and policy is
    not measured again.
    """
    held = Ledger(why_unusable or get_op(problems[0].op).why_unusable)

    def kernels(arch: Arch) -> Sequence[Kernel]:
        held.start(field(arch), arch)
        return held.field.kernels

    summary = sweep(
        *(store, problems, kernels, executor, policy),
        options=options,
        labels=labels,
        why_unusable=why_unusable,
        rivals=held.rivals,
        on_event=on_event,
    )
    wanted = dict(zip(problems, labels or ["{}"] * len(problems), strict=True))
    found = rows_of(store, wanted, policy, summary.device)
    verdicts: list[Verdict] = []
    unjudged: dict[Problem, str] = {}
    for problem, text in wanted.items():
        rows = found.get(problem.key, [])
        if summary.stopped and not held.is_measured(problem, rows):
            unjudged[problem] = "kernels were left to measure when it stopped"
            continue
        choice = held.choice(problem)
        verdict = judge(problem, choice.path, held.ranking(problem), rows, json.loads(text))
        if verdict is not None:
            verdicts.append(verdict)
        else:
            unjudged[problem] = why_unjudged(rows)
    return Validation(arch=held.arch, sweep=summary, verdicts=verdicts, unjudged=unjudged)


class Ledger:
    """The choices for a device, each made once."""

    field: Contenders
    arch: Arch

    def __init__(self, why_unusable: WhyUnusable) -> None:
        self._why_unusable = why_unusable
        self._choices: dict[Problem, Choice] = {}

    def start(self, field: Contenders, arch: Arch) -> None:
        self.field, self.arch = field, arch

    def choice(self, problem: Problem) -> Choice:
        if problem not in self._choices:
            self._choices[problem] = self.field.choose(problem)
        return self._choices[problem]

    def ranking(self, problem: Problem) -> list[Kernel]:
        """The choice and what stands behind it, of the kernels that serve the problem as it is.

        A dispatcher may also pad operands for a kernel; measurements are of problems as they are.
        """
        choice = self.choice(problem)
        ordered = dict.fromkeys([choice.kernel, *(r.kernel for r in choice.ranking)])
        return [kernel for kernel in ordered if self._serves(kernel, problem)]

    def rivals(self, problem: Problem) -> list[Kernel]:
        """What is timed in turn with the leaders: the chosen kernel and the vendor's."""
        vendors = [k for k in self.field.kernels if k.engine == "vendor"]
        return [*self.ranking(problem)[:1], *vendors]

    def is_measured(self, problem: Problem, rows: Iterable[Measurement]) -> bool:
        """Whether no legal kernel is left to measure."""
        known = {row.kernel for row in rows}
        return all(k.name in known for k in self.field.kernels if self._serves(k, problem))

    def _serves(self, kernel: Kernel, problem: Problem) -> bool:
        return self._why_unusable(kernel, problem, self.arch) is None


def rows_of(
    store: Path | str, problems: Iterable[Problem], policy: Policy, device: str
) -> dict[str, list[Measurement]]:
    """Every attempt at the problems on a device under a policy, by the problem's key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = Store(store).table(latest=False)
    keys = pa.array([problem.key for problem in problems], pa.string())
    here = pc.and_(
        pc.is_in(table.column("problem_key"), value_set=keys),
        pc.and_(
            pc.equal(table.column("policy_key"), policy.key),
            pc.equal(table.column("device"), device),
        ),
    )
    found: dict[str, list[Measurement]] = {}
    for row in from_table(table.filter(here)):
        if not row.is_fault:
            found.setdefault(row.problem_key, []).append(row)
    return found
