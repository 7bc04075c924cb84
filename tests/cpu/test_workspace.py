"""What a workspace holds from earlier is never computed with, not even to be thrown away.

Lanes beyond the end of an image cost nothing while they hold zeros. With the denormal numbers that
recycled memory is full of they cost up to seventy times the kernel's time, and no result is wrong.
The processor keeps a flag for that: set once an operand was denormal.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.gemm.problem import GemmProblem

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="reads the control register of x86 through glibc",
    ),
]

ARCH = detect("cpu")
DENORMAL = np.uint32(0x00332211)
EXCEPTIONS, DENORMAL_OPERAND = 0x3F, 0x02

SAME = {"y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
CONVOLUTIONS: Sequence[dict[str, int]] = (
    {"n": 1, "c": 120, "k": 32, "h": 1, "w": 1, "y": 1, "x": 1},
    {"n": 2, "c": 7, "k": 70, "h": 9, "w": 11, **SAME},
    {"n": 1, "c": 40, "k": 20, "h": 13, "w": 10, **SAME, "stride_h": 2, "stride_w": 2},
    {"n": 1, "c": 33, "k": 33, "g": 33, "h": 10, "w": 10, **SAME},
    {"n": 1, "c": 18, "k": 18, "g": 18, "h": 9, "w": 7, **SAME, "stride_h": 2, "stride_w": 2},
    {"n": 1, "c": 24, "k": 24, "g": 6, "h": 7, "w": 9, **SAME},
    {"n": 1, "c": 9, "k": 5, "d": 4, "h": 6, "w": 7, "z": 3, "pad_d": 1, **SAME},
)
PRODUCTS = ((1, 1, 1), (5, 7, 300), (67, 26, 33), (70, 130, 65), (1, 200, 90), (3, 3, 5000))


class Flags:
    """The floating-point exceptions of this thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libm.so.6")
        self._held = (ctypes.c_uint32 * 8)()  # a `fenv_t`, of which the last word is MXCSR

    def clear(self) -> None:
        self._library.fegetenv(self._held)
        self._held[7] &= ~EXCEPTIONS
        self._library.fesetenv(self._held)

    def met_denormals(self) -> bool:
        self._library.fegetenv(self._held)
        return bool(self._held[7] & DENORMAL_OPERAND)


def operands(problem: Any) -> tuple[list[Any], Any]:
    random = np.random.default_rng(0)
    if isinstance(problem, GemmProblem):
        made = [random.uniform(1, 2, s) for s in ((problem.m, problem.k), (problem.k, problem.n))]
        return [m.astype(np.float32) for m in made], np.empty((problem.m, problem.n), np.float32)
    *given, result = shapes(problem)

    def laid_out(shape: tuple[int, ...]) -> Any:
        values = random.uniform(1, 2, shape).astype(np.float32)
        if problem.layout == "nchw":
            return values
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)

    return [laid_out(s) for s in given], laid_out(result)


def problems_of(op: str) -> list[Problem]:
    if op == "gemm":
        return [GemmProblem(m=m, n=n, k=k, dtype="fp32", layout="rrr") for m, n, k in PRODUCTS]
    direction = op.removeprefix("conv_")
    return [
        ConvProblem(direction=direction, dtype="fp32", layout=layout, **sizes)  # type: ignore[arg-type]
        for sizes in CONVOLUTIONS
        for layout in ("nchw", "nhwc")
    ]


def offenders(op: str, engine: CpuEngine) -> list[str]:
    pool: list[Kernel] = [
        k for k in load_pool(get_op(op), ARCH, ["cpu"]) if getattr(k, "dtype", "") == "fp32"
    ]
    why, flags, found, served = get_op(op).why_unusable, Flags(), [], set()
    for problem in problems_of(op):
        inputs, out = operands(problem)
        for kernel in pool:
            if why(kernel, problem, ARCH) is not None:
                continue
            plan = engine.plan(kernel, problem, ARCH)
            old = np.full(plan.workspace_bytes // 4 + 1, DENORMAL).view(np.uint8)
            call = plan.bind(inputs, out, old)
            flags.clear()
            call()
            served.add(kernel.family)  # type: ignore[attr-defined]
            if flags.met_denormals():
                found.append(f"{kernel.name} on {problem}")
    assert served == {k.family for k in pool}  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("op", ["gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_nothing_is_computed_with_what_was_left_in_the_workspace(op: str) -> None:
    assert offenders(op, CpuEngine(threads=1)) == []


def test_the_flag_tells_denormal_operands() -> None:
    flags = Flags()
    denormal, product = np.full(4, DENORMAL).view(np.float32), np.empty(4, np.float32)
    flags.clear()
    np.multiply(np.ones(4, np.float32), np.ones(4, np.float32), out=product)
    assert not flags.met_denormals()
    np.multiply(denormal, np.ones(4, np.float32), out=product)
    assert flags.met_denormals()
