"""Made-up measurements that follow known rules, for trying out and testing what learns."""

from __future__ import annotations

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.learn.dataset import Dataset
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.fields import kernel_values


def synthetic_problems(op: str, dtype: str, count: int, *, seed: int = 0) -> list[Problem]:
    """Different problems of everyday sizes."""
    random = np.random.default_rng(seed)
    given = get_op(op)
    found: dict[str, Problem] = {}

    def size(low: int, high: int, step: int = 1) -> int:
        drawn = 2 ** random.uniform(np.log2(low), np.log2(high))
        return max(step, round(drawn / step) * step)

    while len(found) < count:
        if op == "gemm":
            values = {"M": size(1, 4096), "N": size(16, 4096, 8), "K": size(32, 4096, 8)}
        else:
            taps = int(random.choice([1, 1, 3, 3, 5]))
            image = size(7, 112)
            values = {"N": size(1, 16), "C": size(16, 512, 8), "K": size(16, 512, 8)}
            values |= {"Hi": image, "Wi": image, "Y": taps, "X": taps}
            values |= {"pad_h": taps // 2, "pad_w": taps // 2}
        problem = given.make_problem(**values, dtype=dtype)
        found.setdefault(problem.key, problem)
    return list(found.values())


def synthetic_kernels(
    op: str, arch: Arch, count: int, *, dtype: str = "bf16", engine: str = "ck_tile", seed: int = 0
) -> list[Kernel]:
    """Some kernels of one engine that serve everyday problems."""
    given = get_op(op)
    sizes = {"M": 512, "N": 512, "K": 512}
    if op != "gemm":
        sizes = {"N": 8, "C": 64, "K": 64, "Hi": 32, "Wi": 32, "Y": 3, "X": 3}
    usual = given.make_problem(**sizes, dtype=dtype)
    pool = load_pool(given, arch, [engine])
    pool = [k for k in pool if given.why_unusable(k, usual, arch) is None]
    chosen = np.random.default_rng(seed).permutation(len(pool))[:count]
    return [pool[i] for i in sorted(chosen)]


def synthetic(
    op: str = "gemm",
    *,
    arch: Arch,
    dtype: str = "bf16",
    problems: int = 60,
    kernels: int = 24,
    noise: float = 0.01,
    failures: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Times of a made-up device: waves of tiles, each step paid by tile and pipeline, and noise."""
    random = np.random.default_rng(seed)
    drawn = synthetic_problems(op, dtype, problems, seed=seed)
    pool = synthetic_kernels(op, arch, kernels, dtype=dtype, seed=seed)
    problem_index = np.repeat(np.arange(len(drawn)), len(pool))
    kernel_index = np.tile(np.arange(len(pool)), len(drawn))
    pipelines = sorted({str(getattr(k, "pipeline", "")) for k in pool})
    liking = dict(zip(pipelines, random.uniform(0.8, 1.25, len(pipelines)), strict=True))
    quirk = random.uniform(0.97, 1.03, len(pool))
    quirk *= [liking[str(getattr(k, "pipeline", ""))] for k in pool]
    times = np.empty(len(problem_index))
    for row, (p, k) in enumerate(zip(problem_index, kernel_index, strict=True)):
        times[row] = _time_us(drawn[p], pool[k], arch) * quirk[k]
    times *= np.exp(noise * random.standard_normal(len(times)))
    # Wide tiles fail more often than narrow ones: something that can be learned.
    wide = np.array([np.prod(_tile(pool[k])[:2]) for k in kernel_index])
    is_failure = random.random(len(times)) < failures * 2 * (wide > np.median(wide))
    return Dataset(
        op,
        arch,
        tuple(drawn),
        tuple(pool),
        ({},) * len(drawn),
        problem_index,
        kernel_index,
        np.where(is_failure, np.nan, times),
        times * noise,
        np.full(len(times), 20),
        "synthetic",
    )


def _tile(kernel: Kernel) -> tuple[int, int, int]:
    values = kernel_values(kernel)
    m, n, k = (max(1, int(values[f"k_tile_{d}"])) for d in "mnk")
    return m, n, k


def _time_us(problem: Problem, kernel: Kernel, arch: Arch) -> float:
    m, n, k = _tile(kernel)
    view = problem.gemm
    tiles = view.groups * -(-view.m // m) * -(-view.n // n)
    waves = -(-tiles // arch.compute_units)
    steps = -(-view.k // k)
    step_us = 0.02 + m * n * k * 2e-7 + (m + n) * k * 3e-6
    memory_us = problem.bytes / (arch.memory_gb_s * 1e3)
    return 3.0 + max(waves * steps * step_us, memory_us) + 0.2 * waves
