"""A few kernels of every CUDA family on a GPU: they end, and are right; one test for each.

References are the CPU's, so that nothing but our kernels runs on the device, for memory checkers.
What hangs here, or breaks the device, is left out of a sweep (`benchmarks/half_hour.py`).
"""

from __future__ import annotations

import os
from functools import cache

import pytest
from family_cases import cases, families

from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.vendor import bind_torch

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

pytestmark = pytest.mark.gpu

MOST = int(os.environ.get("FAMILY_KERNELS", "12"))
"""Of a layer; a memory checker has no time for many."""


@cache
def arch() -> Arch:
    return detect("gpu")


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def wrong(kernels: list[Kernel], p: ConvProblem) -> list[str]:
    """Each kernel runs twice; the second launch meets the workspace as the first one left it."""
    torch.manual_seed(11)
    *given, result = shapes(p)
    operands = [channels_last(torch.randn(shape).to(torch.bfloat16)) for shape in given]
    expected = bind_torch(p, [t.double() for t in operands], torch.zeros(result).double())()
    there = [t.cuda() for t in operands]
    poison = channels_last(torch.full(result, float("nan"), dtype=torch.bfloat16))
    most, found = tolerance(p.dtype, p.out_dtype, p.gemm.k), []
    for kernel in kernels:
        plan = get_engine(kernel.engine).plan(kernel, p, arch())
        for _ in range(2):
            out = poison.cuda()
            plan.execute(there, out)
            torch.cuda.synchronize()
            apart = out.cpu().double() - expected
            errors = apart.norm() / expected.norm(), apart.abs().max() / expected.abs().max()
            if not max(map(float, errors)) <= most:
                found.append(f"{kernel.name}: errors {errors[0]:.2e}, {errors[1]:.2e}")
                break
    return found


@pytest.mark.parametrize(("op", "family"), families())
def test_family(op: str, family: str) -> None:
    found = []
    for layer, p, kernels in cases(op, family, arch()):
        found += [f"{layer}: {one}" for one in wrong(kernels[:MOST], p)]
    assert not found, "\n".join(found)
