"""Samplers, edges, coverage and augmentation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise.core.arch import Arch, load_arch
from tilewise.errors import InputError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.draws import is_prime
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.augment import augment
from tilewise.problems.coverage import coverage
from tilewise.problems.draw import Bounds
from tilewise.problems.edges import edge_problems
from tilewise.problems.sampling import families, sample, wide_coverage

OPS = ("gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight")


@pytest.fixture(params=["sm_90", "x86_avx2"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return load_arch(request.param)


@pytest.mark.parametrize("op", OPS)
def test_seeded_distinct_and_within_limits(op: str, arch: Arch) -> None:
    limits = Bounds.of(arch, "fp32")
    for draw in (sample, wide_coverage):
        found = draw(op, arch, 300, dtype="fp32", seed=7)
        assert len(found) == len(set(found.problems)) == 300
        assert {p.op for p in found.problems} == {op}
        assert all(p.bytes <= limits.max_bytes <= arch.memory_bytes for p in found.problems)
        assert all(0 < p.flops <= limits.max_flops for p in found.problems)
        again = draw(op, arch, 100, dtype="fp32", seed=7)
        assert again.problems == found.problems[:100]
        other = draw(op, arch, 100, dtype="fp32", seed=8)
        assert len(set(other.problems) & set(again.problems)) < 50


def test_small_memory_is_respected() -> None:
    tiny = load_arch("sm_90").with_figures(memory_bytes=2**20)
    for op in ("gemm", "conv_fwd"):
        found = sample(op, tiny, 50, dtype="bf16")
        assert max(p.bytes for p in found.problems) <= 2**18
    with pytest.raises(InputError, match=r"only \d+ different problems fit"):
        sample("gemm", tiny.with_figures(memory_bytes=2**11), 5000, dtype="bf16")


def test_alignment_and_spread() -> None:
    arch = load_arch("sm_90")
    gemms = [p for p in sample("gemm", arch, 2000, align=16).problems if isinstance(p, GemmProblem)]
    assert all(p.n % 16 == 0 and p.k % 16 == 0 for p in gemms)
    assert any(p.m % 16 for p in gemms)
    octaves = [sum(2**e <= p.m < 2 ** (e + 1) for p in gemms) for e in range(14)]
    assert min(octaves) > len(gemms) / 14 / 3  # log-uniform: no octave is starved
    convs = [p for p in sample("conv_fwd", arch, 500, align=8).problems
             if isinstance(p, ConvProblem)]  # fmt: skip
    assert all(((p.c // p.g) % 8 == 0 and (p.k // p.g) % 8 == 0) or p.is_depthwise for p in convs)
    with pytest.raises(InputError, match="align is 0"):
        sample("gemm", arch, 1, align=0)
    for op, most in (("gemm", 28672), ("conv_fwd", 2048)):
        with pytest.raises(InputError, match=f"from 1 to {most}"):
            sample(op, arch, 1, align=most + 1)
    for draw in (sample, wide_coverage):
        with pytest.raises(InputError, match="'fp99'"):
            draw("conv_fwd", arch, 1, dtype="fp99")
    with pytest.raises(InputError, match="count is 0"):
        sample("gemm", arch, 0)


def test_known_problems_are_avoided() -> None:
    arch = load_arch("sm_90")
    first = sample("gemm", arch, 50)
    second = sample("gemm", arch, 50, avoid=first.problems)
    assert not set(first.problems) & set(second.problems)


def test_families() -> None:
    arch = load_arch("sm_90")
    found = wide_coverage("gemm", arch, 20, only=["prime"], dtype="bf16")
    assert all(is_prime(p.gemm.m) and is_prime(p.gemm.k) for p in found.problems)
    assert {labels["family"] for labels in found.labels} == {"prime"}
    everything = wide_coverage("conv_fwd", arch, 200)
    assert {labels["family"] for labels in everything.labels} == set(families("conv_fwd"))
    with pytest.raises(InputError, match="gemm has no family depthwise; it has square"):
        wide_coverage("gemm", arch, 5, only=["depthwise"])


def test_edges_of_gemm() -> None:
    problems = edge_problems("gemm", load_arch("sm_90"), dtype="bf16").problems
    assert len(problems) == len(set(problems)) > 546
    for m, n, k in ((1, 512, 4096), (512, 1, 4096), (512, 4096, 1), (1, 1, 1), (127, 127, 127)):
        assert GemmProblem(m=m, n=n, k=k, dtype="bf16") in problems


@pytest.mark.parametrize("op", OPS[1:])
def test_edges_of_conv(op: str) -> None:
    found = [p for p in edge_problems(op).problems if isinstance(p, ConvProblem)]
    assert len(found) == len(set(found)) > 500
    assert {p.ndim for p in found} == {1, 2, 3}
    for name, holds in {
        "one pixel out": lambda p: p.out_h == p.out_w == 1 and p.h > 1,
        "stride beyond the filter": lambda p: p.stride_h > p.y,
        "even filter": lambda p: p.y == 2 and p.x == 4,
        "uneven image": lambda p: p.h != p.w and p.ndim == 2,
        "one channel": lambda p: p.c == 1,
        "one filter": lambda p: p.k == 1,
        "depthwise with multiplier": lambda p: p.is_depthwise and p.k == 7 * p.c,
        "odd groups": lambda p: p.g == 7 and not p.is_depthwise,
        "padding beyond the filter": lambda p: p.pad_h >= p.y,
        "filter as wide as the image": lambda p: (p.y - 1) * p.dilation_h + 1 == p.h > 1,
    }.items():
        assert any(holds(p) for p in found), name


def test_coverage_names_the_holes() -> None:
    square = [GemmProblem(m=s, n=s, k=s, dtype="bf16") for s in (64, 512, 8192)]
    report = coverage([*square, square[0]])
    assert (report.problems, report.distinct) == (4, 3)
    assert report.axes["M"] == {"1": 0, "2-31": 0, "32-255": 2, "256-4095": 1, ">=4096": 1}
    assert {"M=1", "N=1", "K=1", "batch>=2", "N alignment=odd"} <= set(report.holes)
    assert "M=32-255 & N>=4096" in report.pair_holes
    assert not any("M=1 &" in hole for hole in report.pair_holes)  # named once, as a whole
    filled = coverage([*square, GemmProblem(m=1, n=4096, k=4096, dtype="bf16")])
    assert "M=1" not in filled.holes
    assert filled.pair_share > report.pair_share


def test_coverage_asks_for_nothing_impossible() -> None:
    arch = load_arch("sm_90")
    for op in ("gemm", "conv_fwd"):
        problems = wide_coverage(op, arch, 3000, dtype="bf16").problems
        problems += edge_problems(op, arch, dtype="bf16").problems
        report = coverage(problems)
        assert report.holes == []
        assert report.pair_share > 0.9
        assert report.filled + len(report.pair_holes) == report.pairs


def test_coverage_refuses_mixtures() -> None:
    conv = ConvProblem(n=1, c=8, k=8, h=8, w=8, x=1)
    with pytest.raises(InputError, match="one op at a time"):
        coverage([GemmProblem(m=1, n=1, k=1), conv])
    with pytest.raises(InputError, match="no problem"):
        coverage([])


def test_augmentation_stays_near_the_worst() -> None:
    good = GemmProblem(m=4096, n=4096, k=4096, dtype="bf16")
    bad = GemmProblem(m=1, n=1536, k=7168, dtype="bf16")
    found = augment([(good, 0.99), (bad, 0.4)], 60, seed=3)
    assert found.problems == augment([(good, 0.99), (bad, 0.4)], 60, seed=3).problems
    assert len(set(found.problems)) == 60
    assert not {good, bad} & set(found.problems)
    near_bad = [p for p, labels in found if labels["near"] == bad.key[:12]]
    assert len(near_bad) > 50
    for problem in near_bad:
        assert problem.gemm.m == 1  # a vector stays a vector
        assert 1536 / 2 <= problem.gemm.n <= 1536 * 2
        assert problem.gemm.k % 8 == 0


def test_augmentation_keeps_the_kind_of_layer() -> None:
    depthwise = ConvProblem(
        n=8, c=96, k=96, g=96, h=56, w=56, y=3, x=3, stride_h=2, stride_w=2, pad_h=1, pad_w=1
    )
    grouped = replace(depthwise, g=32, c=128, k=256)
    found = augment([(depthwise, 0.5), (grouped, 0.5)], 100)
    kinds = {
        (p.is_depthwise, p.stride_h, p.y) for p in found.problems if isinstance(p, ConvProblem)
    }
    assert kinds == {(True, 2, 3), (False, 2, 3)}


def test_augmentation_refuses_nonsense() -> None:
    problem = GemmProblem(m=8, n=8, k=8)
    with pytest.raises(InputError, match="nothing to improve"):
        augment([(problem, 1.0)], 5)
    with pytest.raises(InputError, match=r"efficiency is 1\.5"):
        augment([(problem, 1.5)], 5)
    with pytest.raises(InputError, match=r"only \d+ new problems"):
        augment([(GemmProblem(m=1, n=1, k=2), 0.5)], 50)
