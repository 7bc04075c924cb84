"""Kills sweeps at random instants and resumes them; run by the test of the same subject.

One process imports everything once and forks the victims: a child is a whole orchestrator with
workers of its own, and dies by SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet  # noqa: F401  # imported before the forks
import recording

from tilewise.data import store as store_module
from tilewise.data.store import Store
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Options, sweep

PROBLEMS, KERNELS = 30, 12
store_module.ROWS_PER_SHARD = 40  # folding is then as likely to be hit as writing


def orchestrate(store: Path, tape: Path, pipe: int) -> None:
    def tell(event: dict[str, object]) -> None:
        if event["event"] in ("start", "end"):
            os.write(pipe, b"!")

    config = WorkerConfig(engines=(), policy=recording.POLICY, replay=str(tape))
    sweep(
        *(store, recording.problems(PROBLEMS), recording.kernels(KERNELS)),
        *(LocalExecutor(config), recording.POLICY),
        options=Options(give_up_after=0),
        on_event=tell,
    )


class Victim:
    """A forked orchestrator that tells when measuring starts and ends."""

    def __init__(self, store: Path, tape: Path) -> None:
        self.pipe, inner = os.pipe()
        self.process = os.fork()
        if self.process:
            os.close(inner)
            return
        code = 1
        try:
            orchestrate(store, tape, inner)
            code = 0
        finally:
            os._exit(code)

    def wait_for_news(self) -> None:
        os.read(self.pipe, 1)

    def end(self) -> int:
        """The status it ended with."""
        status = os.waitpid(self.process, 0)[1]
        os.close(self.pipe)
        return status


def content(store: Path) -> tuple[list[tuple[str, int, str, str]], int]:
    """Every row's identity and status, and how many rows there are."""
    rows = list(Store(store).measurements(latest=False))
    return sorted({(r.key, r.attempt, r.stage, r.status) for r in rows}), len(rows)


def orphans(folder: Path) -> list[str]:
    """Processes that belong to this test's sweeps, after a moment of grace."""
    mark = f"KILL_SWEEPS={folder}".encode()
    deadline = time.monotonic() + 60
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes() and process.name != str(os.getpid()):
                    found.append(process.name)
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def main(folder: Path, kills: int, seed: int) -> None:
    os.environ["KILL_SWEEPS"] = str(folder)  # every worker inherits it
    tape, calm = folder / "tape", folder / "calm"
    recording.record(tape, problem_count=PROBLEMS, kernel_count=KERNELS)
    began = time.monotonic()
    victim = Victim(calm, tape)
    victim.wait_for_news()
    startup = time.monotonic() - began
    victim.wait_for_news()
    measuring = time.monotonic() - began - startup
    assert victim.end() == 0
    expected, count = content(calm)
    assert count == len(expected) >= PROBLEMS * KERNELS
    draw = random.Random(seed)
    killed, midway, trial = 0, 0, 0
    while killed < kills:
        store = folder / f"killed-{trial}"
        trial += 1
        for _ in range(2):
            victim = Victim(store, tape)
            if draw.random() < 0.2:
                time.sleep(draw.uniform(0, startup))
            else:
                victim.wait_for_news()
                time.sleep(draw.uniform(0, measuring))
            os.kill(victim.process, signal.SIGKILL)
            if os.WIFSIGNALED(victim.end()):
                killed += 1
                left = content(store)[1] if store.exists() else 0
                midway += 0 < left < count
        # Now and then two resume at once; neither may measure what the other does.
        resumed = [Victim(store, tape) for _ in range(2 if trial % 5 == 0 else 1)]
        assert [victim.end() for victim in resumed] == [0] * len(resumed)
        found, rows = content(store)
        assert rows == len(found), "a row was measured twice"
        assert found == expected, set(expected) ^ set(found)
        assert not Store(store).journals()
        assert not list(store.glob(".*"))
        shutil.rmtree(store)
    assert not orphans(folder), "workers outlived their orchestrator"
    told = {"killed": killed, "midway": midway, "rows": count, "measuring_s": measuring}
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
