"""CPU kernels on tensors run on PyTorch's threads; on arrays alone they have their own."""

from __future__ import annotations

import os
import subprocess
import sys

START = '''
import os, time
import numpy as np
def threads():
    """Compiling has a thread that ends soon; those of a team stay."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)
a = np.ones((256, 256), np.float32)
'''


def run(code: str, threads: str = "2") -> str:
    """What a fresh process prints."""

    env = {**os.environ, "OMP_NUM_THREADS": threads, "TILEWISE_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        capture_output=True,
        text=True,
        timeout=900,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ON_TENSORS = """
import torch, tilewise as tw
from tilewise.engines import get_engine
torch.set_num_threads(2)
x = torch.from_numpy(a)
torch.matmul(x, x)
x.add(x).sum()  # PyTorch has started its threads
before = threads()
ours = [tw.matmul(x, x) for _ in range(50)]
print(get_engine("cpu").runtime is not None, threads() - before, bool((ours[-1] == 256).all()))
"""


def test_kernels_on_tensors_start_no_threads() -> None:
    assert run(ON_TENSORS) == "True 0 True\n"


def test_arrays_alone_have_threads_of_their_own() -> None:
    code = """
import tilewise as tw
before = threads()
from tilewise.engines import get_engine
engine = get_engine("cpu")
engine.team()
print(engine.runtime, threads() - before)
"""
    assert run(code) == "None 1\n"


def test_a_pool_that_has_threads_borrows_when_tensors_come() -> None:
    code = """
import tilewise as tw
from tilewise.engines import get_engine
first = tw.matmul(a, a)
team = get_engine("cpu").team()
import torch
x = torch.from_numpy(a)
second = tw.matmul(x, x)
print(get_engine("cpu").team() == team, get_engine("cpu").runtime is not None)
print(bool((second.numpy() == first).all()))
"""
    assert run(code) == "True True\nTrue\n"


def test_pytorchs_number_of_threads_holds() -> None:
    code = """
import torch, tilewise as tw
torch.set_num_threads(1)
x = torch.from_numpy(a)
before = threads()
print(bool((tw.matmul(x, x) == 256).all()), threads() - before)
"""
    assert run(code) == "True 0\n"


def test_a_forked_child_computes_alone() -> None:
    code = """
import torch, tilewise as tw
x = torch.from_numpy(a)
tw.matmul(x, x)
child = os.fork()
if not child:
    os._exit(0 if (tw.matmul(x, x).numpy() == 256).all() else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run(code) == "0\n"


IN_A_SWEEP = """
from tilewise.core.measurement import Policy
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.sweep.bench_cpu import CpuBench
names = {engines}
engines = {{name: get_engine(name) for name in names}}
CpuBench(detect("cpu"), Policy(threads={threads}), engines)
print(get_engine("cpu").runtime is not None)
"""


def test_kernels_measured_beside_pytorchs_run_on_its_threads() -> None:
    beside, alone = ("cpu", "vendor"), ("cpu",)
    assert run(IN_A_SWEEP.format(engines=beside, threads=2)) == "True\n"
    assert run(IN_A_SWEEP.format(engines=alone, threads=2)) == "False\n"
    assert run(IN_A_SWEEP.format(engines=beside, threads=1), "1") == "False\n"
