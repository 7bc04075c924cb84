"""Replays recorded measurements in place of running kernels: sweeps without the hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import COLUMNS, Measurement
from tilewise.core.problem import Problem
from tilewise.engines.contract import Build, Engine, Plan, Resources
from tilewise.errors import ExecutionError, FileError


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
    """Answers for the kernels of every engine, with the last measurement of each."""

    name = "replay"

    def __init__(self, rows: Iterable[Measurement]) -> None:
        self._rows: dict[tuple[str, str], Measurement] = {}
        for row in rows:
            kept = self._rows.get((row.problem_key, row.kernel_key))
            if kept is None or row.attempt >= kept.attempt:
                self._rows[row.problem_key, row.kernel_key] = row
        self._by_kernel = {row.kernel_key: row for row in self._rows.values()}

    @classmethod
    def from_folder(cls, path: Path | str) -> ReplayEngine:
        """The recording in a store's shards."""
        import pyarrow.parquet as pq

        shards = sorted(Path(path).glob("[!.]*.parquet"))
        if not shards:
            raise FileError(f"{path} has no recorded measurements (*.parquet) to replay")
        tables = (pq.read_table(shard, columns=list(COLUMNS)) for shard in shards)
        return cls(Measurement(**row) for table in tables for row in table.to_pylist())

    @property
    def rows(self) -> Iterable[Measurement]:
        """What is replayed."""
        return self._rows.values()

    def why_unavailable(self) -> str | None:
        return None

    def build(
        self,
        kernels: Sequence[Kernel],
        arch: Arch,
        *,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        builds = [self._build(kernel) for kernel in kernels]
        for build in builds if on_done else ():
            on_done(build)  # type: ignore[misc]  # only reached where on_done is given
        return builds

    def _build(self, kernel: Kernel) -> Build:
        row = self._by_kernel.get(kernel.key)
        if row is None:
            return Build(kernel=kernel, status="compile_error", message="it was never recorded")
        return Build(
            kernel=kernel,
            status="ok",
            seconds=row.compile_s or 0.0,
            was_cached=True,
            resources=Resources(
                registers=row.registers or 0,
                spills=row.spills or 0,
                smem_bytes=row.smem_bytes or 0,
                threads=row.threads or 0,
            ),
        )

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> ReplayPlan:
        row = self._rows.get((problem.key, kernel.key))
        if row is None:
            raise ExecutionError(f"{kernel.name} was never recorded on this problem")
        return ReplayPlan(kernel, problem, row)
