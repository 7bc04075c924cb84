"""A made-up recording to replay: real problems and kernels, invented times."""

from __future__ import annotations

import random
from pathlib import Path

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.data.store import write_rows
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.problem import GemmProblem

ARCH = "x86_avx512"
POLICY = Policy(rounds=2, threads=1)
FAILURES = ("timeout", "crash", "wrong_result", "out_of_memory")


def problems(count: int) -> list[GemmProblem]:
    return [GemmProblem(m=8 + at, n=64, k=32) for at in range(count)]


def kernels(count: int) -> list[Kernel]:
    """Kernels that can serve all of the problems."""
    op, arch = get_op("gemm"), load_arch(ARCH)
    pool = load_pool(op, arch, ["cpu"])
    sizes = problems(64)
    legal = [k for k in pool if all(op.why_unusable(k, p, arch) is None for p in sizes)]
    assert len(legal) >= count
    return legal[:count]


def record(path: Path, *, problem_count: int, kernel_count: int, seed: int = 0) -> None:
    """Writes a store in which one kernel in ten fails."""
    draw = random.Random(seed)
    setting = Setting(arch=ARCH, device="a recorded CPU", toolchain="g++ 12", policy=POLICY)
    rows = []
    for problem in problems(problem_count):
        for kernel in kernels(kernel_count):
            values: dict[str, object] = {"time_us": draw.uniform(50, 100), "spread_us": 6.0}
            status = "ok"
            if draw.random() < 0.1:
                status, values = draw.choice(FAILURES), {"message": "as recorded"}
            rows.append(Measurement.of(problem, kernel, setting, status=status, **values))
    write_rows(path, rows)
