"""Problems: refused when impossible, sized as PyTorch sizes them, counted as brute force counts."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewise.errors import ProblemError
from tilewise.ops.conv.problem import DIRECTIONS, ConvProblem, shapes
from tilewise.ops.gemm.problem import GemmProblem

small = st.integers(1, 5)


@st.composite
def conv_problems(draw: st.DrawFn) -> ConvProblem:
    g = draw(st.integers(1, 3))
    values = {"n": draw(small), "g": g, "c": g * draw(small), "k": g * draw(small)}
    rank = draw(st.integers(1, 3))
    for dim, tap in list(zip("dhw", "zyx", strict=True))[3 - rank :]:
        values[dim] = draw(st.integers(1, 9))
        values[tap] = draw(st.integers(1, 4))
        values[f"stride_{dim}"] = draw(st.integers(1, 3))
        values[f"pad_{dim}"] = draw(st.integers(0, 3))
        values[f"dilation_{dim}"] = draw(st.integers(1, 3))
        reach = (values[tap] - 1) * values[f"dilation_{dim}"] + 1
        assume(values[dim] + 2 * values[f"pad_{dim}"] >= reach)
    return ConvProblem(direction=draw(st.sampled_from(DIRECTIONS)), **values)


@given(conv_problems())
def test_conv_shapes_are_pytorchs(problem: ConvProblem) -> None:
    forward = replace(problem, direction="fwd")
    x, w, y = shapes(forward)
    rank = len(x) - 2
    layer = {
        name: [getattr(problem, f"{field}_{d}") for d in "dhw"[3 - rank :]]
        for name, field in (("stride", "stride"), ("padding", "pad"), ("dilation", "dilation"))
    }
    convolve = getattr(torch.nn.functional, f"conv{rank}d")
    out = convolve(torch.zeros(x), torch.zeros(w), groups=problem.g, **layer)
    assert tuple(out.shape) == y


def reaching_taps(problem: ConvProblem) -> int:
    """The most filter taps that reach any one input position, borders aside, by trying them all."""
    total = 1
    for dim, taps in (("d", problem.z), ("h", problem.y), ("w", problem.x)):
        stride, dilation = getattr(problem, f"stride_{dim}"), getattr(problem, f"dilation_{dim}")
        total *= max(
            sum((position - tap * dilation) % stride == 0 for tap in range(taps))
            for position in range(stride * dilation)
        )
    return total


@given(conv_problems())
def test_conv_work_is_what_brute_force_counts(problem: ConvProblem) -> None:
    c, k = problem.c // problem.g, problem.k // problem.g
    out = (problem.n, problem.out_d, problem.out_h, problem.out_w)
    products = sum(1 for _ in itertools.product(*map(range, (*out, problem.taps))))
    assert problem.flops == 2 * products * problem.g * c * k
    view = problem.gemm
    *_, result = shapes(problem)
    elements = 1
    for size in result:
        elements *= size
    assert view.groups * view.m * view.n == elements, "the product's result is the op's result"
    if problem.direction == "bwd_data":
        assert view.k == k * reaching_taps(problem)
    else:
        assert 2 * view.groups * view.m * view.n * view.k == problem.flops


@given(conv_problems())
def test_conv_round_trips(problem: ConvProblem) -> None:
    again = ConvProblem.from_dict(problem.to_dict())
    assert again == problem
    assert again.key == problem.key
    assert replace(problem, n=problem.n + 1).key != problem.key


def test_bytes_count_every_tensor_once() -> None:
    problem = ConvProblem(n=2, c=6, k=4, g=2, h=5, w=7, y=3, x=1, dtype="bf16")
    x, w, y = 2 * 6 * 5 * 7, 4 * 3 * 3 * 1, 2 * 4 * 3 * 7
    assert problem.bytes == 2 * (x + w + y)
    assert GemmProblem(m=3, n=5, k=7, dtype="fp8").bytes == 3 * 7 + 7 * 5 + 2 * 3 * 5
    assert GemmProblem(m=3, n=5, k=7, dtype="int8").bytes == 3 * 7 + 7 * 5 + 4 * 3 * 5


def test_sizes_beyond_32_bits() -> None:
    problem = GemmProblem(m=2**20, n=2**20, k=2**20)
    assert problem.flops == 2**61
    assert problem.bytes == 3 * 2**42


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"c": 6, "g": 4, "k": 8}, "C is 6, which 4 groups"),
        ({"c": 8, "g": 4, "k": 6}, "K is 6, which 4 groups"),
        ({"y": 5, "h": 3}, "the filter spans 5 along h"),
        ({"h": 0}, "Hi is 0; it must be at least 1"),
        ({"stride_w": 0}, "stride_w is 0"),
        ({"pad_h": -1}, "pad_h is -1"),
        ({"dilation_d": 0}, "dilation_d is 0"),
        ({"n": 2.0}, "N is 2.0; it must be an integer"),
        ({"n": True}, "it must be an integer"),
        ({"n": 2**63}, "below 2^63"),
        ({"dtype": "fp12"}, "dtype is 'fp12'; use one of"),
        ({"layout": "chwn"}, "layout is 'chwn'"),
        ({"direction": "sideways"}, "direction is 'sideways'"),
        ({"out_dtype": "int32"}, "out_dtype is 'int32'"),
    ],
)
def test_impossible_convolutions_say_which_rule_broke(values: dict, says: str) -> None:
    sound = {"n": 1, "c": 8, "k": 8, "h": 8, "w": 8, "y": 3, "x": 3}
    with pytest.raises(ProblemError, match=re.escape(says)):
        ConvProblem(**{**sound, **values})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"m": -1}, "M is -1"),
        ({"layout": "rcc"}, "layout is 'rcc'; use one of rcr"),
        ({"split_k": 9}, "split_k is 9; it cannot exceed K"),
        ({"split_k": 0}, "split_k is 0"),
    ],
)
def test_impossible_gemms_say_which_rule_broke(values: dict, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        GemmProblem(**{"m": 4, "n": 4, "k": 8, **values})


def test_unknown_keys_are_named() -> None:
    with pytest.raises(ProblemError, match=r"unknown keys \['Q'\]; a GemmProblem takes M, N, K"):
        GemmProblem.from_dict({"M": 1, "N": 1, "K": 1, "Q": 3})


def test_dimensions_are_the_fewest_that_say_the_same() -> None:
    assert ConvProblem(n=1, c=1, k=1, w=5, x=3).ndim == 1
    assert ConvProblem(n=1, c=1, k=1, h=5, w=5, y=3, x=3).ndim == 2
    assert ConvProblem(n=1, c=1, k=1, d=2, h=5, w=5, y=3, x=3).ndim == 3


@given(conv_problems(), conv_problems())
def test_problems_are_equal_by_their_fields(one: ConvProblem, other: ConvProblem) -> None:
    values = [tuple(getattr(p, f.name) for f in fields(p)) for p in (one, other)]
    assert (one == other) == (values[0] == values[1])
    assert one == ConvProblem.from_dict(one.to_dict())
    assert hash(one) == hash(ConvProblem.from_dict(one.to_dict()))
    assert {one: "held"}[replace(one)] == "held"
    for f in fields(one):
        if isinstance(getattr(one, f.name), int) and f.name.startswith("pad"):
            assert replace(one, **{f.name: getattr(one, f.name) + 1}) != one


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_of_problems_are_equal(copied: object) -> None:
    for problem in (GemmProblem(m=3, n=4, k=5), ConvProblem(n=1, c=2, k=3, w=4, x=1)):
        again = copied(problem)  # type: ignore[operator]
        assert again == problem
        assert hash(again) == hash(problem)
        # Hashes of text differ between processes, so they must not travel with a problem.
        assert again in {problem}
    assert GemmProblem(m=1, n=1, k=1) != ConvProblem(n=1, c=1, k=1, w=1, x=1)
    assert GemmProblem(m=1, n=1, k=1) != (1, 1, 1)
