"""Launches two GEMM kernels onto the stub driver in argv[1]; says whether Triton was imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from driver_stub import Stub, install
from gemm_kernels import gemm_kernel

from tilewise.core.arch import load_arch
from tilewise.engines.gpu.engine import GpuPlan
from tilewise.ops.gemm.problem import GemmProblem


def main() -> None:
    stub = Stub(Path(sys.argv[1]))
    problem = GemmProblem(m=64, n=64, k=64, dtype="bf16")
    a, b, out = (torch.zeros(64, 64).bfloat16() for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        install(stub, patch)
        for family, more in (("pointer", {}), ("ws", {"warps": 4, "stages": 2})):
            kernel = gemm_kernel(
                family=family, dtype="bf16", tile_m=64, tile_n=64, tile_k=64, **more
            )
            GpuPlan(kernel, problem, load_arch("sm_90")).execute([a, b.t(), *()], out)
    print("triton" if "triton" in sys.modules else "alone", len(stub.launches()))


if __name__ == "__main__":
    main()
