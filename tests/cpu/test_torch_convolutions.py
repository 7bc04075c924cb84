"""Convolutions of PyTorch tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from leaves import leaf
from torch.nn import functional

import tilewise as tw
from tilewise.engines.toolchain import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_second_derivatives_of_a_convolution() -> None:
    x, w = leaf(1, 2, 5, 5), leaf(3, 2, 3, 3)

    def second(convolve: Any) -> torch.Tensor:
        (first,) = torch.autograd.grad(convolve(x, w).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), w)[0]

    close(second(tw.conv2d), second(functional.conv2d), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_without_a_batch_and_uneven_same(rank: int) -> None:
    x, w, bias = torch.randn(3, *[7] * rank), torch.randn(4, 3, *[2] * rank), torch.randn(4)
    ours, theirs_ = getattr(tw, f"conv{rank}d"), getattr(functional, f"conv{rank}d")
    close(ours(x, w, bias), theirs_(x, w, bias))
    close(ours(x[None], w, bias, padding="same"), theirs_(x[None], w, bias, padding="same"))
    one, each = {"stride": (2,), "padding": (1,), "dilation": (2,)}, {"stride": 2, "padding": 1}
    close(ours(x[None], w, **one), theirs_(x[None], w, **each, dilation=2))
    with pytest.raises(tw.TilewiseError, match="groups is 0; it must be at least 1"):
        ours(x[None], w, groups=0)
