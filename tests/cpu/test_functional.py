"""`tw.matmul` and `tw.conv*d` on tensors: settings, layouts and gradients are PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import InputError, TensorError

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def test_second_derivatives_of_a_product() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)

    def second(product) -> torch.Tensor:  # type: ignore[no-untyped-def]
        (first,) = torch.autograd.grad(product(x, y).pow(2).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.sum(), x)
        return again

    torch.testing.assert_close(second(tw.matmul), second(torch.matmul))


def test_convolution_settings_are_pytorchs() -> None:
    x, w, bias = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3), torch.randn(6)
    theirs = torch.nn.functional.conv2d(x, w, bias, padding="same", dilation=2)
    torch.testing.assert_close(tw.conv2d(x, w, bias, padding="same", dilation=2), theirs)
    ours = tw.conv2d(x, w, stride=np.int64(2), padding=(1, 0))
    torch.testing.assert_close(ours, torch.nn.functional.conv2d(x, w, stride=2, padding=(1, 0)))
    for wrong in ({"stride": 1.5}, {"stride": None}, {"padding": "some"}, {"padding": (1, 2, 3)}):
        with pytest.raises(InputError):
            tw.conv2d(x, w, **wrong)
    with pytest.raises(TypeError):
        tw.conv2d(x, w, direction="bwd_data")


def test_gradients_are_pytorchs() -> None:
    torch.manual_seed(0)
    a = torch.randn(9, 8, dtype=torch.float32, requires_grad=True)
    b = torch.randn(8, 7, dtype=torch.float32, requires_grad=True)
    tw.matmul(a, b).square().sum().backward()
    again = [t.detach().clone().requires_grad_() for t in (a, b)]
    (again[0] @ again[1]).square().sum().backward()
    torch.testing.assert_close(a.grad, again[0].grad)
    torch.testing.assert_close(b.grad, again[1].grad)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolution_and_its_gradients_are_pytorchs(rank: int) -> None:
    torch.manual_seed(rank)
    layer = {"stride": 2, "padding": 1, "dilation": 1, "groups": 2}
    x = torch.randn(2, 6, *(7, 8, 9)[:rank], requires_grad=True)
    w = torch.randn(4, 3, *(3, 3, 3)[:rank], requires_grad=True)
    ours = getattr(tw, f"conv{rank}d")(x, w, **layer)
    again = [t.detach().clone().requires_grad_() for t in (x, w)]
    theirs = getattr(torch.nn.functional, f"conv{rank}d")(*again, **layer)
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn_like(theirs)
    ours.backward(gradient)
    theirs.backward(gradient)
    torch.testing.assert_close(x.grad, again[0].grad)
    torch.testing.assert_close(w.grad, again[1].grad)


def test_convolution_keeps_channels_last() -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    w = torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last)
    out = tw.conv2d(x, w, padding=1)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, w, padding=1))


NO_SIZES: tuple[Any, ...] = (5, None, "abcd", b"abcd", {1, 4, 6}, iter((1, 4, 6, 6)))
NO_SIZES += ((4, 6), (1, 4, 6.0, 6), (True,) * 4)


@pytest.mark.parametrize("given", NO_SIZES)
@pytest.mark.parametrize("kind", [lambda t: t, lambda t: t.numpy()], ids=["tensors", "arrays"])
def test_sizes_of_gradients_that_are_none_are_refused(kind: Any, given: Any) -> None:
    x, w, dy = (kind(torch.randn(s)) for s in ((1, 4, 6, 6), (4, 4, 3, 3), (1, 4, 4, 4)))
    with pytest.raises(TensorError, match=r"input_size is .* pass a sequence of 3 to 5 integers"):
        tw.conv_input_gradient(given, w, dy)
    with pytest.raises(TensorError, match=r"weight_size is .* pass a sequence of 3 to 5 integers"):
        tw.conv_weight_gradient(x, given, dy)


def test_sizes_of_gradients_are_any_sequence_of_integers() -> None:
    w, dy = torch.randn(4, 4, 3, 3), torch.randn(1, 4, 4, 4)
    expected = torch.nn.grad.conv2d_input((1, 4, 6, 6), w, dy)
    for size in ((1, 4, 6, 6), [1, 4, 6, 6], np.array([1, 4, 6, 6]), (1, 4, np.int64(6), 6)):
        torch.testing.assert_close(tw.conv_input_gradient(size, w, dy), expected)


def test_gradients_of_arrays_and_tensors_together_are_refused() -> None:
    x, w, dy = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(1, 4, 4, 4)
    for one, other in ((w.numpy(), dy), (w, dy.numpy())):
        with pytest.raises(TensorError, match="convert one of them"):
            tw.conv_input_gradient(x.shape, one, other)
    for one, other in ((x.numpy(), dy), (x, dy.numpy())):
        with pytest.raises(TensorError, match="convert one of them"):
            tw.conv_weight_gradient(one, w.shape, other)
