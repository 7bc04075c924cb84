#!/usr/bin/env python3
"""All that a GPU is needed for, in order, within the minutes there are; carries on where it ended.

usage: python benchmarks/half_hour.py [--minutes 9.6] [--parts families,sweep,...]
                                      [--work build/half_hour] [--out FOLDER] [--from FILE]
                                      [--compile [--jobs N] | --dry-run]

Parts run one after the other, those that time nothing side by side, each in a process group of its
own that is ended when its time is up, whatever hangs there; a part without the time that it needs
at least waits for the next call. Every minute and behind each part all results so far are packed
into --out (by default $OUT), so that a call which is itself ended loses a minute at most. A second
call does what is left: --work remembers what was done, and where it is empty begins with the file
--from, which an earlier call packed. --parts runs those named, done or not. Families of kernels
that hang, or break the device, where they are tried first are left out of what follows.

--compile compiles what the parts need on a machine without a GPU, --jobs at once, the sweep's last;
`benchmarks/objects.py` packs it. --dry-run puts small problems and this CPU in the place of a GPU,
to see that all parts run before a GPU is waiting; its results mean nothing.

`docs/sweeps.md` says how to prepare the kernels beforehand, and what a half hour gives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from half_hour_parts import ROOT, SLOW_FAMILIES, Part, parts

GRACE_S = 12.0
"""Beyond its minutes a part may take this long to put things away."""
PACK_S = 8.0
PACKED_EVERY_S = 60.0
PACKED = "results.tar.gz"
LINES = 12
"""Of each part's log, on the screen."""
MOST_BYTES = 1 << 30
"""Of all results, unpacked."""
RESULT = re.compile(r"(store/)?[\w-][\w.-]*")
MARK = "TILEWISE_HALF_HOUR"
"""What is in the environment of all that a part starts: all of it is ended with the part."""
SPOILS = re.compile(
    r"^(?:wavelet: )?(conv_\w+)(?:, or cuDNN after it, hangs| took the device down)", re.M
)
"""What benchmarks say of a kernel that cost them all that follows."""
KEPT = ("*.log", "*.jsonl", "*.json", "store/*.parquet", "store/*.journal")


def spoilt(work: Path) -> list[str]:
    """Families that hung where they were tried, or broke the device; kernels that did so later.

    A test that is late is none of them, unless it was waiting for the device.
    """
    logs = {log.stem: log.read_text(errors="replace") for log in work.glob("*.log")}
    told = re.split(r"^(hangs|failed): (\S+)\n", logs.pop("families", ""), flags=re.MULTILINE)[1:]
    found = set()
    for how, name, said in zip(told[::3], told[1::3], told[2::3], strict=True):
        tried = re.search(r"\[conv_\w+-(\w+)\]$", name)
        if tried and ("CUDA error" if how == "failed" else " in synchronize\n") in said:
            found.add(tried[1])
    for text in logs.values():
        found.update(SPOILS.findall(text))
    return sorted(found)


class Journey:
    """Which parts are done, and how much of their time the others have had."""

    def __init__(self, work: Path, out: Path, end: float, is_dry: bool) -> None:
        self.work, self.out, self.end, self.is_dry = work, out, end, is_dry
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self._file = work / "state.json"
        self._lock = threading.Lock()
        self.used: dict[str, float] = {}
        self.codes: dict[str, int | None] = {}
        if self._file.exists():
            held = json.loads(self._file.read_text())
            self.used, self.codes = held["used"], held["codes"]

    def is_over(self, part: Part) -> bool:
        """Whether it ended by itself, or has had its time."""
        if part.is_repeated:
            return False
        has_ended = self.codes.get(part.name, -1) in (0, 1)  # 2: it could not begin
        return has_ended or self.left(part) < part.least * part.seconds

    def forget(self, part: Part) -> None:
        """It is run once more."""
        self.used.pop(part.name, None)
        self.codes.pop(part.name, None)

    def left(self, part: Part) -> float:
        used = 0.0 if part.is_repeated else self.used.get(part.name, 0.0)
        return part.seconds - used

    def run(self, *parts: Part) -> None:
        """Parts side by side, or for each a line that says why not."""
        with ThreadPoolExecutor(len(parts)) as crew:
            list(crew.map(self._run, parts))

    def _run(self, part: Part) -> None:
        room = self.end - time.monotonic() - PACK_S
        seconds = min(self.left(part), room - GRACE_S)
        if seconds < part.least * part.seconds and not self.is_dry:
            say(f"== {part.name}: {room:.0f} s are too few; next time")
            return
        words = {
            "work": str(self.work),
            "minutes": f"{max(0.1, seconds / 60):.2f}",
            "without": ",".join([SLOW_FAMILIES, *spoilt(self.work)]),
        }
        command = [word.format(**words) for word in (part.dry if self.is_dry else part.command)]
        if not command:
            say(f"== {part.name}: nothing of it runs without a GPU")
            return
        say(f"== {part.name}: {seconds:.0f} s at most: {' '.join(command[1:])}")
        log, began = self.work / f"{part.name}.log", time.monotonic()
        code = logged(command, log, seconds + GRACE_S, self.pack)
        took = time.monotonic() - began
        self._note(part, code, took, seconds)
        lines = log.read_text(errors="replace").splitlines()[-LINES:]
        ending = f"== {part.name}: {'ended' if code is None else code} after {took:.0f} s"
        say("\n".join([*(f"   {line[:200]}" for line in lines), ending]))

    def _note(self, part: Part, code: int | None, took: float, seconds: float) -> None:
        resumes = part.least < 0.5 and took > 0.9 * seconds
        with self._lock:
            self.used[part.name] = self.used.get(part.name, 0.0) + took
            self.codes[part.name] = None if resumes else code
            written = self._file.with_suffix(".new")
            written.write_text(json.dumps({"used": self.used, "codes": self.codes}))
            written.replace(self._file)
        self.pack()

    def pack(self) -> None:
        """All results so far as one file; the next minute tries again where that fails."""
        try:
            with self._lock:
                pack(self.work, self.out / PACKED)
        except OSError as error:
            say(f"results were not packed: {error}")


def say(text: str) -> None:
    """At once: parts that run side by side do not tear each other's lines."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def environment() -> dict[str, str]:
    """Our own modules come first, and are found whether installed or not.

    Triton's own switches are part of what its objects are found by, so they are left out, and so
    are plugins of pytest's that happen to be installed: any warning of theirs would be an error.
    """
    folders = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return kept | own


def started(command: Sequence[str], log: Path, mark: str) -> subprocess.Popen[bytes]:
    """A process group of its own; what it says is added to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**environment(), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """With all that it started; what is inside a driver then is left to the system."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in marked(mark):  # in groups of their own, or left behind
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def marked(mark: str) -> list[int]:
    """Processes with this mark in their environment."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def logged(
    command: Sequence[str], log: Path, seconds: float, meanwhile: Callable[[], None]
) -> int | None:
    """How a command ended; None where it had to be ended. Every minute `meanwhile` is called."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        process = started(command, log, mark)
    except OSError as error:
        log.write_text(f"{command[0]} cannot be started: {error}\n")
        return 2
    limit = time.monotonic() + seconds
    try:
        while (left := limit - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=min(left, PACKED_EVERY_S))
            meanwhile()
        return None
    finally:
        end(process, mark)


def pack(work: Path, target: Path) -> None:
    """All results so far as one file, there whole or as it was."""
    part = target.with_name(f".{target.name}")
    with tarfile.open(part, "w:gz", compresslevel=3) as archive:
        for pattern in KEPT:
            for path in sorted(work.glob(pattern)):
                with suppress(FileNotFoundError):  # a journal that was folded meanwhile
                    archive.add(path, str(path.relative_to(work)))
    part.replace(target)


def unpack(packed: Path, work: Path) -> None:
    """What an earlier call packed, where nothing is there yet."""
    if packed.is_file() and not (work / "state.json").exists():
        with tarfile.open(packed) as archive:
            archive.extractall(work, members=results(archive), filter="data")


def results(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """What `pack` writes; a file from another machine may hold anything."""
    left = MOST_BYTES
    for entry in archive:
        left -= entry.size
        if not entry.isreg() or not RESULT.fullmatch(entry.name) or left < 0:
            raise SystemExit(f"{archive.name} holds {entry.name[:80]!r}, which no part left")
        yield entry


def compile_parts(listed: Sequence[Part], jobs: int) -> int:
    """The worst exit code; one part's failure is not the next one's.

    The longest comes last: what of it is not ready is compiled beside it, where it runs.
    """
    worst = 0
    for part in sorted(listed, key=lambda part: part.seconds):
        if part.ahead:
            command = [word.format(jobs=jobs) for word in part.ahead]
            print(f"== {part.name}: {' '.join(command[1:])}", flush=True)
            worst = max(worst, subprocess.run(command, cwd=ROOT, env=environment()).returncode)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.6)
    parser.add_argument("--parts", default="", help="those alone, done or not")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "half_hour")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--from", dest="packed", type=Path, default=ROOT / "build" / PACKED)
    parser.add_argument("--compile", action="store_true", help="needs no GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    listed = {part.name: part for part in parts()}
    strange = sorted({name for name in args.parts.split(",") if name} - set(listed))
    if strange:
        parser.error(f"--parts has {', '.join(strange)}; there are {', '.join(listed)}")
    if args.compile:
        wanted = args.parts.split(",") if args.parts else listed
        return compile_parts([listed[name] for name in wanted], args.jobs)
    args.work.mkdir(parents=True, exist_ok=True)
    unpack(args.packed, args.work)
    out = args.out or Path(os.environ.get("OUT") or args.work / "out")
    os.environ.setdefault("TILEWISE_CACHE_DIR", str(args.work.resolve() / "cache"))
    end = time.monotonic() + 60 * args.minutes
    journey = Journey(args.work.resolve(), out, end, args.dry_run)
    wanted = [listed[name] for name in (args.parts.split(",") if args.parts else listed)]
    for _, sides in groupby(wanted, key=lambda part: part.side or part.name):
        ready = [part for part in sides if args.parts or not journey.is_over(part)]
        for part in ready if args.parts else ():
            journey.forget(part)
        if ready:
            journey.run(*ready)
    undone = [n for n, part in listed.items() if not (part.is_repeated or journey.is_over(part))]
    print(f"left: {', '.join(undone) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
