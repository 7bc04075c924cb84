"""Kernels are compiled ahead for the problems of a sweep, not only as such."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.measurement import Policy
from tilewise.ops.gemm.kernels.gpu import TritonGemmKernel
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.sweep.builder import Builder
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.device import arch_to_dict

pytest.importorskip("triton")

KERNEL = TritonGemmKernel(family="gemv", dtype="bf16", tile_m=4, tile_n=1, tile_k=512, stages=1)


def compiled(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/*.cubin"))


def test_what_a_problem_needs_is_compiled_before_it_is_measured(tmp_path: Path) -> None:
    config = WorkerConfig(
        engines=("triton",),
        policy=Policy(),
        kind="gpu",
        jobs=1,
        environment={"TRITON_CACHE_DIR": str(tmp_path)},
    )
    builder = Builder(lambda: config.spawn("build"), arch_to_dict(load_arch("sm_90")), jobs=1)
    try:
        facts = builder.wait([(KERNEL.key, KERNEL.to_dict())])
        assert facts[KERNEL.key]["status"] == "ok"
        assert compiled(tmp_path) == 1
        unusual = GemmProblem(m=1, n=333, k=1001, dtype="bf16")
        builder.prepare([unusual.to_dict()])
        end = time.monotonic() + 120
        while compiled(tmp_path) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        assert compiled(tmp_path) == 2
    finally:
        builder.close()
