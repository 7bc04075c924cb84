"""Sabotaged kernels through real workers: each costs one measurement, and only its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest

import tilewise
from tilewise.core.measurement import Policy
from tilewise.data.store import Store
from tilewise.errors import MachineError
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.sweep import run as run_module
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Options, Summary, sweep
from tilewise.sweep.supervisor import Limits

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sabotage import EXPECTED, SabotageKernel, why_unusable  # noqa: E402

POLICY = Policy(time_ms=1.0, warmup=1, min_repeats=2, max_repeats=5, rounds=2, threads=1)
CROWDED = replace(POLICY, noise=1e6)
"""Under which every kernel that works is a leader."""
PROBLEMS = [GemmProblem(m=7, n=5, k=9), GemmProblem(m=16, n=8, k=4)]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    target = tmp_path_factory.mktemp("sabotage") / "sabotage.so"
    # Unoptimised: a compiler that sees through the sabotage removes it.
    source = HERE / "sabotage.c"
    subprocess.run(["cc", "-O0", "-w", "-shared", "-fPIC", source, "-o", target], check=True)
    return target


def run(
    store: Path,
    library: Path,
    deeds: list[str],
    *,
    problems: list[GemmProblem] = PROBLEMS,
    batch: int = 20,
    policy: Policy = POLICY,
    timeout_s: float = 2.0,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    **options: object,
) -> Summary:
    """Sweeps kernels with the given deeds over the problems."""
    config = WorkerConfig(
        engines=("sabotage:SabotageEngine",),
        policy=policy,
        kind="cpu",
        limits=Limits(timeout_s=timeout_s, prepare_s=60.0, batch=batch),
        memory_bytes=512 << 20,
        environment={
            "SABOTAGE_LIBRARY": str(library),
            "SABOTAGE_MARK": f"{store}.mark",
            "PYTHONPATH": f"{HERE}:{HERE.parent.parent / 'src'}",
        },
    )
    kernels = [SabotageKernel(deed=deed, serial=at) for at, deed in enumerate(deeds)]
    return sweep(
        *(store, problems, kernels, LocalExecutor(config), policy),
        options=Options(**options),  # type: ignore[arg-type]
        why_unusable=why_unusable,
        on_event=on_event,
    )


def outcomes(store: Path) -> dict[tuple[str, str], str]:
    """(problem, kernel) -> status of the first pass, every row counted once."""
    rows = [r for r in Store(store).measurements(latest=False) if r.stage != "leader"]
    found = {(r.problem, r.kernel): r.status for r in rows}
    assert len(found) == len(rows)
    return found


def test_a_bad_kernel_costs_its_own_measurement_alone(library: Path, tmp_path: Path) -> None:
    deeds = [word for deed in EXPECTED for word in (deed, "fine")]
    summary = run(tmp_path, library, deeds, problems=PROBLEMS[:1], give_up_after=0, batch=7)
    found = outcomes(tmp_path)
    assert len(found) == len(deeds)
    for (_, kernel), status in found.items():
        deed = next(d for d in EXPECTED if kernel.startswith(f"gemm_sabotage_{d}_s"))
        assert status == EXPECTED[deed], kernel
    assert summary.remaining == 0
    assert summary.workers_lost >= 7
    for row in Store(tmp_path).measurements(latest=False):
        assert (row.time_us is not None) == row.is_ok
        assert row.is_ok or row.message


@pytest.mark.parametrize(
    ("culprit", "victim"),
    [
        ("trap", "fine"),  # whatever runs next in that process crashes
        ("snare", "fine"),  # or hangs
        ("leak", "thirsty"),  # or finds no memory
        ("spoil", "fine"),  # or finds other inputs
    ],
)
def test_an_innocent_kernel_is_not_blamed_for_a_spoilt_worker(
    culprit: str, victim: str, library: Path, tmp_path: Path
) -> None:
    """Neither in the first pass nor among leaders, where all share a worker."""
    run(tmp_path, library, [victim, culprit, victim], problems=PROBLEMS[:1], policy=CROWDED)
    rows = list(Store(tmp_path).measurements(latest=False))
    assert [(r.kernel, r.message) for r in rows if not r.is_ok] == []
    assert Counter(r.stage for r in rows) == {"first": 3, "leader": 3}


@pytest.mark.parametrize("deed", ["struck", "struck_build"])
def test_a_process_killed_from_outside_is_replaced(
    deed: str, library: Path, tmp_path: Path
) -> None:
    run(tmp_path / "store", library, [deed, "fine", deed], policy=CROWDED)
    assert set(outcomes(tmp_path / "store").values()) == {"ok"}
    assert (tmp_path / "store.mark").exists()


DEEDS = ["fine", "segfault", "fine"]


def die_at(event: str, store: str, library: str) -> None:
    """Sweeps until something happens for the second time, or only ever once; then is gone."""
    wanted = 1 if event == "start" else 2

    def struck(seen: dict[str, Any]) -> None:
        nonlocal wanted
        wanted -= seen["event"] == event
        if wanted == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    run(Path(store), Path(library), DEEDS, on_event=struck)


@pytest.mark.parametrize("event", ["start", "built", "row", "problem_done"])
def test_a_sweep_killed_at_any_stage_is_carried_on(
    event: str, library: Path, tmp_path: Path
) -> None:
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_sweep_faults as t; "
    code += f"t.die_at({event!r}, {str(tmp_path / 'store')!r}, {str(library)!r})"
    path = os.pathsep.join((str(HERE), str(Path(tilewise.__file__).parent.parent)))
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    assert ended.returncode == -signal.SIGKILL
    before = outcomes(tmp_path / "store")
    run(tmp_path / "store", library, DEEDS)
    found = outcomes(tmp_path / "store")
    assert len(found) == len(DEEDS) * len(PROBLEMS)
    assert before.items() <= found.items()
    assert Counter(found.values()) == {"ok": 4, "crash": 2}


def test_a_worker_killed_again_and_again_stops_the_sweep(library: Path, tmp_path: Path) -> None:
    """And nobody is blamed: what was measured is kept, the rest is measured later."""
    with pytest.raises(MachineError, match="killed by SIGKILL, from outside"):
        run(tmp_path, library, ["fine", "vanish", "fine"], problems=PROBLEMS[:1])
    assert set(outcomes(tmp_path).values()) == {"ok"}


def test_a_leader_that_turns_out_wrong_is_wrong(library: Path, tmp_path: Path) -> None:
    """`fickle` is right in the first pass, and wrong among leaders and alone after that."""

    def again() -> Summary:
        # Nobody hangs here: a busy machine is given time, for a leader that is late is tried alone.
        deeds = ["fine", "fickle", "fine"]
        one = PROBLEMS[:1]
        return run(tmp_path / "store", library, deeds, problems=one, policy=CROWDED, timeout_s=60.0)

    again()
    rows = list(Store(tmp_path / "store").measurements(latest=False))
    failed = [(r.stage, r.status) for r in rows if not r.is_ok]
    assert failed == [("leader", "wrong_result")]
    assert Counter(r.stage for r in rows) == {"first": 3, "leader": 3}
    held = sorted(r.status for r in Store(tmp_path / "store").measurements())
    assert held == ["ok", "ok", "wrong_result"]
    assert again().rows == 0  # tried among leaders once is enough


def test_known_bad_kernels_are_skipped_and_retried_on_request(
    library: Path, tmp_path: Path
) -> None:
    deeds = ["fine", "segfault", "wrong"]
    first = run(tmp_path, library, deeds)
    assert first.by_status["crash"] == first.by_status["wrong_result"] == len(PROBLEMS)
    again = run(tmp_path, library, deeds)
    assert (again.rows, again.workers_lost) == (0, 0)
    retried = run(tmp_path, library, deeds, retry_failed=True)
    assert retried.rows == 2 * len(PROBLEMS)
    rows = list(Store(tmp_path).measurements(latest=False))
    assert {r.attempt for r in rows if r.stage == "retry"} == {1}
    assert len({r.identity for r in rows}) == len(rows)


def test_a_kernel_that_keeps_crashing_is_given_up(library: Path, tmp_path: Path) -> None:
    summary = run(tmp_path, library, ["fine", "abort"], give_up_after=1)
    assert summary.by_status["crash"] == 1
    assert len(outcomes(tmp_path)) == 2 * len(PROBLEMS) - 1
    again = run(tmp_path, library, ["fine", "abort"], give_up_after=1)
    assert (again.rows, again.skipped) == (0, 1)


def test_bad_kernels_are_remembered_under_another_policy(library: Path, tmp_path: Path) -> None:
    run(tmp_path, library, ["fine", "segfault"])
    summary = run(tmp_path, library, ["fine", "segfault"], policy=replace(POLICY, max_repeats=6))
    assert dict(summary.by_status).keys() == {"ok"}
    assert summary.skipped == len(PROBLEMS)


def test_the_budget_stops_in_time_and_keeps_rows(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still until there is a row: how long workers take to start varies."""
    clock = [0.0]
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time))

    def listen(event: dict[str, Any]) -> None:
        clock[0] += 10.0 * (event["event"] == "row")

    deeds = ["fine", *["sleep"] * 30]
    summary = run(tmp_path, library, deeds, give_up_after=0, budget_s=8.0, on_event=listen)
    assert summary.stopped == "budget"
    assert summary.remaining > len(deeds)
    assert 0 < summary.rows == len(list(Store(tmp_path).measurements(latest=False)))


def test_resources_and_provenance_are_recorded(library: Path, tmp_path: Path) -> None:
    run(tmp_path, library, ["fine"])
    for row in Store(tmp_path).measurements():
        assert row.compile_s == 0.01
        assert row.toolchain == "sabotage 1"
        assert row.arch.startswith(("x86", "cpu"))
        assert row.rel_error is not None
        assert row.rel_error < 1e-6
        assert row.tflops is not None
        assert row.gb_s is not None
        assert row.run_id
        assert row.measured_at > 1.7e9
