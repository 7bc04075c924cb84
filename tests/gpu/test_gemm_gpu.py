"""GEMM kernels on a real GPU against float64: sizes, layouts, types, strides, graphs, streams."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
from gemm_kernels import gemm_kernel

from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.engines.device import detect
from tilewise.engines.gpu.engine import TritonEngine
from tilewise.errors import TensorError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel, why_unusable
from tilewise.ops.gemm.launch import Epilogue
from tilewise.ops.gemm.problem import GemmProblem

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

pytestmark = pytest.mark.gpu

ENGINE = TritonEngine()
TYPES = {
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32},
    **{"fp8": torch.float8_e4m3fn, "bf8": torch.float8_e5m2, "int8": torch.int8},
    "int32": torch.int32,
}


def kernel(family: str, m: int, n: int, k: int, **traits: Any) -> GpuGemmKernel:
    return gemm_kernel(family=family, tile_m=m, tile_n=n, tile_k=k, **{"dtype": "bf16", **traits})


KERNELS = (
    kernel("pointer", 64, 64, 64),
    kernel("splitk", 64, 64, 64, split_k=4),
    kernel("splitk", 64, 32, 64, split_k=2, atomic=True),
    kernel("streamk", 64, 64, 64, blocks=2),
    kernel("skinny", 64, 16, 64, split_k=2),
    kernel("gemv", 4, 1, 512, stages=1, split_k=2),
    kernel("tma", 128, 64, 64, warps=8),
    kernel("ws", 128, 256, 64, warps=8, stages=4),
    kernel("ws", 64, 64, 128, stages=4, split_k=3),
    kernel("ws", 128, 192, 64, warps=8, stages=4, fill=True),
    kernel("ws", 64, 16, 128, stages=4, blocks=2, swap=True, fill=True),
    kernel("duo", 128, 128, 64, stages=4),
    kernel("pingpong", 64, 64, 64, stages=4),
)
WHOLE = (
    kernel("smallk", 64, 64, 64, blocks=4),
    kernel("smallk", 64, 128, 16, blocks=4),
    kernel("smallk", 64, 256, 64, blocks=2),
    kernel("smallk", 64, 128, 128, blocks=2),
)
"""They take all of K in one step, the longer of M and N streaming past the shorter."""
SIZES = {
    "one": (1, 1, 1),
    "primes": (127, 131, 257),
    "thin": (3, 1000, 1003),
    "even": (256, 512, 1024),
    "ragged": (200, 328, 264),
    "tall": (2050, 136, 520),
    "flat": (16, 4104, 2048),
    "deep": (65, 72, 8200),
    "many tiles": (2056, 4104, 264),
    "many columns": (72, 20008, 264),
}
"""The last two give persistent blocks several tiles, and groups that alternate both of them."""


@cache
def arch() -> Arch:
    return detect("gpu")


def dense(order: str, shape: tuple[int, ...], kind: str) -> Any:
    """A random tensor whose last two dimensions lie in memory as `order` says."""
    stored = shape if order == "r" else (*shape[:-2], shape[-1], shape[-2])
    if kind == "int8":
        values = torch.randint(-128, 128, stored, device="cuda", dtype=torch.int8)
    else:
        values = torch.randn(stored, device="cuda").to(TYPES[kind])
    return values if order == "r" else values.transpose(-1, -2)


def operands(problem: GemmProblem) -> tuple[Any, Any, Any]:
    p, batch = problem, (problem.batch,) if problem.batch > 1 else ()
    a = dense(p.layout[0], (*batch, p.m, p.k), p.dtype)
    b = dense(p.layout[1], (*batch, p.k, p.n), p.dtype)
    out = torch.empty((*batch, p.m, p.n), device="cuda", dtype=TYPES[p.out_dtype])
    return a, b, poison(out)


def poison(out: Any) -> Any:
    return out.fill_(float("nan") if out.is_floating_point() else -(2**30))


def error(out: Any, expected: Any) -> float:
    """By norm or at the worst element, whichever is larger: one wrong row is little of many."""
    apart = out.double() - expected
    return float(
        torch.maximum(apart.norm() / expected.norm(), apart.abs().max() / expected.abs().max())
    )


def allowed(problem: GemmProblem) -> float:
    # Hopper adds fp8 products with 14 bits; what rounding of the result allows covers it.
    return tolerance(problem.dtype, problem.out_dtype, problem.k)


def check(chosen: GpuGemmKernel, problem: GemmProblem, epilogue: Any = None) -> None:
    if reason := why_unusable(chosen, problem, arch()):
        pytest.skip(reason)
    a, b, out = operands(problem)
    plan = ENGINE.plan(chosen, problem, arch(), epilogue=epilogue)
    plan.execute([a, b], out)
    expected = a.double() @ b.double()
    assert error(out, expected) <= allowed(problem)
    # A second launch meets the workspace as the first one left it.
    plan.execute([a, b], poison(out))
    assert error(out, expected) <= allowed(problem)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("chosen", KERNELS, ids=lambda k: k.name[12:])
def test_sizes(chosen: GpuGemmKernel, size: tuple[int, int, int]) -> None:
    m, n, k = size
    check(chosen, GemmProblem(m=m, n=n, k=k, dtype="bf16"))


@pytest.mark.parametrize("layout", ["rrr", "crr", "ccr"])
@pytest.mark.parametrize("chosen", KERNELS, ids=lambda k: k.name[12:])
def test_layouts(chosen: GpuGemmKernel, layout: str) -> None:
    m = 3 if chosen.family == "gemv" else 16 if chosen.family == "skinny" else 72
    check(chosen, GemmProblem(m=m, n=328, k=264, dtype="bf16", layout=layout))


@pytest.mark.parametrize("chosen", KERNELS, ids=lambda k: k.name[12:])
def test_batches(chosen: GpuGemmKernel) -> None:
    m = 3 if chosen.family == "gemv" else 16
    check(chosen, GemmProblem(m=m, n=136, k=264, batch=5, dtype="bf16"))


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
@pytest.mark.parametrize("size", [(1031, 331), (331, 1031), (1000, 328), (77, 1048), (1, 1)])
@pytest.mark.parametrize(("batch", "less"), [(1, 0), (3, 3), (2, 8)])
@pytest.mark.parametrize("chosen", WHOLE, ids=lambda k: k.name[12:])
def test_short_reductions(
    chosen: GpuGemmKernel, batch: int, less: int, size: tuple[int, int], layout: str
) -> None:
    m, n = size
    k = chosen.tile_k - less
    problem = GemmProblem(m=m, n=n, k=k, batch=batch, dtype="bf16", layout=layout)
    check(replace(chosen, swap=m < n), problem)


@pytest.mark.parametrize("kind", ["fp16", "fp8", "bf8", "int8", "tf32"])
def test_short_reductions_of_types(kind: str) -> None:
    chosen = kernel("smallk", 64, 64, 32 if kind == "tf32" else 64, dtype=kind)
    for m, n, k in ((1040, 336, chosen.tile_k), (331, 1040, chosen.tile_k - 3)):
        check(replace(chosen, swap=m < n), GemmProblem(m=m, n=n, k=k, dtype=kind))


def test_short_reductions_with_an_epilogue() -> None:
    for m, n in ((1031, 328), (77, 1048)):
        problem = GemmProblem(m=m, n=n, k=61, dtype="bf16")
        a, b, out = operands(problem)
        bias = torch.randn(n, device="cuda").to(torch.bfloat16)
        silu = Epilogue(bias=True, activation="silu")
        plan = ENGINE.plan(replace(WHOLE[0], swap=m < n), problem, arch(), epilogue=silu)
        plan.execute([a, b, bias], out)
        expected = torch.nn.functional.silu(a.double() @ b.double() + bias.double())
        assert error(out, expected) <= allowed(problem)


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
def test_tf32_in_every_layout(layout: str) -> None:
    for chosen in (
        kernel("tma", 64, 256, 32, dtype="tf32", stages=4),
        kernel("pointer", 64, 64, 32, dtype="tf32"),
    ):
        check(chosen, GemmProblem(m=200, n=332, k=132, batch=3, dtype="tf32", layout=layout))


@pytest.mark.parametrize("layout", ["rcr", "rrr"])
def test_exact_fp32_with_few_rows(layout: str) -> None:
    for rows in (8, 16):
        chosen = kernel("skinny", 128, rows, 64, dtype="fp32", split_k=4)
        check(chosen, GemmProblem(m=rows - 1, n=509, k=1021, dtype="fp32", layout=layout))


@pytest.mark.parametrize("kind", ["fp16", "fp8", "bf8", "int8", "tf32", "fp32"])
@pytest.mark.parametrize("family", ["pointer", "splitk", "streamk", "tma", "ws", "duo"])
def test_types(family: str, kind: str) -> None:
    step = 32 if kind in ("tf32", "fp32") else 128
    traits: dict[str, Any] = {"split_k": 2} if family == "splitk" else {"stages": 3}
    chosen = kernel(family, 128, 64, step, dtype=kind, **traits)
    check(chosen, GemmProblem(m=200, n=336, k=528, dtype=kind))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize("chosen", KERNELS, ids=lambda k: k.name[12:])
def test_bias_and_activation(chosen: GpuGemmKernel, activation: str) -> None:
    problem = GemmProblem(m=4, n=328, k=520, dtype="bf16")
    if reason := why_unusable(chosen, problem, arch()):
        pytest.skip(reason)
    a, b, out = operands(problem)
    bias = torch.randn(problem.n, device="cuda").to(torch.bfloat16)
    plan = ENGINE.plan(chosen, problem, arch(), epilogue=Epilogue(bias=True, activation=activation))
    plan.execute([a, b, bias], out)
    sums = a.double() @ b.double() + bias.double()
    functions = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}
    functions |= {"silu": torch.nn.functional.silu, "none": lambda x: x}
    assert error(out, functions[activation](sums)) <= allowed(problem)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("swap", [False, True])
def test_scaled_fp8(scaling: str, swap: bool) -> None:
    chosen = kernel("ws", 64, 64, 128, dtype="fp8", stages=4, swap=swap)
    problem = GemmProblem(m=100, n=336, k=528, dtype="fp8")
    if reason := why_unusable(chosen, problem, arch()):
        pytest.skip(reason)
    a, b, out = operands(problem)
    sizes = (problem.m, problem.n) if scaling == "row" else (1, 1)
    left, right = (torch.rand(size, device="cuda") + 0.5 for size in sizes)
    plan = ENGINE.plan(chosen, problem, arch(), epilogue=Epilogue(scaling=scaling))
    plan.execute([a, b, left, right], out)
    expected = (a.double() @ b.double()) * left.double()[:, None] * right.double()[None, :]
    assert error(out, expected) <= allowed(problem)


def test_any_stride_and_alignment() -> None:
    problem = GemmProblem(m=70, n=90, k=110, dtype="bf16")
    a = torch.randn(80, 300, device="cuda").bfloat16()[3:73, 1:221:2]
    b = torch.randn(200, 110, device="cuda").bfloat16().t()[:, 5:95]
    out = poison(torch.empty(70, 95, device="cuda", dtype=torch.bfloat16))[:, 1:91]
    plan = ENGINE.plan(KERNELS[0], problem, arch())
    plan.execute([a, b], out)
    assert error(out, a.double() @ b.double()) <= allowed(problem)


def test_tma_refuses_what_it_cannot_address() -> None:
    problem = GemmProblem(m=64, n=64, k=64, dtype="bf16")
    chosen = KERNELS[7]
    if reason := why_unusable(chosen, problem, arch()):
        pytest.skip(reason)
    a, b, out = operands(problem)
    plan = ENGINE.plan(chosen, problem, arch())
    shifted = torch.randn(64 * 64 + 1, device="cuda").bfloat16()[1:].view(64, 64)
    with pytest.raises(TensorError, match="16 bytes"):
        plan.execute([shifted, b], out)
    plan.execute([a, b], out)
    assert error(out, a.double() @ b.double()) <= allowed(problem)


@pytest.mark.parametrize("chosen", [*KERNELS, WHOLE[0]], ids=lambda k: k.name[12:])
def test_graphs_replay(chosen: GpuGemmKernel) -> None:
    if chosen.family == "smallk":
        chosen = replace(chosen, swap=True)
    k = 64 if chosen.family == "smallk" else 2048
    problem = GemmProblem(m=4, n=520, k=k, dtype="bf16")
    if reason := why_unusable(chosen, problem, arch()):
        pytest.skip(reason)
    a, b, out = operands(problem)
    plan = ENGINE.plan(chosen, problem, arch())
    plan.execute([a, b], out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.execute([a, b], out)
    for _ in range(3):
        a.copy_(torch.randn_like(a))
        poison(out)
        graph.replay()
        assert error(out, a.double() @ b.double()) <= allowed(problem)


@pytest.mark.parametrize(
    "chosen", [k for k in KERNELS if k.is_deterministic], ids=lambda k: k.name[12:]
)
def test_equal_inputs_give_equal_bits(chosen: GpuGemmKernel) -> None:
    problem = GemmProblem(m=4, n=1032, k=4096, dtype="bf16")
    if reason := why_unusable(chosen, problem, arch()):
        pytest.skip(reason)
    a, b, out = operands(problem)
    plan = ENGINE.plan(chosen, problem, arch())
    plan.execute([a, b], out)
    first = out.clone()
    for _ in range(20):
        plan.execute([a, b], poison(out))
        assert torch.equal(out, first)


def test_streams_do_not_share_a_workspace() -> None:
    problem = GemmProblem(m=64, n=64, k=8192, dtype="bf16")
    plan = ENGINE.plan(KERNELS[1], problem, arch())
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [operands(problem) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (a, b, out) in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                plan.execute([a, b], out)
    torch.cuda.synchronize()
    for a, b, out in sets:
        assert error(out, a.double() @ b.double()) <= allowed(problem)


def test_the_tolerance_catches_a_lost_step() -> None:
    problem = GemmProblem(m=64, n=64, k=1024, dtype="bf16")
    a, b, out = operands(problem)
    ENGINE.plan(KERNELS[0], problem, arch()).execute([a, b], out)
    lost = a.double()[:, :-16] @ b.double()[:-16]
    assert error(out, lost) > allowed(problem)


UNEVEN = [(127, 131, 257), (13, 331, 257), (3, 331, 1027), (13, 331, 8195), (1, 331, 8195)]
UNEVEN += [(1031, 331, 27), (331, 1031, 27), (1031, 331, 7), (331, 1031, 7)]
UNEVEN += [(127, 328, 264), (1, 328, 1032), (127, 136, 8200), (1031, 328, 56), (328, 1032, 56)]
UNEVEN += [(127, 336, 272), (1, 336, 1040), (127, 144, 8208)]
"""Primes where a kernel takes them, else rows of 16 bytes that its tiles do not divide."""
EVEN = [(256, 512, 1024), (16, 512, 1024), (4, 512, 1024), (1, 512, 2048), (16, 512, 8192)]
EVEN += [(1, 512, 8192), (1024, 256, 64), (256, 1024, 64), (1024, 256, 16), (256, 1024, 16)]


def many_tiles(chosen: GpuGemmKernel, where: Arch) -> GemmProblem:
    """Half as many tiles again as blocks run at once, the last of each row and column cut off."""
    few = {"gemv": 1, "skinny": chosen.tile_n - 1}.get(chosen.family)
    columns = 1 if few else 3
    if chosen.swap and chosen.family != "smallk":  # few rows, which lie along tile_n
        columns = max(1, min(3, 128 // chosen.tile_n))
        few = min(128, columns * chosen.tile_n) - 8
    slots = where.compute_units * chosen.blocks
    rows = -(-3 * slots // (2 * columns))
    long, short = rows * chosen.tile_m - 8, few or columns * chosen.tile_n - 8
    steps = 1 if chosen.family == "smallk" else max(3, chosen.split_k)
    m, n = (short, long) if chosen.swap else (long, short)
    problem = GemmProblem(m=m, n=n, k=steps * chosen.tile_k, dtype=chosen.dtype)
    assert prod(chosen.tiles(problem)) > slots
    return problem


def problems_of(chosen: GpuGemmKernel, turn: int, where: Arch) -> list[GemmProblem]:
    """One of many tiles; of uneven and of even sizes the first served, these in turning layouts."""
    found = [many_tiles(chosen, where)]
    layouts = ["rcr", "rrr", "crr", "ccr"]
    by_turns = layouts[turn % 4 :] + layouts[: turn % 4]
    for sizes, orders in ((UNEVEN, ["rcr"]), (EVEN, by_turns)):
        problems = (
            GemmProblem(m=m, n=n, k=k, dtype=chosen.dtype, layout=order)
            for order in orders
            for m, n, k in sizes
        )
        found += [p for p in problems if why_unusable(chosen, p, where) is None][:1]
    return found


@pytest.mark.parametrize("kind", [k for k in TYPES if k != "int32"])
def test_every_kernel_of_the_pool(kind: str) -> None:
    """Kernels are compiled in parallel first: one after the other they would take half an hour."""
    pool = [k for k in load_pool(get_op("gemm"), arch()) if k.engine == "triton"]
    own = [k for k in pool if k.dtype == kind]
    pairs = [(k, p) for turn, k in enumerate(own) for p in problems_of(k, turn, arch())]
    assert len(pairs) == 3 * len(own)
    assert [p for k, p in pairs if why_unusable(k, p, arch())] == []
    assert ENGINE.compile_ahead(pairs, arch()) == []
    wrong = []
    for chosen, problem in pairs:
        a, b, out = operands(problem)
        ENGINE.plan(chosen, problem, arch()).execute([a, b], out)
        found = error(out, a.double() @ b.double())
        if not found <= allowed(problem):
            wrong.append(f"{chosen.name} on {problem}: {found:.2e} > {allowed(problem):.2e}")
    assert wrong == []
