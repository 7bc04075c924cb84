"""What is peculiar to CPU GEMM kernels; `test_contract.py` holds what all kernels promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TORCH, error_of, sabotaged

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import ExecutionError, KernelError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.kernels.cpu import ACCESSES, SPLITS, CpuGemmKernel, why_unusable
from tilewise.ops.gemm.problem import GemmProblem

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

# Blocks that a smaller cache does not hold are slow, not wrong: all are tested wherever this runs.
ARCH = detect("cpu").with_figures(l2_bytes=max(detect("cpu").l2_bytes, 2 << 20))


@cache
def pool() -> tuple[CpuGemmKernel, ...]:
    """This machine's whole pool and, where that is AVX-512's, every third of AVX2's."""
    found = load_pool(get_op("gemm"), load_arch(ARCH.name), ["cpu"])
    if ARCH.name == "x86_avx512":
        found += load_pool(get_op("gemm"), load_arch("x86_avx2"), ["cpu"])[::3]
    return tuple(k for k in found if isinstance(k, CpuGemmKernel))


@cache
def engine() -> CpuEngine:
    return CpuEngine(threads=3)


def sample(**traits: Any) -> CpuGemmKernel:
    """The first kernel of the pool with these traits."""
    for kernel in pool():
        if all(getattr(kernel, name) == value for name, value in traits.items()):
            return kernel
    pytest.skip(f"the pool on {ARCH.name} has no kernel with {traits}")


@needs_compiler
def test_nan_and_infinity_pass_through() -> None:
    for family in ("packed", "unpacked"):
        kernel = sample(family=family, dtype="fp32")
        problem = GemmProblem(m=20, n=40, k=30, layout="rrr")
        a, b = torch.ones(20, 30), torch.ones(30, 40)
        a[3, 4], b[7, 9] = float("nan"), float("inf")
        out = torch.empty(20, 40)
        engine().plan(kernel, problem, ARCH).execute((a, b), out)
        assert torch.equal(torch.isnan(out), torch.isnan(a @ b))
        assert torch.equal(torch.isinf(out), torch.isinf(a @ b))


@needs_compiler
def test_integers_are_exact_at_their_limits() -> None:
    for kernel in (k for k in pool() if k.dtype == "int8"):
        problem = GemmProblem(m=4, n=40, k=1024, dtype="int8", out_dtype=kernel.out_dtype)
        if why_unusable(kernel, problem, ARCH) is None:
            a = torch.full((4, 1024), -128, dtype=torch.int8)
            b = torch.full((40, 1024), -128, dtype=torch.int8).T
            out = torch.empty((4, 40), dtype=TORCH[kernel.out_dtype])
            engine().plan(kernel, problem, ARCH).execute((a, b), out)
            assert (out == 128 * 128 * 1024).all()


@needs_compiler
@pytest.mark.parametrize(
    ("honest", "broken"),
    [
        ("for (; s > 0; --s) step();", "for (; s > 1; --s) step();"),
        ("kWhole || left >= kLanes)\n        store_out", "true)\n        store_out"),
    ],
    ids=["skips the last step", "writes past the edge"],
)
def test_a_sabotaged_kernel_is_caught(honest: str, broken: str, tmp_path: Path) -> None:
    kernel = sample(family="packed", dtype="fp32", unroll=1)
    engine = sabotaged(kernel, "microkernel.hpp", honest, broken, tmp_path)
    problem = GemmProblem(m=31, n=37, k=1031, layout="rrr")
    error = error_of(engine.plan(kernel, problem, ARCH).execute, problem)
    assert error > tolerance("fp32", "fp32", problem.k)


@needs_compiler
def test_threads_that_share_a_team_do_not_disturb_each_other() -> None:
    kernels = [sample(family="packed", split=split, dtype="fp32") for split in ("grid", "shared")]
    problem = GemmProblem(m=130, n=190, k=170, layout="rrr")
    errors: list[float] = []

    def work(seed: int) -> None:
        plan = engine().plan(kernels[seed % 2], problem, ARCH)
        errors.extend(error_of(plan.execute, problem, seed) for _ in range(20))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 120
    assert max(errors) <= tolerance("fp32", "fp32", problem.k)


FORK = """
import os, signal
import numpy as np
tests = load()
kernel = tests.sample(family="packed", dtype="fp32")
problem = tests.GemmProblem(m=130, n=190, k=170, layout="rrr")
run = tests.engine().plan(kernel, problem, tests.ARCH).execute
a, b = np.ones((130, 170), np.float32), np.ones((170, 190), np.float32)

def is_right():  # in NumPy alone: PyTorch's own threads do not survive a fork
    out = np.zeros((130, 190), np.float32)
    run((a, b), out)
    return bool((out == 170).all())

assert is_right()
child = os.fork()
if child == 0:
    signal.alarm(300)  # a deadlock ends as a failure, not as a hang
    os._exit(0 if is_right() else 1)
assert os.waitpid(child, 0)[1] == 0
assert is_right()
"""


def in_a_process(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that can `load()` this module."""
    load = (
        "import importlib.util, sys\n"
        "def load():\n"
        f"    spec = importlib.util.spec_from_file_location('tests', {__file__!r})\n"
        "    module = sys.modules['tests'] = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "    return module\n"
    )
    return subprocess.run(
        [sys.executable, "-c", load + script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


@needs_compiler
def test_a_forked_child_can_still_multiply() -> None:
    ran = in_a_process(FORK)
    assert ran.returncode == 0, ran.stderr


@needs_compiler
def test_a_kernel_refuses_strides_it_cannot_read() -> None:
    kernel = sample(family="unpacked", access="inplace")
    problem = GemmProblem(m=8, n=8, k=8, layout="rrr")
    a, b = torch.ones(8, 8), torch.ones(8, 16)[:, ::2]
    with pytest.raises(ExecutionError, match="status 1"):
        engine().plan(kernel, problem, ARCH).execute((a, b), torch.empty(8, 8))


KERNEL = CpuGemmKernel(
    isa="avx2", family="packed", access="panels", mr=6, nr=16, mc=96, kc=256, nc=512, split="n"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mr": 8}, "needs 19 registers; avx2 has 16"),
        ({"nr": 12}, "multiple of the 8 lanes"),
        ({"kc": 255}, "must be even"),
        ({"mc": 0}, "mc must be at least 1"),
        ({"access": "dot"}, "access is dot; use panels"),
        ({"split": "k"}, "split is k; use m or n"),
        ({"split_k": 4}, "only splitk cuts"),
        ({"ahead": 8}, "only dot products prefetch"),
        ({"out_dtype": "int32"}, "fp32 gives fp32, fp16, bf16"),
        ({"unroll": 0}, "at least 1"),
        ({"mr": -6}, "cannot be negative"),
    ],
)
def test_impossible_kernels_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        replace(KERNEL, **change)


def test_every_family_has_accesses_and_splits() -> None:
    assert ACCESSES.keys() == SPLITS.keys()


@pytest.mark.parametrize(
    ("traits", "problem", "message"),
    [
        ({}, {"dtype": "fp16"}, "not fp16 into fp16"),
        ({}, {"split_k": 2}, "not 2"),
        ({"isa": "avx512", "nr": 32}, {}, "has no avx512"),
        ({"mc": 1000}, {}, "the second cache holds"),
        ({"nr": 16, "mc": 6, "kc": 8192}, {}, "too many beside a block of A"),
    ],
)
def test_unsuitable_kernels_say_why(
    traits: dict[str, Any], problem: dict[str, Any], message: str
) -> None:
    where = load_arch("x86_avx2")
    given_problem = GemmProblem(**{"m": 100, "n": 100, "k": 100, **problem})
    assert (
        why_unusable(
            KERNEL, replace(given_problem, dtype="fp32", out_dtype="fp32", split_k=1), where
        )
        is None
    )
    reason = why_unusable(replace(KERNEL, **traits), given_problem, where)
    assert reason is not None
    assert re.search(message, reason), reason
