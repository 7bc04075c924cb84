"""Functions followed over sizes that are not known give what Python gives for known ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import gcd as plain_gcd
from typing import Any

import numpy as np
import pytest

from tilewise.core.sizes import (
    TraceError,
    as_node,
    cheapest,
    concrete,
    either,
    fields_of,
    gcd,
    pieces,
)
from tilewise.core.trace import Branch, Examples, Tree, leaves, trace
from tilewise.export.render import Constants, Texts, expression, value

M, N = fields_of(("m", "n"), {"n": 1}).values()


def follow(tree: Tree | None, fields: Mapping[str, int]) -> Any:
    """The leaf's value for known sizes, as C++ finds it; None where nobody went."""
    one = Examples({name: np.array([value]) for name, value in fields.items()})
    while isinstance(tree, Branch):
        tree = tree.yes if one.evaluate(tree.test)[0] else tree.no
    return None if tree is None else tree.value


def check(function: Any, tree: Any, count: int = 300) -> None:
    rng = random.Random(1)
    for _ in range(count):
        m, n = rng.randrange(1, 5000), rng.randrange(1, 5000)
        assert follow(tree, {"m": m, "n": n}) == function(m, n)


def test_every_path_is_followed() -> None:
    def rule(m: Any, n: Any) -> str | None:
        if m % 16:
            return "odd"
        if -(-m // 128) * n > 2**12 and max(m, n) < 4000:
            return "many"
        return None if min(m, n) >= 64 else "few"

    tree = trace(lambda: rule(M, N))
    assert {leaf.value for leaf in leaves(tree)} == {None, "odd", "many", "few"}
    check(rule, tree)


def test_helpers_compute_the_same_on_both_kinds_of_number() -> None:
    def cost(m: Any, n: Any) -> str:
        def of(at: Any) -> Any:
            return -(-m // at) + either(at > 3, at, 2 * at)

        best, place = cheapest(1, 9, of)
        return "a" if gcd(m, 12) + best > 40 + place else "b"

    assert gcd(18, 12) == plain_gcd(18, 12)
    check(cost, trace(lambda: cost(M, N)))


def test_a_product_of_what_may_be_zero_is_not_zero() -> None:
    """A negative number's highest value is zero, too."""

    def rule(m: Any, n: Any) -> str:
        return "many" if -(-m * m // 256) > 40 + n - n else "few"

    tree = trace(lambda: rule(M, N))
    assert {leaf.value for leaf in leaves(tree)} == {"many", "few"}
    check(rule, tree)


def test_a_product_equals_itself_written_the_other_way_round() -> None:
    tree = trace(lambda: "same" if M * (N + 3) == (N + 3) * M and M * N <= N * M else "other")
    assert [leaf.value for leaf in leaves(tree)] == ["same"]


def test_only_paths_of_examples_are_followed() -> None:
    seen = Examples({"m": np.arange(1, 9), "n": np.full(8, 4)})
    tree = trace(lambda: concrete(N) + (1 if M > 100 else 0), seen)
    assert [leaf.value for leaf in leaves(tree)] == [4]
    assert follow(tree, {"m": 3, "n": 4}) == 4
    assert follow(tree, {"m": 3, "n": 5}) is None
    assert follow(tree, {"m": 300, "n": 4}) is None


def test_sizes_stand_in_texts() -> None:
    tree = trace(lambda: f"M is {M}, of {N * 2}")
    (leaf,) = leaves(tree)
    parts = pieces(leaf.value)
    assert [part for part in parts if isinstance(part, str)] == ["M is ", ", of "]


@pytest.mark.parametrize(
    "function",
    [
        lambda: {M: 1},
        lambda: range(M),
        lambda: float(M),
        lambda: f"{M:08d}",
        lambda: M * float("inf"),
    ],
)
def test_what_cannot_be_followed_is_refused(function: Any) -> None:
    with pytest.raises(TraceError):
        trace(function)


def test_a_size_is_asked_about_inside_of_a_trace_alone() -> None:
    with pytest.raises(TraceError, match="outside of a trace"):
        bool(M > 3)


@pytest.mark.parametrize("number", [2**63, -(2**63), 2**63 + 5, -(2**70) + 3, 2**63 - 1, 7])
def test_numbers_of_any_size_become_cpp(number: int) -> None:
    """What no 64 bits hold stands in the expression; all else in the table of numbers."""
    constants = Constants(Texts(), str)
    text = expression(as_node(number), constants)
    assert all(-(2**63) <= n < 2**63 for n in constants.numbers)
    assert eval(text, {"wide": int, "c": constants.numbers}) == number


def test_what_is_wide_becomes_64_bits_where_it_is_handed_over() -> None:
    assert value(M * N * 8, Constants(Texts(), str)).startswith("int64_t(")
    assert value(M * 8, Constants(Texts(), str)) == "(p[m_] * c[0])"


def test_a_whole_number_is_compared_with_a_fraction_as_one() -> None:
    tree = trace(lambda: "long" if M > N / 3 else "short")
    assert isinstance(tree, Branch)
    text = expression(tree.test, Constants(Texts(), str))
    assert text == "((double(p[n_]) / double(c[0])) < double(p[m_]))"
