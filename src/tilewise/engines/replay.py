"""Replays recorded measurements in place of running kernels: sweeps without the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement
from tilewise.core.problem import Problem
from tilewise.engines.contract import Engine, Plan
from tilewise.errors import ExecutionError
from tilewise.ops.contract import Op


class ReplayPlan(Plan):
    """A recorded measurement where a compiled kernel would be; it can be read, not executed."""

    def __init__(self, kernel: Kernel, problem: Problem, recorded: Measurement) -> None:
        self.kernel = kernel
        self.problem = problem
        self.recorded = recorded
        self.workspace_bytes = recorded.workspace_bytes or 0

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        raise ExecutionError(f"{self.kernel.name} is a recording; it has times but no result")


class ReplayEngine(Engine):
    """Answers for the kernels of every engine, with the measurement that holds of each."""

    name = "replay"
    kinds = ("cpu", "gpu")

    def toolchain(self, op: Op, family: str = "") -> str:
        raise ExecutionError("a recording has the toolchains of its rows")

    def __init__(self, rows: Iterable[Measurement]) -> None:
        self._rows: dict[tuple[str, str], Measurement] = {}
        for row in rows:
            kept = self._rows.get((row.problem_key, row.kernel_key))
            if kept is None or row.rank >= kept.rank:
                self._rows[row.problem_key, row.kernel_key] = row

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> ReplayPlan:
        row = self._rows.get((problem.key, kernel.key))
        if row is None:
            raise ExecutionError(f"{kernel.name} was never recorded on this problem")
        return ReplayPlan(kernel, problem, row)
