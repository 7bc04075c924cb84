"""Select, build, launch: down the ranking, past what cannot serve, to the vendor at last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import view
from tilewise.dispatch.chooser import Chooser
from tilewise.dispatch.operands import ReadyCall, prepare
from tilewise.dispatch.padding import (
    WIDE_BYTES,
    CopyingPlan,
    calls_us,
    copied_bytes,
    irregular,
    plan_for,
)
from tilewise.engines import Build, Plan, get_engine, is_foreign
from tilewise.errors import (
    BuildError,
    ExecutionError,
    InputError,
    MachineError,
    NoKernelError,
    ProblemError,
)
from tilewise.forks import make_rlock
from tilewise.notices import warn_once
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.analytic import AnalyticRanker
from tilewise.selection.choice import Choice, Ranker

if TYPE_CHECKING:
    from tilewise.dispatch.registry import Registry

log = logging.getLogger("tilewise")

REMEMBERED_PLANS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `run` gives: the tensor, and how it came about."""

    out: Any
    choice: Choice
    workspace_bytes: int
    copied: tuple[str, ...]
    """Names of tensors that had to be copied because their layout did not fit."""

    @property
    def kernel(self) -> Kernel:
        return self.choice.kernel

    @property
    def path(self) -> str:
        return self.choice.path

    @property
    def reason(self) -> str:
        return self.choice.reason


class Dispatcher:
    """Chooses and runs kernels of one registry. Choices and plans are remembered per problem."""

    def __init__(self, registry: Registry, *, rankers: Sequence[Ranker] = ()) -> None:
        self.registry = registry
        self.rankers: tuple[Ranker, ...] = (*rankers, AnalyticRanker())
        self._lock = make_rlock()
        self._remembered: dict[Any, tuple[Plan, Choice]] = {}
        self._version = registry.version
        self._told: set[str] = set()
        self._chooser = Chooser(registry, self.rankers)

    def select(
        self, problem: Problem, *, deterministic: bool = False, top_k: int | None = None
    ) -> Choice:
        """The kernel to use for `problem`, at the head of its ranking; nothing is built."""
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be at least 1")
        choice = self._chooser.recall(problem, deterministic)
        if choice is None:
            choice = self._select(problem, deterministic)
        return choice if top_k is None else replace(choice, ranking=choice.ranking[:top_k])

    def _select(self, problem: Problem, deterministic: bool) -> Choice:
        self._check_op(problem)
        if problem.is_empty:
            return self._for_nothing(problem, deterministic)
        choice = self._chooser.choose(problem, deterministic)
        if choice is not None:
            return choice
        return Choice(
            problem=problem,
            kernel=self._vendor(problem),
            path="vendor",
            reason=f"none of {len(self.registry)} kernels can serve",
            rejected=self._chooser.rejected(problem, deterministic),
        )

    def run(
        self, problem: Problem, *tensors: Any, out: Any = None, deterministic: bool = False
    ) -> Result:
        """Computes `problem` on NumPy arrays or PyTorch tensors."""
        self._check_op(problem)
        call = prepare(self.registry.op, problem, tensors, out)
        if problem.is_empty:
            call.out[...] = 0
            return Result(
                out=call.finish(), choice=self.select(problem), workspace_bytes=0, copied=()
            )
        plan, choice = self.execute(problem, call, deterministic=deterministic)
        return Result(
            out=call.finish(),
            choice=choice,
            workspace_bytes=plan.workspace_bytes,
            copied=call.copied,
        )

    def select_fusing(
        self,
        problem: Problem,
        *,
        saved_bytes: int,
        deterministic: bool = False,
        epilogue: Any = None,
    ) -> Choice:
        """`select` where kernels that fuse an epilogue save so many bytes beside all others."""
        choice = self.select(problem, deterministic=deterministic)
        if not saved_bytes or self.fuses(choice.kernel, problem, epilogue):
            return choice
        is_vendors = choice.kernel.engine == "vendor"
        us = self.vendor_us(problem) if is_vendors else choice.predicted_us
        if us is None:
            return choice
        limit = us + saved_bytes / (self.registry.arch.memory_gb_s * 1e3)
        for ranked in choice.ranking:
            if self.fuses(ranked.kernel, problem, epilogue):
                if ranked.predicted_us >= limit:
                    break
                who = "the vendor" if is_vendors else "that one"
                reason = f"{choice.reason}; what it fuses would cost {who} another pass"
                return replace(choice, kernel=ranked.kernel, reason=reason)
        return choice

    def fuses(self, kernel: Kernel, problem: Problem, epilogue: Any = None) -> bool:
        """Whether a kernel takes what has to be done to its result: an epilogue, or any."""
        if is_foreign(kernel.engine) or not get_engine(kernel.engine).takes_epilogue:
            return False
        return epilogue is None or get_engine(kernel.engine).fuses(kernel, problem, epilogue)

    def plan(
        self,
        problem: Problem,
        *,
        deterministic: bool = False,
        epilogue: Any = None,
        saved_bytes: int = 0,
    ) -> tuple[Plan, Choice]:
        """A built kernel bound to `problem`, and the choice behind it; remembered.

        Kernels that can fuse `epilogue` do; the plan's own `epilogue` says whether. `saved_bytes`
        follow from it: what those need not read and write that others must.
        """

        def make() -> tuple[Plan, Choice]:
            choice = self.select_fusing(
                problem, saved_bytes=saved_bytes, deterministic=deterministic, epilogue=epilogue
            )
            return self._first_that_builds(choice, epilogue)

        return self._held((problem, deterministic, epilogue), make)

    def execute(
        self,
        problem: Problem,
        call: ReadyCall,
        *,
        deterministic: bool = False,
        epilogue: Any = None,
        saved_bytes: int = 0,
        vectors: Sequence[Any] = (),
    ) -> tuple[Plan, Choice]:
        """Runs a plan that takes the call's tensors where they are, and gives it.

        `vectors` are the epilogue's tensors; they count only where the plan has an epilogue.
        A kernel that fails is left out and the next one tried.
        """
        key: Any = (problem, deterministic, epilogue)
        plan, choice = self.plan(
            problem, deterministic=deterministic, epilogue=epilogue, saved_bytes=saved_bytes
        )
        if plan.why_unfit(call.operands, call.out) is not None:
            tensors = (*call.operands, call.out)
            key = (*key, tuple((view(t).strides, view(t).address % WIDE_BYTES) for t in tensors))
            failed = choice
            plan, choice = self._held(key, lambda: self._fitting(failed, call, epilogue))
        while True:
            more = vectors if plan.epilogue is not None else ()
            try:
                plan.execute((*call.operands, *more), call.out)
                self.registry.note_build(Build(kernel=plan.kernel, status="ok"))
                return plan, choice
            except (BuildError, ExecutionError) as error:
                if choice.kernel.engine == "vendor":
                    raise
                if isinstance(error, BuildError):
                    failure = Build(kernel=plan.kernel, status="compile_error", message=str(error))
                    self.registry.note_build(failure)
                self._tell_once(f"{choice.kernel.name} failed and is left out: {error}")
            rest = tuple(r for r in choice.ranking if r.kernel != choice.kernel)
            next_kernel = rest[0].kernel if rest else self._vendor(choice.problem)
            choice = replace(choice, kernel=next_kernel, ranking=rest)
            plan, choice = self._first_that_builds(choice, epilogue)
            if plan.why_unfit(call.operands, call.out) is not None:
                plan, choice = self._fitting(choice, call, epilogue)
            with self._lock:
                self._remembered[key] = (plan, choice)

    def _held(self, key: Any, make: Callable[[], tuple[Plan, Choice]]) -> tuple[Plan, Choice]:
        """What is remembered under `key`, made now where nothing is."""
        with self._lock:
            if self._version != self.registry.version:
                self._remembered.clear()
                self._version = self.registry.version
            held = self._remembered.get(key)
            if held is None:
                held = make()
                if len(self._remembered) >= REMEMBERED_PLANS:
                    self._remembered.pop(next(iter(self._remembered)))
                self._remembered[key] = held
        return held

    def _fitting(self, choice: Choice, call: ReadyCall, epilogue: Any) -> tuple[Plan, Choice]:
        """The kernel that is fastest on the call's tensors, copying those it cannot reach."""
        tensors = (*call.operands, call.out)
        copy_us = calls_us(len(irregular(tensors)), copied_bytes(tensors), self.registry.arch)
        kernels = [ranked.kernel for ranked in choice.ranking]
        start = kernels.index(choice.kernel) if choice.kernel in kernels else len(kernels)
        best: tuple[float, Plan | None] = (inf, None)
        for ranked in choice.ranking[start:]:  # those before could not be had
            if best[1] is not None and not self._is_by_time(choice, best[1].kernel, ranked.kernel):
                break
            if ranked.predicted_us >= best[0]:
                continue
            plan = self._plan_or_none(ranked.kernel, choice.problem, epilogue)
            us = ranked.predicted_us
            if plan is not None and plan.why_unfit(call.operands, call.out) is not None:
                plan = CopyingPlan(self.registry.op, plan, tensors)
                if plan.why_unfit(call.operands, call.out) is not None:
                    continue
                us += copy_us
            if plan is not None and us < best[0]:
                best = (us, plan)
        found = best[1]
        if found is None:
            kernel = self._vendor(choice.problem)
            found = get_engine("vendor").plan(kernel, choice.problem, self.registry.arch)
        why = "strides or addresses of the tensors count"
        return found, replace(choice, kernel=found.kernel, reason=f"{choice.reason}; {why}")

    def _is_by_time(self, choice: Choice, one: Kernel, other: Kernel) -> bool:
        """Whether time decides between two kernels: neither priority nor the ranking's order."""
        priority = self.registry.priority_of
        is_last = other.engine == "vendor" and not self._knows(choice.path, other)
        return priority(one) == priority(other) and not is_last

    def _knows(self, path: str, vendor: Kernel) -> bool:
        return any(r.path == path and self._chooser.can_judge(r, vendor) for r in self.rankers)

    def _plan_or_none(self, kernel: Kernel, problem: Problem, epilogue: Any) -> Plan | None:
        if is_foreign(kernel.engine) or get_engine(kernel.engine).why_unavailable() is not None:
            return None
        engine, registry = get_engine(kernel.engine), self.registry
        try:
            return plan_for(registry.op, engine, kernel, problem, registry.arch, epilogue)
        except (BuildError, ExecutionError):
            return None

    def vendor_us(self, problem: Problem, library: str = "torch") -> float | None:
        """How long the vendor's routine is expected to take; None where nobody measured it."""
        return self._chooser.vendor_us(problem, library)

    def workspace_bytes(self, problem: Problem) -> int:
        """Scratch memory that running `problem` will take."""
        return 0 if problem.is_empty else self.plan(problem)[0].workspace_bytes

    def _check_op(self, problem: Problem) -> None:
        if problem.op != self.registry.op.name:
            raise ProblemError(
                f"the problem is {problem.op}, but registry {self.registry.name!r} holds "
                f"{self.registry.op.name} kernels"
            )

    def _for_nothing(self, problem: Problem, deterministic: bool) -> Choice:
        why_not = self._chooser.why_not
        usable = (k for k in self.registry.kernels if not why_not(k, problem, deterministic))
        return Choice(
            problem=problem,
            kernel=next(usable, None) or self._vendor(problem),
            path="empty",
            reason="a size is zero: nothing to compute",
        )

    def _vendor(self, problem: Problem) -> Kernel:
        library = "torch" if find_spec("torch") else "numpy"
        kernel = VendorKernel(op_name=problem.op, library=library)
        why = self.registry.op.why_unusable(kernel, problem, self.registry.arch)
        if why is not None:
            raise NoKernelError(
                f"nothing can serve {problem.op} {problem.to_dict()} on "
                f"{self.registry.arch.label}; the vendor neither: {why}",
                asked=str(problem),
                reasons=self._chooser.rejected(problem),
            )
        return kernel

    def _first_that_builds(self, choice: Choice, epilogue: Any = None) -> tuple[Plan, Choice]:
        """A plan of the best ranked kernel that can be had, else the vendor's."""
        rest = (r.kernel for r in choice.ranking if r.kernel != choice.kernel)
        failed: list[str] = []
        for kernel in chain([choice.kernel], rest):
            if is_foreign(kernel.engine):
                failed.append(f"{kernel.engine} kernels are built by their own library")
                continue
            engine = get_engine(kernel.engine)
            why = engine.why_unavailable()
            if why is not None:
                failed.append(why)
                self._tell_once(f"the {kernel.engine} engine cannot be used: {why}")
                continue
            try:
                registry, problem = self.registry, choice.problem
                plan = plan_for(registry.op, engine, kernel, problem, registry.arch, epilogue)
            except (BuildError, ExecutionError) as error:
                why = str(error).removeprefix(kernel.name).strip()
                failed.append(f"{kernel.name}: {why.splitlines()[0]}")
                if isinstance(error, MachineError):  # reported once, whichever op meets it
                    warn_once(f"kernels are passed over: {why}", why=why)
                else:
                    self._tell_once(f"kernels are passed over: {why}")
                continue
            if failed:
                reason = f"{choice.reason}; {len(failed)} before it could not be had"
                path = "vendor" if kernel.engine == "vendor" else choice.path
                choice = replace(choice, kernel=kernel, path=path, reason=reason)
            return plan, choice
        kernel = self._vendor(choice.problem)
        plan = get_engine("vendor").plan(kernel, choice.problem, self.registry.arch)
        reason = f"no kernel could be had: {failed[0]}" if failed else choice.reason
        return plan, replace(choice, kernel=kernel, path="vendor", reason=reason)

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)
