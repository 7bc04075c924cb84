#!/usr/bin/env python3
"""Runs tests, each in a process of its own and several at once: a hang costs one test.

usage: python tests/gpu/apart.py [--at-once 12] [--seconds 60] [--minutes 3]
                                 [--whole FILE,FILE] [PATH ...]

A kernel that hangs or writes where it must not takes all with it that its process runs. Files that
are given as --whole run in one process each, since starting one takes longer than most tests. What
there is no time for is told. Nothing is timed, so that processes may share the GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
THREADS = "2"
"""Of the CPU, for each of many at once: references are computed there."""
PYTEST = (sys.executable, "-m", "pytest", *OPTIONS, f"--rootdir={Path.cwd()}")
LINES = 25
"""Of what a failed test said."""
NOTHING_RAN = 5
"""How pytest ends where all is skipped at collection."""


def ended(command: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit status and the output; None where it was ended."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"OMP_NUM_THREADS": THREADS, **os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        )
        code = None
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # inside a driver it may take a while to die
                process.wait(timeout=5)
        said.seek(0)
        return code, said.read().decode(errors="replace")


def collected(paths: list[str]) -> list[str]:
    """Names of tests, in the order of the paths."""
    listed = ended([*PYTEST, "--collect-only", *paths], 120)[1]
    return [line for line in listed.splitlines() if "::" in line and not line.startswith("ERROR")]


def verdict(name: str, seconds: float, end: float) -> str:
    left = end - time.monotonic()
    if left < 1:
        return "not run"
    waits = f"faulthandler_timeout={seconds / 2}"  # says where it is, before it is ended
    code, text = ended([*PYTEST, "-o", waits, name], min(seconds, left))
    if code in (0, NOTHING_RAN):
        return "passed" if " passed" in text else "skipped"
    if code is None and left < seconds:
        return "cut off"
    words, lines = "hangs" if code is None else "failed", text.splitlines()
    where = next((at for at, line in enumerate(lines) if line.startswith("Timeout (")), None)
    told = lines[where:] if where is not None else lines[-LINES:]
    print(f"{words}: {name}\n" + "\n".join(told), flush=True)
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=[])
    parser.add_argument("--whole", default="", help="files that run in one process each")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60.0, help="a test's")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    names = [(name, 60 * args.minutes) for name in args.whole.split(",") if name]
    with ThreadPoolExecutor(args.at_once) as crew:
        jobs = [crew.submit(verdict, name, most, end) for name, most in names]
        listed = collected(args.paths) if args.paths else []
        jobs += [crew.submit(verdict, name, args.seconds, end) for name in listed]
    found = Counter(job.result() for job in jobs)
    print(", ".join(f"{count} {what}" for what, count in sorted(found.items())) or "no tests")
    return int(bool(found["failed"] or found["hangs"] or not jobs))


if __name__ == "__main__":
    sys.exit(main())
