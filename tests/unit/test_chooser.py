"""Choosing: lazily, but as if all kernels had been asked; the vendor and built kernels win ties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import isinf
from typing import Any

import numpy as np
import pytest
from oracle import Oracle

from tilewise.core.arch import Arch, load_arch
from tilewise.core.dtypes import OPERAND_DTYPES
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR_TIE
from tilewise.core.problem import Problem
from tilewise.dispatch import Dispatcher, Priority, Registry
from tilewise.dispatch.chooser import served_by
from tilewise.dispatch.padding import COPY_US, aligned, copy_us
from tilewise.engines import Build
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import all_ops, get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.launch import why_unfused
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.choice import Ranked, Ranking
from tilewise.settings import settings

X86 = load_arch("x86_avx512")
H200 = load_arch("sm_90", "H200")


def registry_of(op: str, arch: Arch, count: int, seed: int = 0) -> Registry:
    registry = Registry(op, arch)
    pool = load_pool(registry.op, arch)
    registry.declare(random.Random(seed).sample(pool, min(count, len(pool))))
    registry.declare(VendorKernel(op_name=op, library="torch"))
    return registry


def random_times(registry: Registry, seed: int = 0) -> dict[str, float]:
    draw = random.Random(seed)
    return {kernel.name: draw.uniform(1, 1000) for kernel in registry}


PROBLEMS = [
    GemmProblem(m=64, n=96, k=33),
    GemmProblem(m=1, n=512, k=512, layout="rrr"),
    GemmProblem(m=129, n=65, k=7, dtype="bf16"),
    GemmProblem(m=0, n=8, k=8),
]


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=str)
def test_a_lazy_ranking_is_the_eager_one(problem: GemmProblem) -> None:
    registry = registry_of("gemm", X86, 60)
    us = random_times(registry)
    choice = Dispatcher(registry, rankers=[Oracle(us)]).select(problem)
    expected = []
    for kernel in registry:
        larger = aligned(registry.op, kernel, problem)
        if registry.op.why_unusable(kernel, larger, X86) is None:
            expected.append((us[kernel.name] + copy_us(problem, larger, X86), kernel.name))
    assert [(r.predicted_us, r.kernel.name) for r in choice.ranking] == sorted(expected)
    assert choice.kernel is choice.ranking[0].kernel
    served = {r.kernel.name for r in choice.ranking}
    assert set(choice.rejected) == {k.name for k in registry} - served


def test_few_kernels_are_asked_whether_they_can_serve() -> None:
    registry = registry_of("gemm", X86, 100)
    asked: list[Kernel] = []
    why_unusable = registry.op.why_unusable

    def counting(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
        asked.append(kernel)
        return why_unusable(kernel, problem, arch)

    legal = [k for k in registry if why_unusable(k, PROBLEMS[0], X86) is None]
    legal = [k for k in legal if not k.alignment(PROBLEMS[0])]
    us = {**random_times(registry), **{k.name: 0.1 + at for at, k in enumerate(legal[:6])}}
    refused = next(
        k
        for k in registry
        if getattr(k, "dtype", "") == "fp32"
        and not k.alignment(PROBLEMS[0])
        and why_unusable(k, PROBLEMS[0], X86)
    )
    us[refused.name] = 0.5
    registry.op = replace(registry.op, why_unusable=counting)
    choice = Dispatcher(registry, rankers=[Oracle(us)]).select(PROBLEMS[0])
    assert choice.kernel == legal[0]
    assert choice.ranking[1].kernel == legal[1]
    assert len(asked) == 3  # the best, the next, which is no tie, and one that cannot serve
    assert len(choice.ranking) + len(choice.rejected) == len(registry)
    assert len(asked) == len(registry)


@pytest.mark.parametrize("arch", ["x86_avx512", "sm_90", "gfx950"])
@pytest.mark.parametrize("op", sorted(all_ops()))
def test_no_kernel_serves_another_dtype_than_its_own(op: str, arch: str) -> None:
    """What the chooser relies on when it leaves kernels of other dtypes to the end."""
    live = load_arch(arch)
    found = get_op(op)
    pool = load_pool(found, live)
    sample = random.Random(1).sample(pool, min(200, len(pool)))
    for dtype in OPERAND_DTYPES:
        problem: Problem
        if op == "gemm":
            problem = GemmProblem(m=256, n=256, k=256, dtype=dtype)
        else:
            problem = ConvProblem(
                direction=op.removeprefix("conv_"), n=8, c=64, k=64, h=16, w=16, x=1, dtype=dtype
            )
        for kernel in sample:
            if getattr(kernel, "dtype", dtype) not in served_by(dtype):
                assert found.why_unusable(kernel, problem, live) is not None, kernel.name


def test_a_built_kernel_wins_a_tie_and_nothing_more() -> None:
    registry = registry_of("gemm", X86, 40)
    problem = PROBLEMS[0]
    op = registry.op
    legal = [
        kernel
        for kernel in registry
        if op.why_unusable(kernel, problem, X86) is None and not kernel.alignment(problem)
    ]
    best, level, behind = legal[:3]
    us = dict.fromkeys((kernel.name for kernel in registry), 500.0)
    us |= {best.name: 100.0, level.name: 101.0, behind.name: 103.0}
    assert Dispatcher(registry, rankers=[Oracle(us)]).select(problem).kernel == best
    registry.note_build(Build(kernel=behind, status="ok"))
    assert Dispatcher(registry, rankers=[Oracle(us)]).select(problem).kernel == best
    registry.note_build(Build(kernel=level, status="ok"))
    choice = Dispatcher(registry, rankers=[Oracle(us)]).select(problem)
    assert choice.kernel == level
    assert choice.ranking[0].kernel == level
    assert choice.ranking[1].kernel == best
    assert "already built" in choice.reason
    registry.note_build(Build(kernel=best, status="ok"))
    assert Dispatcher(registry, rankers=[Oracle(us)]).select(problem).kernel == best


def test_the_vendor_wins_a_tie_and_nothing_more() -> None:
    registry = registry_of("gemm", X86, 40)
    vendor = VendorKernel(op_name="gemm", library="torch")
    best = next(
        k
        for k in registry
        if registry.op.why_unusable(k, PROBLEMS[0], X86) is None
        and not k.alignment(PROBLEMS[0])
        and k != vendor
    )
    us = dict.fromkeys((kernel.name for kernel in registry), 500.0) | {best.name: 100.0}
    registry.note_build(Build(kernel=best, status="ok"))
    last_us = 100.0 * (1 + VENDOR_TIE)
    for vendor_us, chosen in ((last_us - 0.1, vendor), (last_us + 0.1, best), (100.0, vendor)):
        oracle = Oracle(us | {vendor.name: vendor_us})
        choice = Dispatcher(registry, rankers=[oracle]).select(PROBLEMS[0])
        assert choice.kernel == chosen
        assert ("the vendor's" in choice.reason) == (chosen == vendor)


def test_choices_are_remembered_until_the_registry_changes() -> None:
    registry = registry_of("gemm", X86, 20)
    dispatcher = Dispatcher(registry, rankers=[Oracle(random_times(registry))])
    first = dispatcher.select(PROBLEMS[0])
    assert dispatcher.select(GemmProblem.from_dict(PROBLEMS[0].to_dict())) is first
    assert dispatcher.select(PROBLEMS[0], deterministic=True) is not first
    registry.declare(registry.kernels[0], priority="high")
    changed = dispatcher.select(PROBLEMS[0])
    assert changed is not first
    assert dispatcher.select(PROBLEMS[0]) is changed


def test_a_choice_that_grew_stale_while_it_was_made_is_not_kept() -> None:
    registry = registry_of("gemm", X86, 20)
    us = random_times(registry)
    late = next(k for k in registry if registry.op.why_unusable(k, PROBLEMS[0], X86) is None)

    class Interrupted(Oracle):
        def knows_vendor(self, kernel: Kernel) -> bool:
            return True

        def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Any:
            times = super().predict_us(problem, kernels, arch)
            if registry.priority_of(late) == Priority.NORMAL:  # as another thread would
                registry.declare(late, priority="high")
                assert dispatcher.select(PROBLEMS[0]).kernel == late
            return times

    us[late.name] = 5000.0
    dispatcher = Dispatcher(registry, rankers=[Interrupted(us)])
    dispatcher.select(PROBLEMS[0])
    assert dispatcher.select(PROBLEMS[0]).kernel == late


def test_padding_costs_its_launches() -> None:
    small, larger = GemmProblem(m=8, n=8, k=9), GemmProblem(m=8, n=8, k=16)
    assert copy_us(small, small, H200) == 0
    assert copy_us(small, larger, H200) > 5 * COPY_US
    long = copy_us(replace(small, m=1 << 20), replace(larger, m=1 << 20), H200)
    assert long > 10 * COPY_US


def test_the_head_of_a_ranking_and_empty_problems() -> None:
    registry = registry_of("gemm", X86, 30)
    dispatcher = Dispatcher(registry, rankers=[Oracle(random_times(registry))])
    whole = dispatcher.select(PROBLEMS[0])
    head = dispatcher.select(PROBLEMS[0], top_k=2)
    assert list(head.ranking) == list(whole.ranking)[:2]
    assert dict(head.rejected) == dict(whole.rejected)
    nothing = dispatcher.select(PROBLEMS[3])
    assert (nothing.path, len(nothing.ranking)) == ("empty", 0)


def test_a_ranking_is_a_sequence() -> None:
    kernels = registry_of("gemm", X86, 5).kernels
    small, large = kernels[2:4]
    items: list[Ranked | tuple[Kernel, str]] = [
        Ranked(kernels[0], 1.0, 1.0),
        (small, "too small"),
        Ranked(kernels[1], 2.0, 1.0),
        (large, "too large"),
    ]
    ranking = Ranking(iter(items))
    assert ranking
    assert ranking[0] == items[0]
    assert list(ranking[:2]) == [items[0], items[2]]
    assert (ranking[-1], len(ranking)) == (items[2], 2)
    assert dict(ranking.rejected) == {small.name: "too small", large.name: "too large"}
    assert ranking.rejected[large.name] == "too large"
    with pytest.raises(IndexError):
        ranking[2]
    empty = Ranking(iter([]))
    assert not empty
    assert list(empty) == []


def test_a_pass_that_is_saved_counts_against_the_vendor() -> None:
    problem = GemmProblem(m=4096, n=4096, k=4096, dtype="bf16")
    own = load_pool(get_op("gemm"), H200, ["triton"])
    rule = get_op("gemm").why_unusable
    kernels = [k for k in own if rule(k, problem, H200) is None][:3]
    vendor = VendorKernel(op_name="gemm", library="torch")
    registry = Registry("gemm", H200)
    registry.declare([*kernels, vendor])
    us = {vendor.name: 100.0, **{k.name: 130.0 + at for at, k in enumerate(kernels)}}
    dispatcher = Dispatcher(registry, rankers=[Oracle(us)])  # type: ignore[list-item]
    for saved_us, is_ours in ((0, False), (20, False), (40, True)):
        saved_bytes = int(saved_us * H200.memory_gb_s * 1e3)
        choice = dispatcher.select_fusing(problem, saved_bytes=saved_bytes)
        assert (choice.kernel == kernels[0]) == is_ours
        assert ("another pass" in choice.reason) == is_ours


def test_only_kernels_that_give_sums_are_taken_for_their_sums() -> None:
    problem = ConvProblem(
        direction="fwd", n=8, c=128, k=128, g=32, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1,
        dtype="bf16", layout="nhwc",
    )  # fmt: skip
    own = load_pool(get_op("conv_fwd"), H200, ["cuda", "triton"])
    rule, sums = get_op("conv_fwd").why_unusable, Epilogue(sums=True)
    legal = [k for k in own if rule(k, problem, H200) is None]
    giving = next(k for k in legal if why_unfused(k, problem, sums) is None)
    other = next(k for k in legal if why_unfused(k, problem, sums) is not None)
    vendor = VendorKernel(op_name="conv_fwd", library="torch")
    registry = Registry("conv_fwd", H200)
    registry.declare([other, giving, vendor])
    saved_bytes = int(40 * H200.memory_gb_s * 1e3)
    for vendor_us in (100.0, 200.0):
        us = {vendor.name: vendor_us, other.name: 110.0, giving.name: 120.0}
        dispatcher = Dispatcher(registry, rankers=[Oracle(us)])  # type: ignore[list-item]
        for epilogue, expected in ((sums, giving), (Epilogue(bias=True), other)):
            choice = dispatcher.select_fusing(problem, saved_bytes=saved_bytes, epilogue=epilogue)
            assert choice.kernel == expected
        cheap = dispatcher.select_fusing(problem, saved_bytes=1, epilogue=sums)
        assert cheap.kernel == (vendor if vendor_us < 110 else other)


def test_strictness_leaves_out_what_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem(
        direction="fwd", n=8, c=96, k=96, g=96, h=28, w=28, y=3, x=3, pad_h=1, pad_w=1,
        dtype="bf16", layout="nhwc",
    )  # fmt: skip
    registry = Registry("conv_fwd", H200)
    registry.declare(load_pool(registry.op, H200, ["cuda"]))
    spreading = {k.name for k in registry if getattr(k, "spreads_nonfinite", False)}
    usual = Dispatcher(registry)._chooser.rejected(problem)
    assert spreading - set(usual), "some of them serve by default"
    monkeypatch.setenv("TILEWISE_STRICT", "1")
    settings.cache_clear()
    try:
        strict = Dispatcher(registry)._chooser.rejected(problem)
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert spreading <= set(strict)
    assert {name for name in strict if "TILEWISE_STRICT" in strict[name]} == spreading - set(usual)
    assert {k.name for k in registry} - set(strict), "others serve"


class Distant(Oracle):
    """A model that knows families, and a problem only from far away."""

    def __init__(self, strange: Any) -> None:
        super().__init__({})
        self._strange = strange

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        return "it is far from what was measured"

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> Any:
        return np.array([self._strange(kernel) for kernel in kernels])


def test_estimates_leave_families_behind_that_no_model_saw_measured() -> None:
    """The gradient of an image: an estimate alone would take the family made for it."""
    problem = ConvProblem(
        direction="bwd_data", n=32, c=3, k=64, h=224, w=224, y=7, x=7, stride_h=2, stride_w=2,
        pad_h=3, pad_w=3, dtype="bf16",
    )  # fmt: skip
    registry = Registry("conv_bwd_data", H200)
    registry.declare(load_pool(registry.op, H200, ["cuda", "triton"]))

    def first(*rankers: Any) -> str:
        return Dispatcher(registry, rankers=rankers).select(problem).kernel.family  # type: ignore[attr-defined, no-any-return]

    def is_image(kernel: Any) -> bool:
        return bool(kernel.family == "image")

    assert first() == "image"
    assert first(Distant(is_image)) not in ("image", "")
    assert first(Distant(is_image), Distant(lambda _: False)) == "image"  # one of two saw it
    ranking = Dispatcher(registry, rankers=[Distant(is_image)]).select(problem).ranking
    left = [isinf(ranked.predicted_us) for ranked in ranking]
    assert left == sorted(left)
    assert any(left)
