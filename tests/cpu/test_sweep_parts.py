"""The parts of a sweep on their own: devices, limits, inputs, the vendor, progress."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.cli import progress
from tilewise.cli.console import PlainConsole
from tilewise.cli.progress import progress_bar
from tilewise.cli.session import with_vendor
from tilewise.cli.sweep import tell
from tilewise.core.arch import Arch, load_arch
from tilewise.core.measurement import Policy
from tilewise.data.store import Store
from tilewise.engines.device import detect
from tilewise.errors import ExecutionError, InputError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.bench import classify, random_values
from tilewise.sweep.bench_cpu import CpuBench
from tilewise.sweep.crew import WorkerConfig, judged
from tilewise.sweep.device_info import as_arch
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Summary, sweep


def test_more_workers_than_can_be_are_refused() -> None:
    with pytest.raises(InputError, match="--workers is 1000000; give at most"):
        LocalExecutor(WorkerConfig(engines=(), policy=Policy()), workers=10**6)


@pytest.mark.parametrize(
    ("variables", "files", "expected"),
    [
        ({}, ["nvidia0", "nvidia1", "nvidiactl"], [("CUDA", "0"), ("CUDA", "1")]),
        ({"CUDA": "3,GPU-ab"}, ["nvidia0", "nvidiactl"], [("CUDA", "3"), ("CUDA", "GPU-ab")]),
        ({"CUDA": "1,-1,0"}, ["nvidia0", "nvidia1"], [("CUDA", "1")]),
        ({"CUDA": ""}, ["nvidia0", "nvidiactl"], []),
        ({"CUDA": "0"}, [], []),
        ({}, ["dxg"], [("CUDA", "0")]),
        ({}, ["kfd"], [("HIP", "0"), ("HIP", "1")]),
        ({"HIP": "1"}, ["kfd"], [("HIP", "1")]),
        ({"CUDA": "1"}, ["kfd"], [("HIP", "1")]),
        ({"ROCR": "1"}, ["kfd"], [("HIP", "0")]),
        ({"ROCR": ""}, ["kfd"], []),
        ({"HIP": ""}, ["kfd"], []),
        ({}, [], []),
    ],
)
def test_gpus_are_counted_without_touching_them(
    variables: dict[str, str],
    files: list[str],
    expected: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewise.sweep.device_info import visible_gpus

    for name in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    for at, gpu_id in enumerate((0, 4711, 815)):  # the first is the processor
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{at}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
    assert visible_gpus(tmp_path) == [{f"{n}_VISIBLE_DEVICES": gpu} for n, gpu in expected]


def test_a_device_stands_in_for_an_older_one_only() -> None:
    newer = load_arch("x86_avx512").with_figures(device="mine", compute_units=3)
    older = as_arch(newer, "x86_avx2")
    assert (older.name, older.device, older.compute_units) == ("x86_avx2", "mine", 3)
    assert as_arch(newer, "") is newer
    for other in ("sm_90", "gfx942"):
        with pytest.raises(InputError, match="cannot run its kernels"):
            as_arch(newer, other)
    with pytest.raises(InputError, match="cannot run its kernels"):
        as_arch(load_arch("x86_avx2"), "x86_avx512")


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem(m=33, n=17, k=40, dtype="fp32"),
        GemmProblem(m=33, n=17, k=40, dtype="fp32", layout="ccr", batch=2),
        GemmProblem(m=33, n=17, k=40, dtype="fp16"),
        GemmProblem(m=33, n=17, k=40, dtype="bf16"),
        GemmProblem(m=33, n=17, k=40, dtype="int8"),
        ConvProblem(n=2, c=4, k=6, h=7, w=5, y=3, x=3, pad_h=1, pad_w=1),
        ConvProblem(n=2, c=4, k=6, h=7, w=5, y=3, x=3, direction="bwd_data", layout="nchw"),
        ConvProblem(n=2, c=4, k=6, h=7, w=5, y=3, x=3, direction="bwd_weight", g=2),
    ],
    ids=lambda p: f"{p.op}-{p.dtype}-{p.layout}",
)
def test_the_vendor_is_measured_like_any_other(problem: Any) -> None:
    from tilewise.engines.vendor import VendorEngine

    policy = Policy(time_ms=1.0, warmup=1, max_repeats=5, threads=1)
    bench = CpuBench(detect("cpu"), policy, {"vendor": VendorEngine()})
    kernel = VendorKernel(op_name=problem.op, library="torch")
    launched = []
    outcome = bench.run(kernel, problem, lambda: launched.append(True))
    assert (outcome.status, outcome.message) == ("ok", "")
    assert launched == [True]
    assert outcome.timing is not None
    assert outcome.timing.time_us > 0


@pytest.mark.parametrize("searches", [False, True])
def test_what_is_not_timed_is_done_before_the_launch(searches: bool) -> None:
    """Laying out, once a problem, and a library's search, each time it is asked for one."""
    from tilewise.engines.vendor import VendorEngine

    order: list[str] = []

    class Engine(VendorEngine):
        def plan(self, kernel: Any, problem: Any, arch: Any) -> Any:
            plan = super().plan(kernel, problem, arch)
            execute = plan.execute
            plan.execute = lambda *a: (order.append("execute"), execute(*a))  # type: ignore[method-assign,func-returns-value]
            return plan

    class Searching(CpuBench):
        def searches(self, plan: Any) -> bool:
            return searches

    policy = Policy(time_ms=0.1, warmup=1, max_repeats=5, threads=1)
    bench = Searching(detect("cpu"), policy, {"vendor": Engine()})
    kernel = VendorKernel(op_name="gemm", library="numpy")
    problem = GemmProblem(m=8, n=8, k=8, dtype="fp32")
    for _ in range(2):
        outcome = bench.run(
            kernel, problem, lambda: order.append("launch"), lambda: order.append("prepare")
        )
        assert outcome.status == "ok"
    if searches:
        assert order == ["prepare", "execute", "launch", "execute"] * 2
    else:
        assert order == ["prepare", "launch", "execute", "launch", "execute"]


def test_a_filter_that_leaves_no_kernel_is_refused_unless_it_is_about_engines() -> None:
    both = ["cpu", "vendor"]
    with pytest.raises(InputError, match="--filter 'mr == 999' leaves no kernel of gemm; "):
        with_vendor([], "gemm", both, "mr == 999")
    assert len(with_vendor([], "gemm", both, "engine == 'vendor'")) == 2
    assert len(with_vendor([], "gemm", both, None)) == 2  # no pool here, and nothing was filtered


def test_a_held_device_is_waited_for_not_taken_for_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sweep holds the device for longer than a kernel may be prepared."""
    import fcntl
    import tempfile
    import time

    from tilewise.sweep.device_info import lock_path
    from tilewise.sweep.supervisor import Limits

    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a device of its own for this test
    monkeypatch.setattr(tempfile, "tempdir", None)
    policy = Policy(time_ms=1.0, threads=1)
    config = WorkerConfig(
        engines=("vendor",), policy=policy, kind="cpu", limits=Limits(prepare_s=4.0)
    )
    kernels = [VendorKernel(op_name="gemm", library="numpy")]
    with lock_path("cpu").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        events: list[str] = []

        def listen(event: dict[str, Any]) -> None:
            events.append(event["event"])
            if event["event"] == "start":
                free.start()

        def release() -> None:
            time.sleep(6)
            fcntl.flock(lock, fcntl.LOCK_UN)

        free = threading.Thread(target=release)
        sweep(
            *(tmp_path / "store", [GemmProblem(m=8, n=8, k=8)], kernels),
            *(LocalExecutor(config), policy),
            on_event=listen,
        )
        free.join()
    assert [r.status for r in Store(tmp_path / "store").measurements()] == ["ok"]
    assert "worker_lost" not in events


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ({"registers": 255, "smem_bytes": 227 << 10, "threads": 256, "spills": 8}, ""),
        ({"registers": 64, "threads": 1024}, ""),
        ({"registers": 256, "threads": 32}, "256 registers; sm_90 has 255"),
        ({"smem_bytes": (227 << 10) + 1}, "232449 bytes of shared memory; sm_90 allows 232448"),
        ({"threads": 1025}, "1025 threads; sm_90 allows 1024"),
        ({"registers": 65, "threads": 1024}, "65 registers for each of 1024 threads"),
    ],
)
def test_a_kernel_that_needs_more_than_the_device_has_is_not_launched(
    needs: dict[str, int], why: str
) -> None:
    found = judged({"status": "ok", **needs}, load_arch("sm_90"))
    assert (found["status"], found.get("message", "")) == ("over_limit" if why else "ok", why)
    assert judged({"status": "ok", **needs}, load_arch("x86_avx2"))["status"] == "ok"


def test_inputs_are_random_seeded_and_never_zero() -> None:
    for dtype in ("fp32", "int8"):
        values = random_values((200, 300), dtype, seed=5)
        assert np.array_equal(values, random_values((200, 300), dtype, seed=5))
        assert not np.array_equal(values, random_values((200, 300), dtype, seed=6))
        assert np.count_nonzero(values) == values.size
        assert len(np.unique(values)) > 100


@pytest.mark.parametrize("sizes", [(1 << 62,), (1 << 40, 1 << 40), (1 << 64,), (1 << 50,)])
def test_sizes_beyond_any_memory_are_told_as_such(sizes: tuple[int, ...]) -> None:
    with pytest.raises(Exception) as told:  # NumPy has a kind for each of them
        np.empty(sizes, np.float32)
    assert classify(told.value, "launch_error") == "out_of_memory"
    assert classify(ValueError("operands do not fit"), "launch_error") == "launch_error"


def test_tensors_beyond_this_machines_memory_are_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = CpuBench(detect("cpu"), Policy(), {})
    problem = GemmProblem(m=100, n=100, k=100)
    assert bench.lay_out(problem).out.shape == (100, 100)
    monkeypatch.setattr("tilewise.sweep.bench_cpu.memory_bytes", lambda: 300_000)
    with pytest.raises(MemoryError, match="need 840,000 bytes; there are 300,000"):
        bench.lay_out(problem)
    told = ExecutionError("gemm over 1000 bytes cannot be addressed")
    assert classify(told, "compile_error") == "out_of_memory"


def test_devices_travel_as_plain_data() -> None:
    live = detect("cpu")
    there: Arch = Arch.from_dict(json.loads(json.dumps(live.to_dict())))
    assert there == live


def test_a_budget_that_ends_before_the_first_row_is_not_called_nothing_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell(Summary(stopped="budget", remaining=7))
    told = capsys.readouterr().out
    assert "none yet" in told and "7 to go" in told and "nothing" not in told


def test_a_finished_bar_has_no_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    with progress_bar() as update:
        update({"event": "start", "total": 1, "known": 0, "skipped": 0, "forgotten": 0})
        update({"event": "row", "status": "crash", "stage": "first"})
    told = " ".join(capsys.readouterr().err.split())
    assert "1/1" in told and "left 0:00:00" in told and "crash 1" in told


def test_a_refusal_leaves_no_bar_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)  # the machine may be busy
    with pytest.raises(InputError), progress_bar():
        raise InputError("no such thing")
    assert not capsys.readouterr().err.strip()


def test_a_log_is_told_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, is_measuring = [], threading.Event()

    def written(line: str, **_: Any) -> None:
        lines.append(line)
        if "1 of 3" in line:
            is_measuring.set()

    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    monkeypatch.setattr(progress.err, "print", written)
    with progress_bar() as update:
        update({"event": "start", "total": 3, "known": 5, "skipped": 0, "forgotten": 0})
        update({"event": "row", "status": "crash", "stage": "first"})
        assert is_measuring.wait(60), lines
    assert lines[0] == "5 measurements are there already"
    assert lines[-1] == "measuring: 1 of 3; crash 1"


def test_what_is_soon_over_leaves_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)
    with progress.telling("reading") as tell:
        tell("judging")
    assert not capsys.readouterr().err
