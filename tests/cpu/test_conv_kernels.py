"""What is peculiar to CPU convolutions; `test_contract.py` holds what all kernels promise."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from definition import by_definition
from harness import TORCH, error_of, sabotaged
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from shapes import SAME

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import KernelError, ProblemError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.kernels.cpu import CpuConvKernel, why_unusable
from tilewise.ops.conv.kernels.directed import OPS
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.reference import reference

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

ARCH = detect("cpu")


@cache
def pool() -> tuple[CpuConvKernel, ...]:
    """The kernels of this machine's architecture, and a sample of those of narrower ones."""
    found: list[CpuConvKernel] = []
    for name in ("x86_avx512", "x86_avx2"):
        step = 1 if name == ARCH.name else 5
        for op in OPS:
            found += load_pool(get_op(op), load_arch(name), ["cpu"])[::step]  # type: ignore[arg-type]
    return tuple(k for k in found if why_unusable(k, None, ARCH) is None)


@cache
def engine() -> CpuEngine:
    return CpuEngine(threads=3)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with channels last in memory, or packed as they are."""
    if layout == "nchw":
        return tensor.contiguous()
    order = (0, *range(2, tensor.ndim), 1)
    back = tuple(order.index(axis) for axis in range(tensor.ndim))
    return tensor.permute(order).contiguous().permute(back)


def problem_for(kernel: CpuConvKernel, sizes: dict[str, int]) -> ConvProblem:
    return ConvProblem(
        direction=kernel.op.removeprefix("conv_"),
        dtype=kernel.dtype,
        out_dtype=kernel.out_dtype,
        layout=kernel.layout,
        **sizes,  # type: ignore[arg-type]
    )


def sample(**traits: Any) -> CpuConvKernel:
    """The first kernel of the pool with these traits."""
    for kernel in pool():
        if all(getattr(kernel, name) == value for name, value in traits.items()):
            return kernel
    pytest.skip(f"the pool on {ARCH.name} has no kernel with {traits}")


@needs_compiler
def test_integers_are_exact_at_their_limits() -> None:
    for kernel in (k for k in pool() if k.dtype == "int8" and k.family != "depthwise"):
        groups = kernel.kc if kernel.family == "merged" else 1
        sizes = {"n": 2, "c": 300, "k": 300, "g": 300 // groups, "h": 40, "w": 40, **SAME}
        if kernel.family != "merged":
            sizes |= {"c": 160, "k": 20, "g": 1, "h": 16, "w": 40}
        problem = problem_for(kernel, sizes)
        if why_unusable(kernel, problem, ARCH) is not None:
            continue
        first, second, last = shapes(problem)
        a, b = (torch.full(s, -128, dtype=torch.int8) for s in (first, second))
        out = laid_out(torch.empty(last, dtype=TORCH[kernel.out_dtype]), kernel.layout)
        plan = engine().plan(kernel, problem, ARCH)
        plan.execute((laid_out(a, kernel.layout), laid_out(b, kernel.layout)), out)
        expected = reference(problem, a.double().numpy(), b.double().numpy())
        assert np.array_equal(out.double().numpy(), expected), kernel.name


@needs_compiler
@pytest.mark.parametrize(
    ("header", "honest", "broken"),
    [
        ("conv_tile.hpp", "while (++s < w.segments)", "while (++s < w.segments - 1)"),
        ("conv_gather.hpp", "min_of(kWidth, roles.results - first)", "(int64_t)kWidth"),
    ],
    ids=["skips the last tap", "writes past the last channel"],
)
def test_a_sabotaged_kernel_is_caught(
    header: str, honest: str, broken: str, tmp_path: Path
) -> None:
    kernel = sample(op="conv_fwd", family="direct", layout="nhwc", dtype="fp32")
    engine = sabotaged(kernel, header, honest, broken, tmp_path)
    problem = problem_for(kernel, {"n": 1, "c": 9, "k": 9, "h": 9, "w": 11, **SAME})
    error = error_of(engine.plan(kernel, problem, ARCH).execute, problem)
    assert error > tolerance("fp32", "fp32", problem.gemm.k)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
@settings(max_examples=25)
@given(data=st.data())
def test_the_reference_matches_the_definition(direction: str, data: st.DataObject) -> None:
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    g = number(1, 3)
    sizes: dict[str, int] = {
        "n": number(0, 2),
        "g": g,
        "c": g * number(1, 2),
        "k": g * number(1, 2),
    }
    for size, taps in (("d", "z"), ("h", "y"), ("w", "x")):
        sizes |= {size: number(1, 5), taps: number(1, 2), f"stride_{size}": number(1, 3)}
        sizes |= {f"pad_{size}": number(0, 2), f"dilation_{size}": number(1, 2)}
    try:
        problem = ConvProblem(direction=direction, **sizes)  # type: ignore[arg-type]
    except ProblemError:
        reject()
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s) for s in shapes(problem)[:2])
    np.testing.assert_allclose(reference(problem, a, b), by_definition(problem, a, b), atol=1e-12)


def test_impossible_kernels_are_refused() -> None:
    good = sample(op="conv_fwd", family="direct", layout="nchw", dtype="fp32").to_dict()
    for broken in (
        {"mr": 40},
        {"vector": "k"},
        {"split": "pixels"},
        {"kc": 0},
        {"block": 0},
        {"family": "merged"},
        {"out_dtype": "int32"},
        {"op": "conv_bwd_weight"},
    ):
        with pytest.raises(KernelError):
            get_op("conv_fwd").kernel_from_dict({**good, **broken})
