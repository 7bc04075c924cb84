"""Kernels are compiled ahead for the problems of a sweep, not only as such."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from gemm_kernels import gemm_kernel

from tilewise.core.arch import load_arch
from tilewise.core.measurement import Policy
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.sweep.compiling import Builder
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.process import WorkerGoneError

pytest.importorskip("triton")

KERNEL = gemm_kernel(family="gemv", dtype="bf16", tile_m=4, tile_n=1, tile_k=512, stages=1)


def compiled(folder: Path) -> int:
    """Objects in the cache, each with its key beside it."""
    return sum(1 for _ in (folder / "cache" / "gpu").glob("[!.]*"))


def test_what_a_problem_needs_is_compiled_before_it_is_measured(tmp_path: Path) -> None:
    config = WorkerConfig(
        engines=("triton",),
        policy=Policy(),
        kind="gpu",
        jobs=1,
        environment={"TILEWISE_CACHE_DIR": str(tmp_path / "cache")},
    )
    builder = Builder(lambda: config.spawn("build"), load_arch("sm_90").to_dict(), jobs=1)
    try:
        facts = builder.wait([(KERNEL.key, KERNEL.to_dict())])
        assert facts[KERNEL.key]["status"] == "ok"
        assert compiled(tmp_path) == 1
        unusual = GemmProblem(m=1, n=333, k=1001, dtype="bf16")
        builder.prepare([(unusual.to_dict(), [KERNEL.key, "of a kernel that was never built"])])
        end = time.monotonic() + 600
        while compiled(tmp_path) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        assert compiled(tmp_path) == 2
    finally:
        builder.close()


class FakeProcess:
    """Builds everything at once, and dies of compiling ahead for a problem with m=1."""

    def wait_ready(self) -> None: ...

    def kill(self) -> None: ...

    signal_kill = kill

    def send(self, order: dict[str, Any]) -> None:
        self.is_fatal = any(p["M"] == 1 for p, _ in order.get("problems", []))
        self.answers = [{"event": "end"}]
        if order["do"] == "build":
            self.answers.insert(0, {"event": "built", "id": 0, "status": "ok"})
        else:
            AHEAD_FOR.append(len(order["problems"]))

    def receive(self, deadline: float) -> dict[str, Any]:
        if self.is_fatal:
            raise WorkerGoneError
        return self.answers.pop(0)

    def ending(self) -> tuple[str, str]:
        return "crash", "the worker was killed by SIGSEGV"


AHEAD_FOR: list[int] = []


def test_a_crash_ahead_costs_its_own_problems_alone() -> None:
    AHEAD_FOR.clear()
    lost: list[str] = []
    spawn: Any = FakeProcess
    builder = Builder(spawn, {}, on_lost=lost.append)
    problems = [(GemmProblem(m=m, n=8, k=8).to_dict(), [KERNEL.key]) for m in range(1, 251)]
    builder.prepare(problems)
    builder.wait([(KERNEL.key, KERNEL.to_dict())])
    end = time.monotonic() + 300
    while len(AHEAD_FOR) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    builder.close()
    assert AHEAD_FOR == [100, 100, 50]
    assert len(lost) == 1 and "100 problems" in lost[0] and "SIGSEGV" in lost[0]
