"""Forks while other threads are at work: the child serves, and waits for nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

SRC = Path(tilewise.__file__).parent.parent

START = """
import os, random, signal, sys, threading, time
from importlib.abc import MetaPathFinder
import numpy as np
import tilewise as tw

a, b = np.ones((5, 7), np.float32), np.ones((7, 3), np.float32)
problem = dict(m=5, n=3, k=7, layout="rrr")

def fork_and_serve():
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)  # a child that hangs is killed
        os._exit(0 if (tw.matmul(a, b) == 7).all() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

IMPORTING = """
begun = threading.Event()

class Slow(MetaPathFinder):
    '''Takes its time over one module, and tells when it is asked for it.'''
    def find_spec(self, name, path, target=None):
        if name == MODULE and not begun.is_set():
            begun.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=tw.__getattr__, args=("matmul",))
thread.start()
begun.wait()
sys.exit(fork_and_serve())
"""

LOCKED = """
from tilewise.dispatch import default_dispatcher
from tilewise.engines import get_engine
from tilewise.engines.device import detect

tw.matmul(a, b)
dispatcher = default_dispatcher("gemm", detect("cpu"))
locks = [dispatcher._lock, dispatcher._chooser._lock, dispatcher.registry._lock]
locks += [get_engine("cpu")._lock]
held = threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    time.sleep(30)

threading.Thread(target=hold, daemon=True).start()
held.wait()
code = 0
child = os.fork()
if not child:
    signal.alarm(LIMIT_S)
    dispatcher._remembered.clear()
    dispatcher._chooser._choices.clear()
    done = dispatcher.run(tw.GemmProblem(**problem), a, b)
    os._exit(0 if (done.out == 7).all() else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(code)
"""

ANY_TIME = """
threading.Thread(target=lambda: tw.matmul(a, b), daemon=True).start()
time.sleep(random.Random(SEED).uniform(0, 0.4))
os._exit(fork_and_serve())
"""


def run(script: str, **names: object) -> int:
    names["LIMIT_S"] = 120  # what is compiled first may take its time on a busy machine
    given = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    done = subprocess.run(
        [sys.executable, "-c", START + given + script],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode != 256 - signal.SIGALRM, "the child hung"
    return done.returncode


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What a first call compiles is in the cache: the tests are about forks, not compilers."""
    assert run("\ntw.matmul(a, b)\n") == 0


@pytest.mark.parametrize(
    "module", ["tilewise.functional", "tilewise.core.tensors", "tilewise.dispatch.registry"]
)
def test_a_fork_waits_for_what_another_thread_imports(module: str) -> None:
    assert run(IMPORTING, MODULE=module) == 0


def test_a_child_does_not_wait_for_locks_of_threads_that_are_gone() -> None:
    assert run(LOCKED) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_fork_at_any_time_of_a_first_call(seed: int) -> None:
    assert run(ANY_TIME, SEED=seed) == 0
