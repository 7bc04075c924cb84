"""Sweeps that go as they should: leaders, resuming, two at once, the command, real kernels."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tilewise
from tilewise.cli import session
from tilewise.cli.session import Session, with_vendor
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.data.journal import read_journal
from tilewise.data.store import Store
from tilewise.errors import InputError
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Options, Summary, sweep

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import recording  # noqa: E402

PROBLEMS, KERNELS = 6, 5


@pytest.fixture(scope="session")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "tape"
    recording.record(path, problem_count=PROBLEMS, kernel_count=KERNELS, seed=7)
    return path


def replay(
    store: Path,
    tape: Path,
    *,
    problems: int = PROBLEMS,
    workers: int = 1,
    on_event: Any = None,
    without: int = 0,
) -> Summary:
    config = WorkerConfig(engines=(), policy=recording.POLICY, replay=str(tape))
    return sweep(
        *(store, recording.problems(problems), recording.kernels(KERNELS)[without:]),
        *(LocalExecutor(config, workers=workers), recording.POLICY),
        options=Options(give_up_after=0),
        on_event=on_event or (lambda event: None),
    )


def first_pass(store: Path) -> Counter[str]:
    return Counter(r.key for r in Store(store).measurements(latest=False) if r.stage == "first")


def test_a_replayed_sweep_tells_what_was_recorded(tape: Path, tmp_path: Path) -> None:
    summary = replay(tmp_path, tape)
    assert summary.remaining == summary.workers_lost == 0
    assert summary.by_status["out_of_memory"]  # recorded failures are told, not tried again
    recorded = {r.key: (r.status, r.time_us) for r in Store(tape).measurements()}
    found = {r.key: (r.status, r.time_us) for r in Store(tmp_path).measurements()}
    assert found == recorded


def test_leaders_are_measured_again_and_their_last_time_holds(tape: Path, tmp_path: Path) -> None:
    replay(tmp_path, tape)
    rows = list(Store(tmp_path).measurements(latest=False))
    again = [r for r in rows if r.stage == "leader"]
    assert again
    assert {r.attempt for r in again} == {1}
    for problem in {r.problem_key for r in again}:
        times = [r.time_us for r in rows if r.problem_key == problem and r.time_us is not None]
        leaders = [r.time_us for r in again if r.problem_key == problem]
        assert len(leaders) >= 2
        assert min(times) in leaders
    assert replay(tmp_path, tape).rows == 0  # confirmed once is confirmed


def test_a_longer_list_measures_only_what_is_new(tape: Path, tmp_path: Path) -> None:
    first = replay(tmp_path, tape, problems=4)
    second = replay(tmp_path, tape)
    assert second.known == 4 * KERNELS
    assert set(first_pass(tmp_path).values()) == {1}
    assert len(first_pass(tmp_path)) == PROBLEMS * KERNELS
    assert first.rows + second.rows == len(list(Store(tmp_path).measurements(latest=False)))


def test_several_workers_share_the_work(tape: Path, tmp_path: Path) -> None:
    replay(tmp_path, tape, workers=3)
    assert len(first_pass(tmp_path)) == PROBLEMS * KERNELS
    assert set(first_pass(tmp_path).values()) == {1}


@pytest.mark.parametrize("without", [0, 1])
def test_two_sweeps_at_once_measure_nothing_twice(tape: Path, tmp_path: Path, without: int) -> None:
    """Started together on one store, with equal kernels or not; neither is where the other is."""
    gate = threading.Barrier(2)
    done: list[Summary] = []

    def run(without: int) -> None:
        def together(event: dict[str, Any]) -> None:
            if event["event"] == "start":
                gate.wait(timeout=600)

        done.append(replay(tmp_path, tape, on_event=together, without=without))

    threads = [threading.Thread(target=run, args=(n,)) for n in (0, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=900)
    assert len(done) == 2
    assert [s.remaining for s in done] == [0, 0]  # what the other has measured is not to go
    rows = list(Store(tmp_path).measurements(latest=False))
    assert len({r.identity for r in rows}) == len(rows)
    assert len(first_pass(tmp_path)) == PROBLEMS * KERNELS
    assert sum(s.rows for s in done) == len(rows)


def test_a_journal_folded_while_others_look_is_not_missed(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are in a shard then, which was not there when the files were listed."""
    done = recording.problems(PROBLEMS)[0].key

    def meanwhile(store: Store, name: str) -> Any:
        """Has another run measure and fold the first problem just before it is claimed."""
        claimed = claim(store, name)
        if name == done[:32] and not folding:
            writer = Store.writer(store)
            writer.append([r for r in Store(tape).measurements() if r.problem_key == done])
            folding.append(writer)
        return claimed

    def read(path: Path, offset: int = 0) -> Any:
        if folding and path == folding[0]._journal.file.path:
            folding[0].close()
        return read_journal(path, offset)

    claim, folding = Store.claim, list[Any]()
    monkeypatch.setattr(Store, "claim", meanwhile)
    monkeypatch.setattr("tilewise.sweep.run.read_journal", read)
    replay(tmp_path, tape)
    assert folding
    assert set(first_pass(tmp_path).values()) == {1}


def test_an_error_in_the_middle_leaves_no_claim_behind(tape: Path, tmp_path: Path) -> None:
    """The next sweep of the same process would wait for it for ever."""

    def fail(event: dict[str, Any]) -> None:
        if event["event"] == "row":
            raise RuntimeError("listener failed")

    with pytest.raises(RuntimeError, match="listener failed"):
        replay(tmp_path, tape, on_event=fail)
    assert replay(tmp_path, tape).remaining == 0
    assert len(first_pass(tmp_path)) == PROBLEMS * KERNELS


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}


def command(store: Path, tape: Path, problems: Path) -> list[str]:
    words = ["--op", "gemm", "--problems", str(problems), "--replay", str(tape), "--json"]
    return [sys.executable, "-m", "tilewise", "sweep", str(store), *words, "--give-up-after", "0"]


@pytest.fixture(scope="session")
def problem_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "problems.json"
    path.write_text(json.dumps([p.to_dict() for p in recording.problems(PROBLEMS)]))
    return path


def test_the_command_streams_events(tape: Path, tmp_path: Path, problem_file: Path) -> None:
    ended = subprocess.run(
        command(tmp_path, tape, problem_file), env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    assert events[0]["total"] == PROBLEMS * KERNELS
    rows = [e for e in events if e["event"] == "row"]
    assert len(rows) == events[-1]["rows"]
    assert events[-1]["remaining"] == 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_and_the_rest_is_done_later(
    stop: signal.Signals, tape: Path, tmp_path: Path, problem_file: Path
) -> None:
    words = command(tmp_path, tape, problem_file)
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "row":
            process.send_signal(stop)
            break
    last = [line, *process.stdout.readlines()][-1]
    process.stdout.close()
    assert process.wait(timeout=600) in (0, 130)  # 0 where it was done before the signal came
    assert json.loads(last)["event"] == "end"
    assert not Store(tmp_path).journals()
    replay(tmp_path, tape)
    assert set(first_pass(tmp_path).values()) == {1}
    assert len(first_pass(tmp_path)) == PROBLEMS * KERNELS


def test_a_lock_that_is_not_ours_is_refused_before_any_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has made the folder of the locks: here, as a link to elsewhere."""
    (tmp_path / f"tilewise-{os.getuid()}").symlink_to(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    policy = Policy(threads=1)
    config = WorkerConfig(engines=("vendor",), policy=policy, kind="cpu")
    with pytest.raises(InputError, match=r"cannot lock the device: .*belongs to somebody else"):
        sweep(
            *(tmp_path / "store", recording.problems(1)),
            [VendorKernel(op_name="gemm", library="numpy")],
            *(LocalExecutor(config), policy),
        )
    assert not (tmp_path / "store").exists()


def test_waiting_for_the_device_is_not_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders are busy from the lock on; the clock here runs only while the lock is waited for."""
    from tilewise.sweep import worker as worker_module
    from tilewise.sweep.bench import Outcome

    clock = [100.0]
    monkeypatch.setattr(worker_module.time, "perf_counter", lambda: clock[0])
    channel = io.StringIO()
    worker = worker_module.Worker({"policy": recording.POLICY.to_dict()}, channel)

    @contextmanager
    def device(first: int) -> Any:
        def measure() -> None:
            clock[0] += 1000.0

        yield worker_module.Turn(lambda: None, measure, lambda: None)

    class Bench:
        def run_in_turn(self, kernels: Any, problem: Any, launched: Any) -> list[Outcome]:
            for index in (0, 1, 0, 1):
                launched(index)
                clock[0] += 1.0
            return [Outcome(status="ok")] * 2

    monkeypatch.setattr(worker, "device", device)
    monkeypatch.setattr(worker, "kernel", lambda values: values)
    monkeypatch.setattr(worker, "bench", Bench())
    items = [{"id": at, "kernel": {}} for at in (5, 6)]
    worker.leaders({"problem": recording.problems(1)[0].to_dict(), "items": items})
    told = [json.loads(line) for line in channel.getvalue().splitlines()]
    results = [answer for answer in told if answer["event"] == "result"]
    assert [answer["busy_s"] for answer in results] == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_kernels_of_a_batch_take_turns_one_by_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU what is not timed is told apart; on a CPU workers have cores of their own."""
    from tilewise.sweep import worker as worker_module
    from tilewise.sweep.bench import Outcome

    order: list[str] = []
    channel = io.StringIO()
    given = {"policy": recording.POLICY.to_dict(), "kind": kind}
    worker = worker_module.Worker(given, channel)

    @contextmanager
    def device(first: int) -> Any:
        steps = ("prepare", "measure", "rest")
        yield worker_module.Turn(*(lambda step=step: order.append(step) for step in steps))
        order.append("end")

    class Bench:
        def run(self, kernel: Any, problem: Any, launched: Any, preparing: Any) -> Outcome:
            preparing()
            launched()
            return Outcome(status="ok")

    monkeypatch.setattr(worker, "device", device)
    monkeypatch.setattr(worker, "kernel", lambda values: values)
    monkeypatch.setattr(worker, "bench", Bench())
    items = [{"id": at, "kernel": {}} for at in (5, 6)]
    worker.batch({"problem": recording.problems(1)[0].to_dict(), "items": items})
    one = ["prepare", "measure", "rest"] if kind == "gpu" else ["measure", "rest"]
    assert order == [*one, *one, "end"]
    told = [json.loads(line) for line in channel.getvalue().splitlines()]
    assert [answer["id"] for answer in told if answer["event"] == "launch"] == [5, 6]


def test_a_sweep_without_usable_kernels_says_why(tape: Path, tmp_path: Path) -> None:
    config = WorkerConfig(engines=("vendor",), policy=Policy(threads=1), kind="cpu")
    with pytest.raises(InputError, match="can run on"):
        sweep(
            *(tmp_path, recording.problems(1), recording.kernels(1)),
            *(LocalExecutor(config), Policy(threads=1)),
        )


def test_the_vendor_stays_unless_engines_are_filtered() -> None:
    pool = recording.kernels(2)

    def vendors(expression: str, engines: list[str]) -> int:
        found = with_vendor(pool, "gemm", engines, expression)
        return sum(kernel.engine == "vendor" for kernel in found)

    both = ["cpu", "vendor"]
    assert vendors("", both) == vendors("tile_m >= 64", both) == 2
    assert vendors("engine == 'vendor'", both) == 2
    assert vendors("engine == 'cpu'", both) == vendors("engine == 'cpu' and tile_m > 8", both) == 0
    assert vendors("", ["cpu"]) == 0


def test_a_library_that_is_not_installed_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` ended with 1 beside NumPy alone, since PyTorch's routine could not be built."""
    monkeypatch.setattr(session, "find_spec", {"numpy": "here"}.get)
    found = Session.of("x86_avx2", "", 5.0).with_vendors("gemm", recording.kernels(2))
    assert [k.name for k in found if k.engine == "vendor"] == ["gemm_vendor_numpy"]


def test_a_sweep_without_legal_kernels_says_why(tape: Path, tmp_path: Path) -> None:
    config = WorkerConfig(engines=(), policy=recording.POLICY, replay=str(tape))
    with pytest.raises(InputError, match=r"too round \(2 kernels\)"):
        sweep(
            *(tmp_path, recording.problems(1), recording.kernels(2)),
            *(LocalExecutor(config), recording.POLICY),
            why_unusable=lambda kernel, problem, arch: "it is too round",
        )


def test_kernels_may_depend_on_the_device(tape: Path, tmp_path: Path) -> None:
    seen: list[Arch] = []

    def kernels(arch: Arch) -> list[Kernel]:
        seen.append(arch)
        return recording.kernels(2)

    config = WorkerConfig(engines=(), policy=recording.POLICY, replay=str(tape))
    sweep(tmp_path, recording.problems(1), kernels, LocalExecutor(config), recording.POLICY)
    assert [arch.device for arch in seen] == ["a recorded CPU"]


def test_only_what_is_left_to_measure_is_compiled_ahead(tape: Path, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    class Noting(LocalExecutor):
        def run(self, next_work: Any, kernels: Any, *others: Any) -> Any:
            asked.append([key for key, _ in kernels])
            return super().run(next_work, kernels, *others)

    every = recording.kernels(KERNELS)
    few = every[1:3]

    def why(kernel: Kernel, problem: object, arch: Arch) -> str | None:
        return None if kernel in few else "it is not among the few"

    for _ in range(2):
        config = WorkerConfig(engines=(), policy=recording.POLICY, replay=str(tape))
        sweep(
            *(tmp_path, recording.problems(2), every, Noting(config), recording.POLICY),
            why_unusable=why,
        )
    assert asked == [[kernel.key for kernel in few], []]
