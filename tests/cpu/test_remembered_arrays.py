"""Calls on NumPy arrays are remembered: right again, whatever they hold and wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.dispatch.remembered import CALLS
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import InputError, TensorError
from tilewise.ops.contract import get_op
from tilewise.ops.conv.infer import infer

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def is_remembered(call: Callable[[], object]) -> bool:
    """Whether a second call like the first is found."""
    CALLS.forget()
    call()
    known = len(CALLS)
    call()
    return len(CALLS) == known > 0


def test_products_are_right_again() -> None:
    out = np.empty((5, 7), np.float32)
    assert is_remembered(lambda: tw.matmul(drawn(5, 6), drawn(6, 7), out=out))
    for _ in range(3):
        a, b, mine = drawn(5, 6), drawn(6, 7), np.full((5, 7), np.nan, np.float32)
        assert tw.matmul(a, b, out=mine) is mine
        np.testing.assert_allclose(mine, a @ b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(tw.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_are_right_again(rank: int, has_out: bool, is_last: bool) -> None:
    convolve = getattr(tw, f"conv{rank}d")
    layer: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}

    def stored(array: Array) -> Array:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)

    def call() -> Array:
        x, w = drawn(2, 4, *(5, 6, 7)[:rank]), drawn(6, 2, *(3, 2, 1)[:rank])
        x, w = (stored(x), stored(w)) if is_last else (x, w)
        problem = infer(x, w, **layer)
        wanted = get_op("conv_fwd").reference(problem, x, w)
        out = np.full(wanted.shape, np.nan, np.float32) if has_out else None
        out = stored(out) if is_last and has_out else out
        found: Array = convolve(x, w, out=out, **layer)
        assert out is None or found is out
        assert not is_last or found.strides[1] == 4
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        return found

    assert is_remembered(call)
    call()


def test_memory_is_looked_at_in_every_call() -> None:
    held = drawn(12, 6)
    tw.matmul(held[:6], drawn(6, 6), out=held[6:])
    with pytest.raises(TensorError, match="out shares memory with"):
        tw.matmul(held[:6], drawn(6, 6), out=held[3:9])
    closed = drawn(6, 6)
    closed.flags.writeable = False
    for _ in range(2):
        with pytest.raises(TensorError, match="read-only"):
            tw.matmul(held[:6], drawn(6, 6), out=closed)


def test_settings_that_cannot_be_looked_up_serve_all_the_same() -> None:
    x, w = drawn(1, 2, 5, 5), drawn(2, 2, 3, 3)
    for _ in range(2):
        assert np.array_equal(tw.conv2d(x, w, stride=[2, 1]), tw.conv2d(x, w, stride=(2, 1)))


@pytest.mark.parametrize("stride", [1.0, (1.0, 1)])
def test_settings_of_other_types_are_refused_the_second_time_too(stride: Any) -> None:
    x, w = drawn(1, 4, 6, 6), drawn(4, 4, 3, 3)
    tw.conv2d(x, w, stride=(1, 1) if isinstance(stride, tuple) else 1)
    with pytest.raises(InputError, match="pass one integer"):
        tw.conv2d(x, w, stride=stride)


class Changing:
    """An integer that is another one later, as tensors are that count."""

    value = 1

    def __index__(self) -> int:
        return self.value


def test_settings_that_change_are_read_in_every_call() -> None:
    x, w, stride = drawn(1, 4, 7, 7), drawn(4, 4, 3, 3), Changing()
    for value in (1, 2):
        stride.value = value
        for given in (stride, (stride, 1)):
            assert is_remembered(lambda given=given: tw.conv2d(x, w, stride=given)) is False
            wide = given if isinstance(given, tuple) else (given, given)
            found = tw.conv2d(x, w, stride=given)
            assert np.array_equal(found, tw.conv2d(x, w, stride=tuple(map(int, wide))))


@pytest.mark.parametrize("given", [{1, 2}, {1: 2}, iter((1, 1))])
def test_settings_without_an_order_are_refused(given: Any) -> None:
    with pytest.raises(InputError, match="pass one integer"):
        tw.conv2d(drawn(1, 4, 6, 6), drawn(4, 4, 3, 3), stride=given)


def test_layers_that_are_none_are_refused() -> None:
    x, w = drawn(2, 3), drawn(5, 3)
    assert np.allclose(tw.linear(x, w[0]), x @ w[0])
    for weight, bias in ((drawn(5, 3, 3), None), (w[0], w[0]), (np.zeros((), np.float32), None)):
        with pytest.raises(TensorError, match="dimensions"):
            tw.linear(x, weight, bias)
    with pytest.raises(TensorError, match="use one of none"):
        tw.linear(x, w, None, ["relu"])  # type: ignore[arg-type]


def test_shapes_that_are_copied_or_empty_are_served_each_time() -> None:
    a, b = drawn(6, 5)[::2], drawn(5, 4)[:, ::-1]
    for _ in range(2):
        np.testing.assert_allclose(tw.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)
        assert tw.matmul(drawn(0, 5), drawn(5, 4)).shape == (0, 4)
        with pytest.raises(TensorError, match="conv2d takes 4 dimensions"):
            tw.conv2d(drawn(3, 4, 5), drawn(3, 4, 5))
