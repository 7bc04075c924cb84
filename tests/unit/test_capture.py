"""Capture: what a PyTorch program computes becomes problems with counts."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from tilewise.core.problem import Problem
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.capture import Captured, capture

torch = pytest.importorskip("torch")


def counts(captured: Captured) -> Counter[Problem]:
    return Counter({problem: labels["count"] for problem, labels in captured})


def test_a_network_forward_and_backward() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.Conv2d(8, 8, 3, groups=4, padding=2, dilation=2),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 8 * 8, 10),
    ).to("meta", torch.bfloat16)
    x = torch.empty(4, 3, 16, 16, device="meta", dtype=torch.bfloat16)
    with capture() as problems:
        net(x).sum().backward()
        net(x)
    stem = {"n": 4, "c": 3, "k": 8, "h": 16, "w": 16, "y": 3, "x": 3, "stride_h": 2, "stride_w": 2,
            "pad_h": 1, "pad_w": 1, "dtype": "bf16", "layout": "nchw"}  # fmt: skip
    second = {"n": 4, "c": 8, "k": 8, "g": 4, "h": 8, "w": 8, "y": 3, "x": 3, "pad_h": 2,
              "pad_w": 2, "dilation_h": 2, "dilation_w": 2, "dtype": "bf16",
              "layout": "nchw"}  # fmt: skip
    seen = counts(problems)
    assert seen[ConvProblem(**stem)] == 2
    assert seen[ConvProblem(direction="bwd_weight", **stem)] == 1
    assert seen[ConvProblem(direction="bwd_data", **stem)] == 0  # the image needs no gradient
    assert seen[ConvProblem(**second)] == 2
    assert seen[ConvProblem(direction="bwd_data", **second)] == 1
    assert seen[ConvProblem(direction="bwd_weight", **second)] == 1
    assert seen[GemmProblem(m=4, n=10, k=512, dtype="bf16")] == 2
    assert sum(seen.values()) == 2 * 3 + 2 * 3 - 1
    layers = {labels["layer"] for _, labels in problems}
    assert layers >= {"Sequential.0", "Sequential.1", "Sequential.3"}


def test_dimensions_and_layouts() -> None:
    last = torch.channels_last_3d
    with capture() as problems:
        torch.nn.Conv1d(4, 8, 5, device="meta")(torch.empty(2, 4, 30, device="meta"))
        volume = torch.empty(1, 4, 9, 9, 9, device="meta").to(memory_format=last)
        torch.nn.Conv3d(4, 8, 3, device="meta")(volume)
    assert problems.problems == [
        ConvProblem(n=2, c=4, k=8, w=30, x=5, layout="nchw"),
        ConvProblem(n=1, c=4, k=8, d=9, h=9, w=9, z=3, y=3, x=3, layout="nhwc"),
    ]


def test_a_transposed_convolution_is_a_gradient() -> None:
    up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2, bias=False, device="meta")
    with capture() as problems:
        up(torch.empty(2, 8, 5, 5, device="meta", requires_grad=True)).sum().backward()
    shape = {"n": 2, "c": 4, "k": 8, "h": 10, "w": 10, "y": 2, "x": 2, "stride_h": 2, "stride_w": 2,
             "layout": "nchw"}  # fmt: skip
    assert counts(problems) == Counter(
        ConvProblem(direction=direction, **shape) for direction in ("bwd_data", "fwd", "bwd_weight")
    )


def test_products() -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    with capture() as problems:
        empty(3, 4) @ empty(4, 5)
        empty(4, 3).t() @ empty(4, 5)
        empty(3, 4) @ empty(5, 4).t()
        empty(4, 3).t() @ empty(5, 4).t()
        empty(3, 4) @ empty(4)
        torch.einsum("bij,bjk->bik", empty(7, 3, 4), empty(7, 4, 5))
        torch.baddbmm(empty(7, 3, 5), empty(7, 3, 4), empty(7, 4, 5))
        with torch.inference_mode():
            torch.nn.functional.linear(empty(2, 3, 4), empty(5, 4))
        empty(0, 4) @ empty(4, 5)
    assert counts(problems) == Counter(
        {
            GemmProblem(m=3, n=5, k=4, layout="rrr"): 1,
            GemmProblem(m=3, n=5, k=4, layout="crr"): 1,
            GemmProblem(m=3, n=5, k=4, layout="rcr"): 1,
            GemmProblem(m=3, n=5, k=4, layout="ccr"): 1,
            GemmProblem(m=3, n=1, k=4, layout="rrr"): 1,
            GemmProblem(m=3, n=5, k=4, batch=7, layout="rrr"): 2,
            GemmProblem(m=6, n=5, k=4, layout="rcr"): 1,
        }
    )


def test_what_cannot_be_a_problem_is_counted() -> None:
    with capture() as problems:
        torch.ones(3, 4, dtype=torch.float64) @ torch.ones(4, 5, dtype=torch.float64)
    assert not problems.problems
    assert problems.skipped == {"mm: dtype float64 is not supported": 1}


def test_nothing_is_recorded_outside_and_values_are_untouched() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    wanted = a @ b
    with capture() as problems:
        inside = a @ b
    assert torch.equal(inside, wanted)
    a @ b
    assert [labels["count"] for labels in problems.labels] == [1]


def test_operators_of_tilewise_are_seen_as_pytorchs_would_be() -> None:
    """Patched or not, a network is the same set of problems."""
    import tilewise as tw

    net = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, stride=2, padding=1),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 4 * 4, 10),
    )
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    seen = []
    for change in (tw.unpatch, partial(tw.patch, always=True)):
        with capture() as problems:
            change(net)(x).sum().backward()
        seen.append(counts(problems))
    assert seen[0] == seen[1]
    assert {labels["call"].partition("::")[0] for _, labels in problems} == {"tilewise"}
    assert {labels.get("layer") for _, labels in problems} >= {"Sequential.0", "Sequential.2"}


def test_products_of_tilewise_into_given_memory_are_seen() -> None:
    import tilewise as tw

    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.zeros(3, 5)
    with capture() as problems:
        tw.matmul(a, b, out=out)
    assert counts(problems) == {GemmProblem(m=3, n=5, k=4, layout="rrr"): 1}
    torch.testing.assert_close(out, a @ b)
