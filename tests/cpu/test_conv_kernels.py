"""Every CPU convolution kernel of the pool against float64, on shapes that break careless code."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.cpu import engine as engine_module
from tilewise.engines.device import detect
from tilewise.engines.toolchain import Unit, compile_units, find_compiler
from tilewise.errors import KernelError, ProblemError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.cpu import source
from tilewise.ops.conv.kernels.cpu import OPS, CpuConvKernel, why_unusable
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.reference import brute_force, reference

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

ARCH = detect("cpu")
KERNELS_PER_TEST = 12
GUARD = 4096
POISON = 0xA5
TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2,
    "int8": torch.int8,
    "int32": torch.int32,
}

SAME = {"y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
STEP = {"stride_h": 2, "stride_w": 2}
DOWN = {**SAME, **STEP}
SHAPES: dict[str, tuple[dict[str, int], ...]] = {
    "square": ({"n": 2, "c": 16, "k": 32, "h": 8, "w": 8, **SAME},),
    "odd": (
        {"n": 2, "c": 7, "k": 5, "h": 9, "w": 11, **SAME},
        {"n": 1, "c": 70, "k": 40, "h": 6, "w": 7, **SAME},
    ),
    "one": ({"n": 1, "c": 1, "k": 1, "w": 1, "x": 1}, {"n": 1, "c": 3, "k": 2, "w": 2, "x": 2}),
    "pointwise": (
        {"n": 3, "c": 19, "k": 67, "h": 7, "w": 7, "y": 1, "x": 1},
        # As many pixels come out as go in, but not the same ones.
        {"n": 2, "c": 16, "k": 24, "h": 3, "w": 3, "y": 1, "x": 1, **STEP, "pad_h": 1, "pad_w": 1},
        {"n": 2, "c": 12, "k": 14, "g": 2, "h": 12, "w": 2, "y": 1, "x": 1, "pad_h": 2, "pad_w": 3}
        | {"stride_h": 2, "stride_w": 3},
        {"n": 1, "c": 8, "k": 8, "w": 4, "x": 1, "stride_w": 2, "pad_w": 2},
        {"n": 1, "c": 8, "k": 8, "h": 5, "w": 1, "y": 1, "x": 1, "stride_w": 2},
    ),
    "prime": ({"n": 1, "c": 13, "k": 17, "h": 11, "w": 19, **SAME},),
    "strided": (
        {"n": 2, "c": 5, "k": 9, "h": 11, "w": 13, **DOWN},
        {**DOWN, "n": 1, "c": 3, "k": 20, "h": 23, "w": 21, "y": 7, "x": 7, "pad_h": 3, "pad_w": 3},
        {"n": 1, "c": 6, "k": 4, "h": 9, "w": 9, "y": 1, "x": 1, "stride_h": 2, "stride_w": 2},
        {**SAME, "n": 2, "c": 3, "k": 4, "h": 4, "w": 4, "stride_h": 4, "stride_w": 5, "pad_h": 2},
    ),
    "dilated": (
        {**SAME, "n": 2, "c": 6, "k": 9, "h": 13, "w": 12, "dilation_h": 2, "dilation_w": 3},
    ),
    "asymmetric": (
        {"n": 1, "c": 5, "k": 7, "h": 10, "w": 14, "y": 2, "x": 5, "stride_h": 3, "pad_w": 3}
        | {"dilation_h": 2},
        {"n": 1, "c": 5, "k": 7, "h": 10, "w": 14, "y": 1, "x": 7, "pad_w": 3},
    ),
    "grouped": (
        {"n": 2, "c": 16, "k": 24, "g": 4, "h": 9, "w": 9, **SAME},
        {"n": 1, "c": 40, "k": 40, "g": 5, "h": 8, "w": 9, **DOWN},
        {"n": 1, "c": 18, "k": 36, "g": 9, "h": 5, "w": 6, **SAME},
    ),
    "depthwise": (
        {"n": 2, "c": 18, "k": 18, "g": 18, "h": 9, "w": 20, **SAME},
        {"n": 1, "c": 33, "k": 33, "g": 33, "h": 12, "w": 19, **DOWN},
        {**SAME, "n": 1, "c": 5, "k": 5, "g": 5, "h": 9, "w": 9, "y": 5, "x": 5, "pad_h": 2},
        {**SAME, "n": 1, "c": 4, "k": 4, "g": 4, "h": 18, "w": 9, "y": 7, "x": 7, "pad_h": 3},
    ),
    "multiplier": ({"n": 1, "c": 6, "k": 18, "g": 6, "h": 8, "w": 9, **SAME},),
    "one dimension": (
        {"n": 2, "c": 10, "k": 12, "w": 50, "x": 5, "pad_w": 2, "stride_w": 2},
        {"n": 1, "c": 4, "k": 4, "g": 4, "w": 37, "x": 3, "dilation_w": 3},
    ),
    "three dimensions": (
        {"n": 2, "c": 5, "k": 6, "d": 4, "h": 6, "w": 7, "z": 3, "pad_d": 1, **SAME},
        {"n": 1, "c": 4, "k": 4, "g": 4, "d": 5, "h": 5, "w": 5, "z": 2, "stride_d": 2, **SAME},
    ),
    "empty": (
        {"n": 0, "c": 4, "k": 4, "h": 6, "w": 6, **SAME},
        {"n": 1, "c": 0, "k": 4, "h": 6, "w": 6, **SAME},
        {"n": 1, "c": 4, "k": 0, "h": 6, "w": 6, **SAME},
    ),
}


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


def chunks() -> list[Any]:
    """The pool in groups of one kind, small enough to spread over test workers."""

    def kind(k: CpuConvKernel) -> str:
        return f"{k.op}-{k.isa}-{k.family}-{'fp32' if k.dtype == 'fp32' else 'converted'}"

    made = []
    for name, kernels in groupby(sorted(pool(), key=kind), kind):
        members = list(kernels)
        for at in range(0, len(members), KERNELS_PER_TEST):
            made.append(pytest.param(members[at : at + KERNELS_PER_TEST], id=f"{name}-{at}"))
    return made


@dataclass
class Guarded:
    """An output in its layout, with poison in it and around it."""

    buffer: torch.Tensor
    out: torch.Tensor

    def is_unharmed(self) -> bool:
        size = self.out.numel() * self.out.element_size()
        around = torch.cat((self.buffer[:GUARD], self.buffer[GUARD + size :]))
        return bool((around == POISON).all())


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with channels last in memory, or packed as they are."""
    if layout == "nchw":
        return tensor.contiguous()
    order = (0, *range(2, tensor.ndim), 1)
    back = tuple(order.index(axis) for axis in range(tensor.ndim))
    return tensor.permute(order).contiguous().permute(back)


def guarded(problem: ConvProblem) -> Guarded:
    shape, dtype = shapes(problem)[2], TORCH[problem.out_dtype]
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8)
    inner = buffer[GUARD : GUARD + size].view(dtype)
    stride = laid_out(torch.empty(shape, dtype=torch.uint8), problem.layout).stride()
    return Guarded(buffer, inner.as_strided(shape, stride, inner.storage_offset()))


def operand(shape: tuple[int, ...], dtype: str, layout: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == "int8":
        made = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    else:
        made = torch.randn(shape, generator=generator).to(TORCH[dtype])
    return laid_out(made, layout)


def error_of(run: Any, problem: ConvProblem, seed: int = 0) -> float:
    """‖out − ref‖ / ‖ref‖ of one call, infinite where it wrote outside its output."""
    first, second, _ = shapes(problem)
    a = operand(first, problem.dtype, problem.layout, seed)
    b = operand(second, problem.dtype, problem.layout, seed + 7)
    target = guarded(problem)
    run((a, b), target.out)
    if not target.is_unharmed():
        return float("inf")
    expected = torch.from_numpy(reference(problem, a.double().numpy(), b.double().numpy()))
    error = torch.linalg.vector_norm(target.out.double() - expected)
    size = torch.linalg.vector_norm(expected)
    ratio = float(error / size) if size > 0 else float(error)
    return ratio if ratio == ratio else float("inf")


def problem_for(kernel: CpuConvKernel, sizes: dict[str, int]) -> ConvProblem:
    return ConvProblem(
        direction=kernel.op.removeprefix("conv_"),
        dtype=kernel.dtype,
        out_dtype=kernel.out_dtype,
        layout=kernel.layout,
        **sizes,  # type: ignore[arg-type]
    )


def check(kernel: CpuConvKernel, problem: ConvProblem, seed: int, by: CpuEngine) -> None:
    error = error_of(by.plan(kernel, problem, ARCH).execute, problem, seed)
    allowed = tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    assert error <= allowed, f"{kernel.name} on {problem}: {error:.3g} > {allowed:.3g}"


@needs_compiler
@pytest.mark.parametrize("kernels", chunks())
def test_every_kernel_matches_float64(kernels: list[CpuConvKernel]) -> None:
    for build in engine().build(kernels, ARCH):
        assert build.status == "ok", build.message
        assert not build.message
    for kernel in kernels:
        problems = [problem_for(kernel, s) for listed in SHAPES.values() for s in listed]
        usable = [p for p in problems if why_unusable(kernel, p, ARCH) is None]
        assert usable, f"no shape of the lists reaches {kernel.name}"
        for at, problem in enumerate(usable):
            check(kernel, problem, at, engine())


@needs_compiler
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=40)
@given(data=st.data())
def test_random_shapes(op: str, data: st.DataObject) -> None:
    kernels = [k for k in pool() if k.op == op and k.dtype in ("fp32", "int8")]
    kernel = data.draw(st.sampled_from(kernels[:: max(1, len(kernels) // 12)]))
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    g = data.draw(st.sampled_from((1, 1, 2, 5, 17)))
    c, k = g * number(1, 9 if g < 5 else 4), g * number(1, 9 if g < 5 else 4)
    sizes = {"n": number(1, 3), "g": g, "c": c, "k": k}
    for size, taps, dim in (("d", "z", "d"), ("h", "y", "h"), ("w", "x", "w")):
        sizes |= {size: number(1, 4 if dim == "d" else 21), taps: number(1, 4)}
        sizes |= {f"stride_{dim}": number(1, 3), f"pad_{dim}": number(0, 3)}
        sizes |= {f"dilation_{dim}": number(1, 2)}
    try:
        problem = problem_for(kernel, sizes)
    except ProblemError:
        return
    if why_unusable(kernel, problem, ARCH) is None:
        check(kernel, problem, number(0, 9), engine())


def sample(**traits: Any) -> CpuConvKernel:
    """The first kernel of the pool with these traits."""
    for kernel in pool():
        if all(getattr(kernel, name) == value for name, value in traits.items()):
            return kernel
    pytest.skip(f"the pool on {ARCH.name} has no kernel with {traits}")


@needs_compiler
def test_threads_do_not_change_results() -> None:
    sizes = {"n": 3, "c": 16, "k": 16, "h": 12, "w": 13, **SAME}
    for op in OPS:
        kernel = next(k for k in pool() if k.op == op and k.split in ("tiles", "channels"))
        problem = problem_for(kernel, sizes)
        first, second, last = shapes(problem)
        a, b = operand(first, "fp32", kernel.layout, 0), operand(second, "fp32", kernel.layout, 1)
        results = []
        for threads in (1, 2, 5):
            out = laid_out(torch.empty(last), kernel.layout)
            CpuEngine(threads=threads).plan(kernel, problem, ARCH).execute((a, b), out)
            results.append(out)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@needs_compiler
def test_pixels_divided_among_threads_give_equal_bits_every_time() -> None:
    kernel = sample(op="conv_bwd_weight", split="pixels", dtype="fp32")
    problem = problem_for(kernel, {"n": 4, "c": 8, "k": 8, "h": 30, "w": 30, **SAME})
    first, second, last = shapes(problem)
    a, b = operand(first, "fp32", kernel.layout, 0), operand(second, "fp32", kernel.layout, 1)
    results = [laid_out(torch.empty(last), kernel.layout) for _ in range(5)]
    for out in results:
        engine().plan(kernel, problem, ARCH).execute((a, b), out)
    assert all(torch.equal(results[0], out) for out in results)


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
    shutil.copytree(get_op(kernel.op).folder / "include", tmp_path / "include")
    text = (tmp_path / "include" / header).read_text()
    assert text.count(honest) == 1
    (tmp_path / "include" / header).write_text(text.replace(honest, broken))
    unit = Unit(
        source=source(kernel),
        flags=engine_module.ISA_FLAGS[kernel.isa],
        include_dirs=(engine_module.HERE / "include", tmp_path / "include"),
    )
    (made,) = compile_units([unit])
    assert made.library is not None, made.log
    sabotaged = CpuEngine(threads=1)
    sabotaged._load(kernel, made.library)
    problem = problem_for(kernel, {"n": 1, "c": 9, "k": 9, "h": 9, "w": 11, **SAME})
    error = error_of(sabotaged.plan(kernel, problem, ARCH).execute, problem)
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
        return
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s) for s in shapes(problem)[:2])
    np.testing.assert_allclose(reference(problem, a, b), brute_force(problem, a, b), atol=1e-12)


@pytest.mark.parametrize("arch", ["x86_avx2", "x86_avx512"])
@pytest.mark.parametrize("op", OPS)
def test_the_pool_is_wide_and_its_names_round_trip(op: str, arch: str) -> None:
    kernels = load_pool(get_op(op), load_arch(arch), ["cpu"])
    mine = [k for k in kernels if isinstance(k, CpuConvKernel)]
    assert sum(k.dtype == "fp32" for k in mine) >= 40
    assert {k.dtype for k in mine} == {"fp32", "fp16", "bf16", "fp8", "bf8", "int8"}
    assert len({k.name for k in mine}) == len(mine)
    for kernel in mine:
        assert get_op(op).kernel_from_name(kernel.name) == kernel
        assert get_op(op).kernel_from_dict(kernel.to_dict()) == kernel
        assert min(kernel.tile) >= 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_some_kernel_serves_every_problem(op: str, layout: str) -> None:
    arch = load_arch("x86_avx2")
    kernels = load_pool(get_op(op), arch, ["cpu"])
    for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8", "bf8", "int8"):
        for out_dtype in ("", "fp32"):
            for sizes in (s for listed in SHAPES.values() for s in listed):
                problem = ConvProblem(
                    direction=op.removeprefix("conv_"),
                    dtype=dtype,
                    out_dtype=out_dtype,
                    layout=layout,
                    **sizes,  # type: ignore[arg-type]
                )
                assert any(why_unusable(k, problem, arch) is None for k in kernels), problem


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
