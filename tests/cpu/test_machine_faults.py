"""Faults of the machine: they stop a sweep or pass, and never become facts about kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewise
from tilewise.core.faults import fault_of
from tilewise.data.store import Store, write_rows
from tilewise.engines.toolchain import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
SRC = Path(tilewise.__file__).parent.parent
PROBLEMS = "M,N,K\n8,16,32\n24,16,8\n"
GOOD = 'exec {compiler} "$@"\n'
BAD_COMPILERS = {
    "says nothing": "exit 1\n",
    "does not link": "echo 'ld: cannot find -lc: No such file or directory' >&2; exit 1\n",
    "writes nothing": "exit 0\n",
    "writes garbage": 'echo garbage > "$last"\n',
    "writes half": '{compiler} "$@" && truncate -s 9000 "$last"\n',
    "is killed": "kill -9 $$\n",
    "has memory for little": "for word; do case $word in *.cpp) source=$word;; esac; done\n"
    'grep -q tw_canary "$source" && exec {compiler} "$@"\n'
    "echo 'cc1plus: out of memory allocating 168192 bytes after a total of 3858432 bytes' >&2\n"
    "exit 1\n",
    "lies": 'echo \'extern "C" int tw_canary() {{ return 1; }}\' > "$last.cpp"\n'
    '{compiler} -shared -o "$last" "$last.cpp"\n',
}
"""How a compiler that tells its version goes wrong; `last` is where its result belongs."""


def stub(folder: Path, body: str) -> Path:
    """A compiler that tells its version like the real one, and does as `body` says."""
    real = find_compiler()
    assert real is not None
    path = folder / "stub-c++"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real.path} --version; fi\n'
        f"for last; do :; done\n{body.format(compiler=real.path)}"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Any]:
    """Mounts a file system of its own; only root may."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir(mode=0o700)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", folder],
            capture_output=True,
        )
        if made.returncode:
            pytest.skip("file systems cannot be mounted here: not root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def command(*words: Any, **environment: Any) -> subprocess.CompletedProcess[str]:
    """A tilewise command in a process of its own."""
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [sys.executable, "-m", "tilewise", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC), **given},
    )


def sweep(folder: Path, *words: str, **environment: Any) -> subprocess.CompletedProcess[str]:
    """A sweep of a few kernels on two problems into `folder/store`."""
    problems = folder / "problems.csv"
    problems.write_text(PROBLEMS)
    kernels = "engine == 'cpu' and mr == 6 and mc == 192"
    chosen = ("--filter", kernels, "--policy", "quick,threads=1")
    where = ("--op", "gemm", "--arch", "x86_avx2", "--dtype", "fp32", "--problems", problems)
    return command("sweep", folder / "store", *where, *chosen, *words, **environment)


def statuses(folder: Path) -> Counter[str]:
    store = folder / "store"
    rows = Store(store).measurements(latest=False) if store.exists() else []
    return Counter(row.status for row in rows)


def assert_stopped(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """One clear line, exit 1, and no row that blames a kernel."""
    assert done.returncode == 1, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("tilewise: ")]
    assert "fault of the machine" in line
    assert "Traceback" not in done.stderr
    assert set(statuses(folder)) <= {"ok"}


def assert_all_measured(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stderr
    found = statuses(folder)
    assert set(found) == {"ok"} and found["ok"] >= 2


@pytest.mark.parametrize("fault", BAD_COMPILERS)
def test_a_broken_compiler_stops_a_sweep_that_then_resumes(fault: str, tmp_path: Path) -> None:
    place = {"TILEWISE_CACHE_DIR": tmp_path / "cache"}
    broken = stub(tmp_path, BAD_COMPILERS[fault])
    assert_stopped(sweep(tmp_path, TILEWISE_CXX=broken, **place), tmp_path)
    stub(tmp_path, GOOD)
    assert_all_measured(sweep(tmp_path, TILEWISE_CXX=broken, **place), tmp_path)


@pytest.mark.parametrize("options", ["noexec", "size=100k"])
def test_a_cache_that_cannot_be_used_stops_a_sweep(
    options: str, tmpfs: Any, tmp_path: Path
) -> None:
    assert_stopped(sweep(tmp_path, TILEWISE_CACHE_DIR=tmpfs(options)), tmp_path)
    assert_all_measured(sweep(tmp_path, TILEWISE_CACHE_DIR=tmp_path / "cache"), tmp_path)


def test_a_read_only_cache_stops_a_sweep(tmpfs: Any, tmp_path: Path) -> None:
    folder = tmpfs("size=10m")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert_stopped(sweep(tmp_path, TILEWISE_CACHE_DIR=folder), tmp_path)


def test_a_limit_on_files_stops_a_sweep(tmp_path: Path) -> None:
    """Without root: compilers may write 8 kB, so that libraries are cut short."""
    limited = stub(tmp_path, 'ulimit -f 8\n{compiler} "$@"\n')
    place = {"TILEWISE_CACHE_DIR": tmp_path / "cache", "TILEWISE_CXX": limited}
    assert_stopped(sweep(tmp_path, **place), tmp_path)


def test_a_compiler_killed_once_is_started_again(tmp_path: Path) -> None:
    body = f"if mkdir {tmp_path}/struck 2>/dev/null; then kill -9 $$; fi\n" + GOOD
    place = {"TILEWISE_CACHE_DIR": tmp_path / "cache", "TILEWISE_CXX": stub(tmp_path, body)}
    assert_all_measured(sweep(tmp_path, **place), tmp_path)
    assert (tmp_path / "struck").exists()


@pytest.mark.parametrize("options", ["size=100k", "ro"])
def test_a_store_that_cannot_be_written_is_told_in_one_line(
    options: str, tmpfs: Any, tmp_path: Path
) -> None:
    folder = tmpfs("size=64k" if options == "ro" else options)
    if options == "ro":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    else:
        (folder / "filler").write_bytes(b"x" * 90_000)
    (tmp_path / "store").symlink_to(folder)
    done = sweep(tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("tilewise: ")]
    assert "cannot write to" in line and "safe" in line
    if options != "ro":
        (folder / "filler").unlink()
        assert_all_measured(sweep(tmp_path), tmp_path)


SERVING = """
import json, sys, time
import logging
told = []
class Keep(logging.Handler):
    def emit(self, record): told.append(record.getMessage())
logging.getLogger("tilewise").addHandler(Keep())
import numpy as np
import tilewise as tw
import subprocess
calls = []
real = subprocess.run
def noting(command, *a, **k):
    if "-o" in command: calls.append(command)
    return real(command, *a, **k)
subprocess.run = noting
for m in range(60, 66):
    a, b = np.ones((m, 70), np.float32), np.ones((70, 50), np.float32)
    assert (tw.matmul(a, b) == a @ b).all()
x, w = np.ones((1, 16, 9, 9), np.float32), np.ones((16, 16, 3, 3), np.float32)
assert tw.conv2d(x, w).shape == (1, 16, 7, 7)
print(json.dumps({"told": told, "compiled": len(calls)}))
"""


def served(**environment: Any) -> dict[str, Any]:
    given = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-c", SERVING],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC), **given},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("fault", ["says nothing", "writes garbage", "is killed"])
def test_calls_are_served_without_a_working_compiler(fault: str, tmp_path: Path) -> None:
    broken = stub(tmp_path, BAD_COMPILERS[fault])
    found = served(TILEWISE_CXX=broken, TILEWISE_CACHE_DIR=tmp_path / "cache")
    assert len(found["told"]) == 1, found["told"]
    assert found["compiled"] <= 6  # one unit and the canary, each as often as it was killed


@pytest.mark.parametrize("options", ["noexec", "size=100k", "ro"])
def test_calls_are_served_without_a_usable_cache(options: str, tmpfs: Any, tmp_path: Path) -> None:
    folder = tmpfs("size=1m" if options == "ro" else options)
    if options == "ro":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    found = served(TILEWISE_CACHE_DIR=folder)
    assert len(found["told"]) == 1, found["told"]
    assert found["compiled"] <= 2


def test_a_cache_that_is_a_file_serves_too(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    found = served(TILEWISE_CACHE_DIR=tmp_path / "cache")
    assert len(found["told"]) == 1, found["told"]
    assert found["compiled"] == 0


@pytest.mark.parametrize("fault", ["says nothing", "writes garbage", "writes half"])
def test_doctor_tries_the_compiler(fault: str, tmp_path: Path) -> None:
    broken = stub(tmp_path, BAD_COMPILERS[fault])
    place = {"TILEWISE_CXX": broken, "TILEWISE_CACHE_DIR": tmp_path / "cache"}
    done = command("doctor", **place)
    assert done.returncode == 1
    assert "Everything needed" not in done.stdout
    told = {row["what"]: row for row in json.loads(command("doctor", "--json", **place).stdout)}
    assert told["C++ compiler"]["status"] == told["cpu engine"]["status"] == "broken"
    assert told["vendor engine"]["status"] == "ok"
    assert told["serving gemm"]["detail"] == "only the vendor's routine"


def test_doctor_without_a_compiler_promises_nothing(tmp_path: Path) -> None:
    done = command("doctor", TILEWISE_CXX="no-such-compiler")
    assert done.returncode == 0
    assert "Everything needed" not in done.stdout
    assert "CPU kernels cannot be compiled" in done.stdout


def test_doctor_runs_engines_and_lists_models(tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / "manifest.json").write_text("{")
    told = {
        row["what"]: row
        for row in json.loads(command("doctor", "--json", TILEWISE_MODEL_DIR=tmp_path).stdout)
    }
    assert "its result is right" in told["cpu engine"]["detail"]
    assert "its result is right" in told["vendor engine"]["detail"]
    assert told["model torn"]["status"] == "broken"
    assert told["model sm_90_gemm"]["status"] == "ok"
    assert " cpu and " in told["serving conv_fwd"]["detail"]


OLD_MESSAGES = [
    ("compile_error", "/cache/cpu: No space left on device"),
    ("compile_error", "the library cannot be loaded: failed to map segment from shared object"),
    ("compile_error", "/usr/bin/ld: final link failed: No space left on device"),
    ("out_of_memory", "the system killed the worker, as it does when memory runs out"),
]


@pytest.mark.parametrize(("status", "message"), OLD_MESSAGES)
def test_faults_of_the_past_are_found_measured_again_and_forgotten(
    status: str, message: str, tmp_path: Path
) -> None:
    assert_all_measured(sweep(tmp_path), tmp_path)
    rows = [row for row in Store(tmp_path / "store").measurements() if row.stage == "first"]
    shutil.rmtree(tmp_path / "store")
    times = ("time_us", "spread_us", "min_us", "tflops", "gb_s", "rel_error")
    lost = replace(
        rows[0],
        status=status,
        message=message,
        repeats=0,
        **dict.fromkeys(times),  # type: ignore[arg-type]
    )
    write_rows(tmp_path / "store", [lost, *rows[1:]])
    assert command("data", "check", tmp_path / "store").returncode == 1
    again = sweep(tmp_path, "--json")
    start = next(json.loads(line) for line in again.stdout.splitlines() if '"start"' in line)
    assert (start["forgotten"], start["total"]) == (1, 1)
    held = {row.key: row.status for row in Store(tmp_path / "store").measurements()}
    assert held[lost.key] == "ok"
    checked = command("data", "check", tmp_path / "store", "--forget", "--json")
    assert checked.returncode == 0, checked.stdout
    assert json.loads(checked.stdout)["forgotten"] == 1
    assert status not in statuses(tmp_path)


@pytest.mark.parametrize(
    "message",
    [
        "cc1plus: out of memory allocating 168192 bytes after a total of 3858432 bytes",
        "g++: internal compiler error: Killed (program cc1plus)",
        "g++: fatal error: cannot execute 'cc1plus': execvp: No such file or directory",
        "cc1plus: error while loading shared libraries: libgmp.so.10: cannot open shared object",
        "g++: fatal error: vfork: Resource temporarily unavailable",
        "Cannot create temporary file in /tmp/: No such file or directory",
        "`ptxas` failed with error code -9",
    ],
)
def test_what_compilers_lack_is_no_fact_about_kernels(message: str) -> None:
    assert fault_of("compile_error", f"kernel.cpp: warning\n{message}\n") == message


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("compile_error", "kernel.cpp:3: error: 'x' was not declared in this scope"),
        ("compile_error", "undefined reference to `tw_missing'"),
        ("compile_error", "internal compiler error: in expand_expr, at expr.cc:1"),
        ("crash", "the worker was killed by SIGSEGV. "),
        ("out_of_memory", "MemoryError: no memory for 1 TiB"),
        ("out_of_memory", "DefaultCPUAllocator: Error code 12 (Cannot allocate memory)"),
        ("out_of_memory", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("crash", "the worker was killed by SIGABRT. terminate called: std::bad_alloc"),
        ("out_of_memory", "memory ran out, and the system ended the worker"),
        ("wrong_result", "No space left on device"),
        ("timeout", "still running after 5 s; the worker was killed"),
        ("over_limit", "it needs 300000 smem_bytes; H200 has 232448"),
    ],
)
def test_facts_about_kernels_stay(status: str, message: str) -> None:
    assert fault_of(status, message) is None
