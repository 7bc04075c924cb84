"""One suite over every op and every engine that runs here: what a kernel promises.

It computes what float64 computes, whatever lies around its tensors; it is never chosen for what
`why_unusable` refuses; and without any model an op still runs. That names and JSON come back as
they were is held for every op, engine and architecture in `tests/unit/test_kernels.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import harness
import pytest
import shapes
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import OPERAND_DTYPES, tolerance
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.dispatch import Dispatcher, Registry, default_registry
from tilewise.engines import Engine, get_engine
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import ProblemError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import all_ops, get_op
from tilewise.ops.vendor import LIBRARIES, VendorKernel
from tilewise.settings import settings as tilewise_settings

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

# Blocks that a smaller cache does not hold are slow, not wrong: all are tested wherever this runs.
ARCH = detect("cpu").with_figures(
    l2_bytes=max(detect("cpu").l2_bytes, 2 << 20),
    l3_bytes=max(detect("cpu").l3_bytes, 2 << 20),
)
OPS = sorted(all_ops())
KERNELS_PER_TEST = 8


@cache
def pool(op: str) -> tuple[Kernel, ...]:
    """The kernels of this machine's architecture, and a sample of those of narrower ones."""
    given = get_op(op)
    found = load_pool(given, load_arch(ARCH.name), ["cpu"])
    if ARCH.name == "x86_avx512":
        found += load_pool(given, load_arch("x86_avx2"), ["cpu"])[::4]
    return tuple(k for k in found if given.why_unusable(k, None, ARCH) is None)


@cache
def engine(name: str) -> Engine:
    return CpuEngine(threads=3) if name == "cpu" else get_engine(name)


def chunks() -> list[Any]:
    """All pools in groups of one kind, small enough to spread over test workers."""
    by_kind: dict[str, list[Kernel]] = {}
    for op in OPS:
        for k in pool(op):
            kind = f"{op}-{k.isa}-{k.family}-{'fp32' if k.dtype == 'fp32' else 'converted'}"  # type: ignore[attr-defined]
            by_kind.setdefault(kind, []).append(k)
    return [
        pytest.param(kernels[at : at + KERNELS_PER_TEST], id=f"{kind}-{at}")
        for kind, kernels in by_kind.items()
        for at in range(0, len(kernels), KERNELS_PER_TEST)
    ]


def check(kernel: Kernel, problem: Problem, seed: int) -> None:
    plan = engine(kernel.engine).plan(kernel, problem, ARCH)
    error = harness.error_of(plan.execute, problem, seed)
    allowed = tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    assert error <= allowed, f"{kernel.name} on {problem}: {error:.3g} > {allowed:.3g}"


@needs_compiler
@pytest.mark.parametrize("kernels", chunks())
def test_every_kernel_matches_float64(kernels: list[Kernel]) -> None:
    for build in engine("cpu").build(kernels, ARCH):
        assert build.status == "ok", build.message
        assert not build.message
    for kernel in kernels:
        op = get_op(kernel.op)
        found = [p for p in shapes.problems(op, kernel) if not op.why_unusable(kernel, p, ARCH)]
        assert found, f"no shape of the lists reaches {kernel.name}"
        for at, problem in enumerate(found):
            check(kernel, problem, at)


@pytest.fixture
def clang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clang is the compiler; `TILEWISE_CXX=clang++ pytest` takes the whole suite through it."""
    if shutil.which("clang++") is None:
        pytest.skip("no clang++")
    monkeypatch.setenv("TILEWISE_CXX", "clang++")
    for known in (tilewise_settings, find_compiler):
        known.cache_clear()
    yield
    monkeypatch.undo()
    for known in (tilewise_settings, find_compiler):
        known.cache_clear()


def test_clang_compiles_a_kernel_of_every_kind(clang: None) -> None:
    kinds = {(k.op, k.isa, k.family): k for op in OPS for k in pool(op)}  # type: ignore[attr-defined]
    for build in CpuEngine(threads=1).build(list(kinds.values()), ARCH):
        assert build.status == "ok", build.message


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("op", OPS)
def test_the_vendor_matches_float64(op: str, library: str) -> None:
    given, kernel = get_op(op), VendorKernel(op_name=op, library=library)
    ran = 0
    for dtype in OPERAND_DTYPES if library == "torch" else ("fp32", "fp16", "int8"):
        problems = shapes.problems(given, kernel, dtype)[:: 7 if dtype != "fp32" else 3]
        for at, problem in enumerate(problems):
            if given.why_unusable(kernel, problem, ARCH) is None and not problem.is_empty:
                check(kernel, problem, 2 * at)
                ran += 1
    assert ran > 10


@needs_compiler
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=40)
@given(data=st.data())
def test_random_shapes(op: str, data: st.DataObject) -> None:
    """Sizes near those of the lists, of a kernel that serves them."""
    given = get_op(op)
    kernels = [k for k in pool(op) if k.dtype in ("fp32", "int8")]  # type: ignore[attr-defined]
    kernel = data.draw(st.sampled_from(kernels[:: max(1, len(kernels) // 12)]))
    near = [p for p in shapes.problems(given, kernel) if not given.why_unusable(kernel, p, ARCH)]
    base = data.draw(st.sampled_from(near))
    keys = {key: value for key, value in base.to_dict().items() if key != "op"}
    sizes = [key for key, value in keys.items() if type(value) is int]
    for key in data.draw(st.lists(st.sampled_from(sizes), max_size=2, unique=True)):
        keys[key] = data.draw(st.integers(max(1, keys[key] - 3), keys[key] + 4))
    try:
        problem = given.problem.from_dict(keys)
    except ProblemError:
        assume(False)
    assume(given.why_unusable(kernel, problem, ARCH) is None)
    check(kernel, problem, data.draw(st.integers(0, 9)))


@needs_compiler
@pytest.mark.parametrize("op", OPS)
def test_threads_do_not_change_a_bit(op: str) -> None:
    """Of one kernel for each way of dividing work; how many share it is no part of the result."""
    given = get_op(op)
    seen: dict[tuple[str, str], Kernel] = {}
    for kernel in pool(op):
        if kernel.dtype == "fp32":  # type: ignore[attr-defined]
            seen.setdefault((kernel.family, kernel.split), kernel)  # type: ignore[attr-defined]
    for kernel in seen.values():
        found = shapes.problems(given, kernel)
        problem = max(
            (p for p in found if not given.why_unusable(kernel, p, ARCH)), key=lambda p: p.flops
        )
        tensors, results = harness.operands(problem, 2), []
        shape, storage = given.shapes(problem)[-1], given.storage(problem)[-1]
        for threads in (1, 2, 5) if kernel.split != "pixels" else (3, 3, 3):  # type: ignore[attr-defined]
            out = harness.guarded(shape, problem.out_dtype, storage).tensor
            CpuEngine(threads=threads).plan(kernel, problem, ARCH).execute(tensors, out)
            results.append(out)
        assert all(torch.equal(results[0], out) for out in results), kernel.name


@pytest.mark.parametrize("op", OPS)
def test_nobody_is_chosen_for_what_is_refused(op: str) -> None:
    given = get_op(op)
    refused = 0
    for kernel in pool(op)[:: max(1, len(pool(op)) // 12)]:
        registry = Registry(op, ARCH)
        registry.declare(kernel)
        for problem in shapes.problems(given, kernel)[::5]:
            if given.why_unusable(kernel, problem, ARCH) is not None:
                assert registry.select(problem).kernel != kernel
                refused += 1
    assert refused > 5


@pytest.mark.parametrize("arch", ["x86_avx2", "x86_avx512"])
@pytest.mark.parametrize("op", OPS)
def test_some_kernel_serves_every_problem(op: str, arch: str) -> None:
    given, where = get_op(op), load_arch(arch)
    kernels = load_pool(given, where, ["cpu"])
    kinds = {(k.dtype, k.out_dtype): k for k in kernels}  # type: ignore[attr-defined]
    assert {dtype for dtype, _ in kinds} == {"fp32", "fp16", "bf16", "fp8", "bf8", "int8"}
    for kernel in kinds.values():
        problems: list[Any] = shapes.problems(given, kernel)
        problems += [replace(p, dtype="tf32") for p in problems if p.dtype == "fp32"]
        for problem in problems:
            assert any(given.why_unusable(k, problem, where) is None for k in kernels), problem


@needs_compiler
@pytest.mark.parametrize("op", OPS)
def test_an_op_runs_without_a_model(op: str) -> None:
    dispatcher = Dispatcher(default_registry(op, detect("cpu")), rankers=[])
    kernel = pool(op)[0]
    for problem in shapes.problems(get_op(op), kernel)[::9]:
        result = dispatcher.run(problem, *harness.operands(problem))
        given = [t.double().numpy() for t in harness.operands(problem)]
        expected = torch.as_tensor(get_op(op).reference(problem, *given))
        error = torch.linalg.vector_norm(torch.as_tensor(result.out).double() - expected)
        size = torch.linalg.vector_norm(expected)
        assert float(error) <= float(size) * tolerance(
            problem.dtype, problem.out_dtype, problem.gemm.k
        )
