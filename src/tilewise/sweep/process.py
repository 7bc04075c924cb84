"""A worker process seen from outside: started, spoken to, and killed when it must be."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilewise.core.faults import signal_name
from tilewise.errors import ExecutionError, InputError, MachineError

START_S = 300.0
"""Importing PyTorch and starting a GPU on a busy machine takes its time."""
KILLED = "killed"
"""How a worker ended that somebody outside ended: no status of a kernel."""
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that no kernel's mistake brings about."""


class WorkerGoneError(Exception):
    """The worker ended before it answered."""


class WorkerProcess:
    """One worker with its pipes. It leads a process group, so that its children die with it."""

    def __init__(
        self, config: Mapping[str, Any], environment: Mapping[str, str], package: str
    ) -> None:
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            # Deleted at once: it is ours through the open file alone.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in kill
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tilewise.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": path, **environment},
                start_new_session=True,
            )
        except OSError as error:
            if hasattr(self, "_errors"):
                self._errors.close()
            raise MachineError(f"a worker cannot be started: {error}") from None
        self._oom_kills = _oom_kills()
        self._pending = b""
        self.items_run = 0
        """Kernels that this process has touched; a fresh one can blame no other."""
        self.has_succeeded = False
        """Whether any of them was measured well."""
        self.send({**config, "parent": os.getpid()})

    def send(self, order: Mapping[str, Any]) -> None:
        """Hands over an order; a dead worker shows when its answer is asked for."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next answer; TimeoutError at the deadline, WorkerGoneError at the end."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                answer: dict[str, Any] = json.loads(line)
                return answer
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise WorkerGoneError
            self._pending += data

    def wait_ready(self) -> dict[str, Any]:
        """What the worker says about itself once it can work; raises where it cannot."""
        try:
            answer = self.receive(time.monotonic() + START_S)
        except TimeoutError:
            self.kill()
            raise ExecutionError(f"a worker was not ready after {START_S:.0f} s") from None
        except WorkerGoneError:
            status, words = self.ending()
            raise ExecutionError(f"a worker did not start ({status}: {words})") from None
        if answer["event"] == "refused":
            self.kill()
            kind = InputError if answer["is_input"] else ExecutionError
            raise kind(str(answer["message"]))
        return answer

    def signal_kill(self) -> None:
        """Sends the signal alone; safe from any thread."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Ends the process and everything it started, at once."""
        self.signal_kill()
        with suppress(subprocess.TimeoutExpired):
            # A process inside a driver may take a while to die; it is left to the system then.
            self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._errors.close()

    def close(self) -> None:
        """Lets the worker end by itself, then makes sure."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        self.kill()

    def ending(self) -> tuple[str, str]:
        """The status and the words for a worker that ended on its own; KILLED where it did not."""
        try:
            code = self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            return "crash", "the worker fell silent and did not end"
        said = self.said()
        self.kill()
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return "out_of_memory", "memory ran out, and the system ended the worker"
        if -code in _FROM_OUTSIDE:
            return KILLED, f"the worker was killed by {signal_name(-code)}, from outside"
        out_of_memory = any(
            word in said for word in ("bad_alloc", "Cannot allocate memory", "out of memory")
        )
        status = "out_of_memory" if out_of_memory else "crash"
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return status, f"the worker was {how}. {said}" if code < 0 else f"the worker {how}. {said}"

    def said(self) -> str:
        """The end of what the worker wrote to standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 1000, max(0, size - 1000))
        return text.decode(errors="replace").strip()


def _oom_kills() -> int:
    """How many processes this system has ended for want of memory since it was started."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
    return int(found[1]) if found else 0
