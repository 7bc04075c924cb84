"""Convolutions of odd channels through kernels that copy 16 bytes at a time, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from oracle import Oracle

from tilewise.core.arch import Arch, load_arch
from tilewise.core.dtypes import dtype
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import empty, is_torch, stored_copy, view
from tilewise.dispatch import Dispatcher, Registry, padding
from tilewise.dispatch.operands import prepare
from tilewise.dispatch.padding import COPY_US, aligned, copy_us
from tilewise.engines import Plan, get_engine
from tilewise.errors import ExecutionError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.problem import DIRECTIONS, ConvProblem, padded
from tilewise.ops.gemm.problem import GemmProblem

H200 = load_arch("sm_90", "H200")
ODD = [(13, 24), (16, 13), (13, 21), (3, 8)]
"""Counts of channels: c and k."""


def layer(direction: str, c: int, k: int, **changes: Any) -> ConvProblem:
    sizes: dict[str, Any] = {"n": 2, "h": 6, "w": 5, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    sizes |= {"stride_h": 2, "dtype": "fp16", **changes}
    return ConvProblem(direction=direction, c=c, k=k, **sizes)


def kernel_of(family: str, direction: str, **traits: Any) -> DenseConvKernel:
    loads = 4 if family == "gather" else 1
    chosen: dict[str, Any] = {"dtype": "fp16", "tile_m": 128, "tile_n": 64, "stages": 4}
    chosen |= {"load_warps": loads, **traits}
    return DenseConvKernel(op_name=f"conv_{direction}", family=family, **chosen)


def outgrown(problem: ConvProblem) -> set[int]:
    """Which tensors of a call have rows that TMA cannot copy, or filters that go with them."""
    c, k = problem.c % 8 > 0, problem.k % 8 > 0 and problem.direction != "fwd"
    sides = {
        "fwd": (c, c or k, k),
        "bwd_data": (k, c or k, c),
        "bwd_weight": (c, k, c or k),
    }
    return {at for at, is_odd in enumerate(sides[problem.direction]) if is_odd}


class Computing(Plan):
    """Refuses what the kernel would refuse, and computes in float64."""

    def __init__(self, kernel: Kernel, problem: Problem, arch: Arch, epilogue: Any = None) -> None:
        self.kernel, self.problem, self.epilogue = kernel, problem, epilogue
        self.workspace_bytes = 0
        self.given: list[Any] = []
        self._op = get_op(kernel.op)
        why = self._op.why_unusable(kernel, problem, arch)
        assert why is None, why
        self._arch = arch

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        tensors = (*operands[:2], out)
        assert tuple(tuple(t.shape) for t in tensors) == self._op.shapes(self.problem)
        if not is_torch(out):
            return None
        from tilewise.engines.gpu.engine import GpuPlan

        return GpuPlan(self.kernel, self.problem, self._arch).why_unfit(operands[:2], out)

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        why = self.why_unfit(operands, out)
        assert why is None, why
        self.given = [*operands, out]
        one, two = (np.asarray(operand, np.float64) for operand in operands[:2])
        result = self._op.reference(self.problem, one, two)
        assert np.isfinite(result).all(), "padding was read before it was cleared"
        np.asarray(out)[...] = result


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU, with NaN in all memory that nobody has written."""

    def poisoned(*of: Any) -> Any:
        made = empty(*of)
        made[...] = float("nan")
        return made

    engine = get_engine("cuda")
    monkeypatch.setattr(engine, "why_unavailable", lambda: None)
    monkeypatch.setattr(engine, "plan", Computing)
    monkeypatch.setattr(padding, "empty", poisoned)


def tensors_for(problem: ConvProblem, library: str) -> list[Any]:
    """Operands of small whole numbers, whose sums are exact, and a result of NaN."""
    op = get_op(problem.op)
    draw = np.random.default_rng(problem.c * 31 + problem.k)
    made: list[Any] = [
        draw.integers(-2, 3, shape).astype(np.float16) for shape in op.shapes(problem)
    ]
    made[-1] = np.full(made[-1].shape, np.nan, np.float16)
    if library == "torch":
        made = [pytest.importorskip("torch").from_numpy(array) for array in made]
    return [
        stored_copy(tensor, storage)
        for tensor, storage in zip(made, op.storage(problem), strict=True)
    ]


def expected(problem: ConvProblem, tensors: Sequence[Any]) -> Any:
    one, two = (np.asarray(tensor, np.float64) for tensor in tensors[:2])
    return get_op(problem.op).reference(problem, one, two)


def registry_of(*kernels: Kernel) -> Registry:
    made = Registry(kernels[0].op, H200)
    made.declare(kernels)
    return made


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("c", "k"), ODD)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_odd_channels_are_served(direction: str, c: int, k: int, library: str) -> None:
    problem = layer(direction, c, k)
    kernel = kernel_of("im2col", direction)
    ours = registry_of(kernel)
    one, two, out = tensors_for(problem, library)
    before = [np.asarray(tensor).copy() for tensor in (one, two)]
    op, larger = ours.op, aligned(ours.op, kernel, problem)
    moved = outgrown(problem)
    assert (larger != problem) == bool(moved)
    for _ in range(2):
        result = ours.run(problem, one, two, out=out)
        assert (result.kernel, result.out is out, result.copied) == (kernel, True, ())
        assert np.array_equal(np.asarray(out), expected(problem, before))
        assert result.workspace_bytes == sum(2 * prod(op.shapes(larger)[at]) for at in moved)
        out[...] = float("nan")
    assert all(map(np.array_equal, (np.asarray(one), np.asarray(two)), before))
    assert np.array_equal(np.asarray(ours.run(problem, one, two).out), expected(problem, before))


@pytest.mark.parametrize("family", ["rows", "halo"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_family_that_copies_rows_is_padded(direction: str, family: str) -> None:
    taps = {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0} if family == "rows" else {}
    problem = layer(direction, 13, 21, stride_h=1, **taps)
    is_patch = family == "halo" and direction == "bwd_weight"
    traits = {"tile_m": 64, "math_groups": 3, "tile_k": 64} if is_patch else {}
    ours = registry_of(kernel_of(family, direction, **traits))
    *operands, _ = tensors_for(problem, "numpy")
    result = ours.run(problem, *operands)
    assert result.kernel.family == family
    assert np.array_equal(result.out, expected(problem, operands))


def test_other_ranks_and_dtypes_are_padded() -> None:
    flat = {"h": 1, "y": 1, "pad_h": 0, "stride_h": 1}
    for changes in (flat, {"d": 3, "z": 2, "pad_d": 1}, {"out_dtype": "fp32"}):
        problem = layer("bwd_data", 13, 21, **changes)
        *operands, _ = tensors_for(problem, "numpy")
        result = registry_of(kernel_of("im2col", "bwd_data")).run(problem, *operands)
        assert np.array_equal(result.out, expected(problem, operands))
    wide = layer("fwd", 6, 5, dtype="tf32")
    kernel = kernel_of("im2col", "fwd", dtype="tf32", tile_k=32)
    assert aligned(get_op("conv_fwd"), kernel, wide) == replace(wide, c=8)
    operands = [tensor.astype(np.float32) for tensor in tensors_for(wide, "numpy")[:2]]
    result = registry_of(kernel).run(wide, *operands)
    assert np.array_equal(result.out, expected(wide, operands))


PROBLEMS = {
    "odd c": {"c": 377, "k": 256},
    "odd k": {"c": 256, "k": 255},
    "head": {"c": 256, "k": 364, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "both": {"c": 3, "k": 21, "dtype": "bf16"},
    "tf32": {"c": 6, "k": 10, "dtype": "tf32"},
    "even": {"c": 64, "k": 128},
    "grouped": {"c": 36, "k": 72, "g": 2},
    "depthwise": {"c": 9, "k": 9, "g": 9},
    "first": {"c": 13, "k": 21, "layout": "nchw"},
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_only_kernels_that_need_it_are_padded(direction: str, name: str) -> None:
    problem = layer(direction, **{"stride_h": 1, **PROBLEMS[name]})
    op = get_op(problem.op)
    served = set()
    for kernel in load_pool(op, H200):
        larger = aligned(op, kernel, problem)
        if larger != problem:
            assert (problem.g, problem.layout) == (1, "nhwc")
            families = {"cuda": ("im2col", "rows", "halo", "taps"), "triton": ("gemm",)}
            assert kernel.family in families[kernel.engine]
            if op.why_unusable(kernel, larger, H200) is None:
                served.add(kernel.family)
                why = op.why_unusable(kernel, problem, H200)
                assert why is not None and why.partition("TMA ")[2].startswith(("copies", "needs"))
        elif problem.g == 1 and isinstance(kernel, DenseConvKernel):
            assert "multiples" not in (op.why_unusable(kernel, problem, H200) or "")
    copied = {"even", "grouped", "depthwise", "first", *(["odd k", "head"] * (direction == "fwd"))}
    assert bool(served) == (name not in copied and (name, direction[:3]) != ("tf32", "bwd"))


def test_padding_is_the_least_that_does_and_leaves_groups_alone() -> None:
    problem = layer("fwd", 377, 255)
    assert padded(problem, (8, 1)) == replace(problem, c=384)
    assert padded(problem, (8, 8)) == replace(problem, c=384, k=256)
    assert padded(replace(problem, c=384), (8, 1)) == replace(problem, c=384)
    for same in (layer("fwd", 64, 64), layer("fwd", 36, 72, g=2), layer("fwd", 0, 8)):
        assert padded(same, (8, 8)) is same


def test_only_what_is_copied_is_charged() -> None:
    problem = layer("bwd_weight", 256, 255, n=64, h=56, w=56)
    op, larger = get_op(problem.op), replace(problem, k=256)
    small, large = ([2 * prod(shape) for shape in op.shapes(p)] for p in (problem, larger))
    moved = small[1] + large[1] + small[2] + large[2]
    exact = 3 * COPY_US + 2 * moved / (H200.memory_gb_s * 1e3)
    assert copy_us(problem, larger, H200) == pytest.approx(exact)
    assert copy_us(problem, replace(problem, c=264, k=256), H200) > exact + 2 * COPY_US
    assert copy_us(problem, problem, H200) == 0
    grouped = layer("bwd_weight", 36, 72, g=2)
    assert copy_us(grouped, aligned(op, kernel_of("im2col", "bwd_weight"), grouped), H200) == 0


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16", "int8"])
def test_products_are_charged_for_every_tensor(kind: str) -> None:
    for batch in (1, 3):
        small = GemmProblem(m=64, n=96, k=33, batch=batch, dtype=kind)
        for larger in (replace(small, k=40), replace(small, m=72, n=104, k=40)):
            moved = small.bytes + larger.bytes
            assert copy_us(small, larger, H200) == 5 * COPY_US + 2 * moved / (
                H200.memory_gb_s * 1e3
            )
    assert dtype("tf32").bytes == 4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_copies_count_in_the_choice(direction: str) -> None:
    problem, even = layer(direction, 13, 21), layer(direction, 16, 24)
    gather, copying = kernel_of("gather", direction), kernel_of("im2col", direction)
    ours = registry_of(gather, copying)
    extra = copy_us(problem, aligned(ours.op, copying, problem), H200)
    for gain, taken in ((0.9 * extra, gather), (1.1 * extra, copying)):
        oracle = Oracle({"gather": 100.0, "im2col": 100.0 - gain}, by="family")
        choice = Dispatcher(ours, rankers=[oracle]).select(problem)
        assert choice.kernel == taken
        times = {ranked.kernel: ranked.predicted_us for ranked in choice.ranking}
        assert times == {gather: 100.0, copying: pytest.approx(100.0 - gain + extra)}
        assert Dispatcher(ours, rankers=[oracle]).select(even).kernel == copying


def test_plans_are_remembered_by_problem() -> None:
    ours = registry_of(kernel_of("im2col", "bwd_weight"))
    problems = [layer("bwd_weight", c, 16) for c in (13, 14, 16)]
    plans = [ours.dispatcher.plan(problem)[0] for problem in problems]
    assert [plan.problem for plan in plans] == problems
    assert [isinstance(plan, padding.PaddedPlan) for plan in plans] == [True, True, False]
    for problem, plan in zip(problems, plans, strict=True):
        *operands, _ = tensors_for(problem, "numpy")
        assert np.array_equal(ours.run(problem, *operands).out, expected(problem, operands))
        assert ours.dispatcher.plan(problem)[0] is plan
        assert ours.dispatcher.workspace_bytes(problem) == plan.workspace_bytes
    ours.declare(kernel_of("gather", "bwd_weight"), priority="high")
    assert ours.dispatcher.plan(problems[0])[0].kernel.family == "gather"


def test_tensors_of_even_channels_are_not_copied() -> None:
    problem = layer("bwd_weight", 16, 13)
    ours = registry_of(kernel_of("im2col", "bwd_weight"))
    x, dy, out = tensors_for(problem, "numpy")
    plan, _ = ours.dispatcher.plan(problem)
    plan.execute((x, dy), out)
    seen = plan._inner.given
    assert seen[0] is x
    assert seen[1] is not dy and seen[1].shape[1] == 16
    assert not seen[1][:, 13:].any()


def test_tensors_of_even_channels_that_begin_anywhere_are_served() -> None:
    torch = pytest.importorskip("torch")
    problem = layer("bwd_weight", 16, 13)
    x, dy, out = tensors_for(problem, "torch")
    shifted = torch.zeros(x.numel() + 1).half()[1:].view(x.permute(0, 2, 3, 1).shape)
    shifted = shifted.permute(0, 3, 1, 2).copy_(x)
    assert view(shifted).address % 16 == 2
    ours = registry_of(kernel_of("im2col", "bwd_weight"))
    for _ in range(2):
        result = ours.run(problem, shifted, dy, out=out)
        assert np.array_equal(out.numpy(), expected(problem, (x, dy)))
        assert "strides or addresses" in result.reason
        assert "strides or addresses" not in ours.run(problem, x, dy).reason


def test_an_epilogue_is_given_its_tensors_as_they_are() -> None:
    problem = layer("fwd", 13, 24)
    ours = registry_of(kernel_of("im2col", "fwd"))
    *operands, out = tensors_for(problem, "numpy")
    call = prepare(ours.op, problem, operands, out)
    vectors = (np.ones(24, np.float16), np.ones_like(out), np.zeros((2, 24), np.float32))
    after = Epilogue(bias=True, residual=True, sums=True)
    plan, _ = ours.dispatcher.execute(problem, call, epilogue=after, vectors=vectors)
    assert plan.epilogue == after
    one, two, *more, result = plan._inner.given
    assert one.shape[1] == two.shape[1] == 16
    assert result is out
    assert all(given is own for given, own in zip(more, vectors, strict=True))


def test_a_padded_kernel_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer("bwd_data", 13, 21)
    gather, copying = kernel_of("gather", "bwd_data"), kernel_of("im2col", "bwd_data")
    ours = Dispatcher(
        registry_of(gather, copying),
        rankers=[Oracle({"gather": 999.0, "im2col": 1.0}, by="family")],
    )
    execute = Computing.execute

    def failing(self: Computing, *given: Any) -> None:
        if self.kernel == copying:
            raise ExecutionError("sabotaged")
        execute(self, *given)

    monkeypatch.setattr(Computing, "execute", failing)
    *operands, _ = tensors_for(problem, "numpy")
    result = ours.run(problem, *operands)
    assert result.kernel == gather
    assert np.array_equal(result.out, expected(problem, operands))
