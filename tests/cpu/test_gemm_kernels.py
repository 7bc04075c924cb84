"""Every CPU GEMM kernel of the pool against float64, on shapes that break careless code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import Unit, compile_units, find_compiler
from tilewise.errors import ExecutionError, KernelError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.cpu import source
from tilewise.ops.gemm.kernels.cpu import ACCESSES, SPLITS, CpuGemmKernel, why_unusable
from tilewise.ops.gemm.problem import LAYOUTS, GemmProblem

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

# Blocks that a smaller cache does not hold are slow, not wrong: all are tested wherever this runs.
ARCH = detect("cpu").with_figures(l2_bytes=max(detect("cpu").l2_bytes, 2 << 20))
TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2,
    "int8": torch.int8,
    "int32": torch.int32,
}
KERNELS_PER_TEST = 8
GUARD = 64
POISON = 0xA5

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    # m, n, k, batch
    "one": ((1, 1, 1, 1), (1, 1, 70, 1), (1, 33, 1, 1), (35, 1, 1, 1), (1, 130, 65, 2)),
    "prime": ((31, 37, 41, 1), (13, 97, 29, 3), (67, 53, 131, 1)),
    "square": ((16, 16, 16, 1), (64, 64, 64, 2), (96, 96, 96, 1)),
    "skinny": (
        (1, 257, 100, 1),
        (4, 203, 67, 1),
        (211, 3, 90, 2),
        (300, 1, 129, 1),
        (9, 150, 33, 1),
    ),
    "deep": ((5, 7, 1100, 1), (30, 34, 1031, 1), (17, 15, 2050, 1), (2, 90, 700, 1)),
    "tall": ((260, 18, 20, 1), (18, 530, 12, 1), (129, 70, 300, 1)),
}


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


def chunks() -> list[Any]:
    """The pool in groups that share a family, small enough to spread over test workers."""
    by_kind: dict[str, list[CpuGemmKernel]] = {}
    for kernel in pool():
        by_kind.setdefault(f"{kernel.dtype}-{kernel.isa}-{kernel.family}", []).append(kernel)
    return [
        pytest.param(kernels[at : at + KERNELS_PER_TEST], id=f"{kind}-{at}")
        for kind, kernels in by_kind.items()
        for at in range(0, len(kernels), KERNELS_PER_TEST)
    ]


@dataclass
class Guarded:
    """An output with poison between its rows and around it."""

    buffer: torch.Tensor
    out: torch.Tensor

    def is_unharmed(self) -> bool:
        """Whether only the output itself was written."""
        touched = torch.zeros(self.buffer.numel(), dtype=torch.bool)
        inside = touched.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset())
        inside.fill_(True)
        raw = self.buffer.view(torch.uint8).reshape(self.buffer.numel(), -1)
        return bool((raw[~touched] == POISON).all())


def guarded(problem: GemmProblem) -> Guarded:
    row = problem.n + 5
    count = problem.batch * problem.m * row
    dtype = TORCH[problem.out_dtype]
    raw = torch.full(((count + 2 * GUARD) * dtype.itemsize,), POISON, dtype=torch.uint8)
    buffer = raw.view(dtype)
    shape, stride = (problem.batch, problem.m, problem.n), (problem.m * row, row, 1)
    if problem.batch == 1:
        shape, stride = shape[1:], stride[1:]
    return Guarded(buffer, buffer.as_strided(shape, stride, GUARD))


def operand(rows: int, cols: int, batch: int, order: str, dtype: str, seed: int) -> torch.Tensor:
    """Random values, rows or columns packed, with a gap between them where `seed` is odd."""
    generator = torch.Generator().manual_seed(seed)
    outer, inner = (rows, cols) if order == "r" else (cols, rows)
    shape = (batch, outer, inner + 3 * (seed % 2))
    if dtype == "int8":
        made = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    else:
        made = torch.randn(shape, generator=generator).to(TORCH[dtype])
    made = made[:, :, :inner]
    made = made if order == "r" else made.transpose(1, 2)
    return made[0] if batch == 1 else made


def error_of(run: Any, problem: GemmProblem, seed: int = 0) -> float:
    """‖out − ref‖ / ‖ref‖ of one call, infinite where it wrote outside its output."""
    a = operand(problem.m, problem.k, problem.batch, problem.layout[0], problem.dtype, seed)
    b = operand(problem.k, problem.n, problem.batch, problem.layout[1], problem.dtype, seed + 7)
    target = guarded(problem)
    run((a, b), target.out)
    if not target.is_unharmed():
        return float("inf")
    expected = a.double() @ b.double()
    error = torch.linalg.vector_norm(target.out.double() - expected)
    size = torch.linalg.vector_norm(expected)
    ratio = float(error / size) if size > 0 else float(error)
    return ratio if ratio == ratio else float("inf")


def problems_of(kernel: CpuGemmKernel) -> list[GemmProblem]:
    """The problems of the lists that a kernel serves, layouts dealt out in turn."""
    found = []
    for at, (m, n, k, batch) in enumerate(s for shapes in SHAPES.values() for s in shapes):
        for layout in LAYOUTS if at % 3 == 0 else (LAYOUTS[at % 4], LAYOUTS[(at + 1) % 4]):
            problem = GemmProblem(
                m=m,
                n=n,
                k=k,
                batch=batch,
                dtype=kernel.dtype,
                out_dtype=kernel.out_dtype,
                layout=layout,
            )
            if why_unusable(kernel, problem, ARCH) is None:
                found.append(problem)
    return found


def check(kernel: CpuGemmKernel, problem: GemmProblem, seed: int, by: CpuEngine) -> None:
    error = error_of(by.plan(kernel, problem, ARCH).execute, problem, seed)
    allowed = tolerance(problem.dtype, problem.out_dtype, problem.k)
    assert error <= allowed, f"{kernel.name} on {problem}: {error:.3g} > {allowed:.3g}"


@needs_compiler
@pytest.mark.parametrize("kernels", chunks())
def test_every_kernel_matches_float64(kernels: list[CpuGemmKernel]) -> None:
    for build in engine().build(kernels, ARCH):
        assert build.status == "ok", build.message
        assert not build.message
    for kernel in kernels:
        problems = problems_of(kernel)
        assert problems, f"no shape of the lists reaches {kernel.name}"
        for at, problem in enumerate(problems):
            check(kernel, problem, at, engine())


def sample(**traits: Any) -> CpuGemmKernel:
    """The first kernel of the pool with these traits."""
    for kernel in pool():
        if all(getattr(kernel, name) == value for name, value in traits.items()):
            return kernel
    pytest.skip(f"the pool on {ARCH.name} has no kernel with {traits}")


@needs_compiler
@pytest.mark.parametrize("family", ["packed", "unpacked", "splitk", "skinny", "gemv"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_shapes(family: str, data: st.DataObject) -> None:
    kernels = [k for k in pool() if k.family == family and k.dtype in ("fp32", "int8")]
    kernel = data.draw(st.sampled_from(kernels[:: max(1, len(kernels) // 4)]))
    short = st.integers(1, 20 if family != "gemv" else 1)
    long = st.integers(1, 150)
    is_thin = family in ("skinny", "gemv")
    m, n = data.draw(short if is_thin else long), data.draw(long)
    if is_thin and data.draw(st.booleans()):
        m, n = n, m
    problem = GemmProblem(
        m=m,
        n=n,
        k=data.draw(st.integers(1, 1500 if family == "splitk" else 300)),
        batch=data.draw(st.integers(1, 3)),
        dtype=kernel.dtype,
        out_dtype=kernel.out_dtype,
        layout=data.draw(st.sampled_from(LAYOUTS)),
    )
    if why_unusable(kernel, problem, ARCH) is None:
        check(kernel, problem, data.draw(st.integers(0, 9)), engine())


@needs_compiler
@pytest.mark.parametrize("family", ["packed", "unpacked", "splitk", "skinny", "gemv"])
def test_empty_sizes(family: str) -> None:
    kernel = sample(family=family, dtype="fp32")
    for m, n, k, batch in ((0, 5, 5, 1), (5, 0, 5, 1), (1, 5, 0, 2), (5, 5, 5, 0)):
        problem = GemmProblem(m=m, n=n, k=k, batch=batch)
        assert error_of(engine().plan(kernel, problem, ARCH).execute, problem) == 0.0


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
def test_threads_do_not_change_split_k_results() -> None:
    kernel = sample(family="splitk", dtype="fp32")
    problem = GemmProblem(m=30, n=34, k=64 * kernel.split_k + 31)
    a, b = operand(30, problem.k, 1, "r", "fp32", 0), operand(problem.k, 34, 1, "c", "fp32", 1)
    results = []
    for threads in (1, 2, 5):
        out = torch.empty(30, 34)
        CpuEngine(threads=threads).plan(kernel, problem, ARCH).execute((a, b), out)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


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
def test_a_sabotaged_kernel_is_caught(
    honest: str, broken: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.engines.cpu import engine as module

    kernel = sample(family="packed", dtype="fp32", unroll=1)
    shutil.copytree(module.HERE / "include", tmp_path / "include")
    header = tmp_path / "include" / "tilewise" / "microkernel.hpp"
    text = header.read_text()
    assert text.count(honest) == 1
    header.write_text(text.replace(honest, broken))
    (made,) = compile_units(
        [
            Unit(
                source=source(kernel),
                flags=module.ISA_FLAGS[kernel.isa],
                include_dirs=(tmp_path / "include", get_op("gemm").folder / "include"),
            )
        ]
    )
    assert made.library is not None
    sabotaged = CpuEngine(threads=1)
    sabotaged._load(kernel, made.library)
    problem = GemmProblem(m=31, n=37, k=1031, layout="rrr")
    error = error_of(sabotaged.plan(kernel, problem, ARCH).execute, problem)
    assert error > tolerance("fp32", "fp32", problem.k)


@needs_compiler
def test_threads_that_share_a_pool_do_not_disturb_each_other() -> None:
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
    signal.alarm(60)  # a deadlock ends as a failure, not as a hang
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
        timeout=500,
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


@pytest.mark.parametrize("arch", ["x86_avx2", "x86_avx512"])
def test_the_pool_is_wide_and_its_names_round_trip(arch: str) -> None:
    kernels = load_pool(get_op("gemm"), load_arch(arch), ["cpu"])
    mine = [k for k in kernels if isinstance(k, CpuGemmKernel)]
    assert sum(k.dtype == "fp32" for k in mine) >= 60
    assert {k.family for k in mine if k.dtype == "fp32"} == set(ACCESSES)
    assert {k.dtype for k in mine} == {"fp32", "fp16", "bf16", "fp8", "bf8", "int8"}
    assert len({k.name for k in mine}) == len(mine)
    for kernel in mine:
        assert CpuGemmKernel.from_name(kernel.name) == kernel
        assert CpuGemmKernel.from_dict(kernel.to_dict()) == kernel


@pytest.mark.parametrize("arch", ["x86_avx2", "x86_avx512"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_kernel_serves_every_problem(arch: str, layout: str) -> None:
    where = load_arch(arch)
    kernels = load_pool(get_op("gemm"), where, ["cpu"])
    results = {"int8": ("int32", "fp32")}
    for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8", "bf8", "int8"):
        for out in results.get(dtype, ("fp32", "fp16", "bf16")):
            for m, n, k in ((1, 1, 1), (1, 5000, 3), (3000, 2, 9), (700, 800, 900), (0, 3, 4)):
                p = GemmProblem(m=m, n=n, k=k, dtype=dtype, out_dtype=out, layout=layout)
                assert any(why_unusable(kernel, p, where) is None for kernel in kernels), p


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
