"""Layers that follow each other are found in forward passes, and what only looks alike is not."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from residual_blocks import Basic, Inverted, network
from stepping import steps
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.torch_ops.chains import is_fused, rewrite

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


def chains(module: nn.Module) -> list[tuple[str, str]]:
    """What the chains of a module's own forward pass are."""
    made = rewrite(module)
    return [(type(one).__name__, one.activation) for one in made[1]] if made else []


def test_chains_are_found() -> None:
    assert chains(Basic(4, 4)) == [("ConvChain", "relu")] * 2
    assert chains(Inverted(4)) == [("Tail", "none")]  # the addition to what its block gives
    assert chains(Inverted(4).block[1]) == [("ConvChain", "silu")]
    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4), nn.ReLU())
    assert chains(mlp) == [("LinearChain", "gelu"), ("LinearChain", "relu")]
    model = tw.patch(network(), fuse=True)
    owners = [name for name, module in model.named_modules() if is_fused(module)]
    assert owners == [
        *("", "3", "3.downsample", "4", "5", "5.block.0", "5.block.1"),
        *("5.block.2", "5.block.3"),
    ]
    assert isinstance(model[3], Basic)


@torch.fx.wrap
def stochastic_depth(x: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    return x * torch.empty(len(x), 1, 1, 1).bernoulli_(1 - p) if training else x


class Depth(nn.Module):
    """Drops samples as torchvision does."""

    def forward(self, x: Tensor) -> Tensor:
        return stochastic_depth(x, 0.5, "row", self.training)


class Written(nn.Module):
    """A block whose forward pass is given."""

    def __init__(self, forward: Any, norm: Any = nn.BatchNorm2d, convolution: Any = None) -> None:
        super().__init__()
        self.conv = convolution or nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn, self.relu, self._forward = norm(4), nn.ReLU(), forward
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.silu, self.gelu, self.depth = nn.SiLU(), nn.GELU(), Depth()
        self.seen: list[Tensor] = []
        self.elsewhere = SimpleNamespace()
        self.weights = nn.Parameter(torch.linspace(-1, 2, 4).reshape(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


class OwnNorm(nn.BatchNorm2d):
    """Somebody's own."""


def twice(self: Any, x: Tensor) -> Any:
    z = self.bn(self.conv(x))
    return self.relu(z) + z


def overwritten(self: Any, x: Tensor) -> Any:
    z = self.conv(x)
    x.mul_(2)
    return self.relu(self.bn(z) + x)


def other_way(self: Any, x: Tensor) -> Any:
    y = x * 2
    y += self.bn(self.conv(x))
    return self.relu(y), y


def activated_twice(self: Any, x: Tensor) -> Any:
    y = self.silu(self.one(x))
    return y * x + y


def overwritten_between(self: Any, x: Tensor) -> Any:
    y = x + 1
    z = self.silu(y)
    y.mul_(3)
    return z * y


def viewed(self: Any, x: Tensor) -> Any:
    y = x[:]
    z = self.conv(x)
    y.add_(1)
    return z + y


def looked_at_first(self: Any, x: Tensor) -> Any:
    y = x.permute(0, 1, 2, 3)
    z = self.one(y)
    x.mul_(2)
    return self.silu(z) * x


def added_to_its_input(self: Any, x: Tensor) -> Any:
    y = x
    y += self.conv(x)
    return x


def scaled_input(self: Any, x: Tensor) -> Any:
    x *= 2
    return self.relu(self.bn(self.conv(x)))


def counting(self: Any, x: Tensor) -> Any:
    self.bn.num_batches_tracked.add_(1)
    return self.relu(self.conv(x)) * self.bn.num_batches_tracked


def numbered(self: Any, x: Tensor) -> Any:
    self.seen.append(self.relu(self.conv(x)))
    return self.seen[-1]


def handed_over(self: Any, x: Tensor) -> Any:
    self.elsewhere.result = self.relu(self.conv(x))
    return self.elsewhere.result


def at_random(self: Any, x: Tensor) -> Any:
    return self.relu(self.conv(x)) + random.random()


def without_gradients(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return self.relu(self.conv(x))


def with_gradients(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        return self.relu(self.conv(x))


def in_half(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return self.relu(self.conv(x))


def not_in_half(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return self.relu(self.conv(x))


def unpacked(self: Any, x: Tensor) -> Any:
    y, z = x.chunk(2)
    return self.relu(self.conv(y)) + z


def branching(self: Any, x: Tensor) -> Any:
    return self.relu(self.bn(self.conv(x))) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda self, x: functional.relu(self.bn(self.conv(x))), ["relu"]),
        (lambda self, x: (x + self.bn(self.conv(x))).relu_(), ["relu"]),
        (lambda self, x: torch.relu(torch.add(self.conv(x), x)), ["relu"]),
        (lambda self, x: self.bn(self.conv(x)) + 1.0, ["none"]),
        (lambda self, x: torch.add(self.bn(self.conv(x)), x, alpha=2), ["none"]),
        (lambda self, x: functional.gelu(self.conv(x), approximate="tanh"), []),
        (lambda self, x: self.relu(self.bn(self.conv(self.conv(x)))), ["relu"]),
        (lambda self, x: self.weights * self.bn(self.conv(x)) + x, ["none", "none"]),
        (lambda self, x: self.weights * self.weights + x, []),
        (lambda self, x: x.mean() * self.conv(x) + x, []),
        (lambda self, x: self.silu(self.one(x)) * self.two(x), ["silu"]),
        (lambda self, x: self.two(x) * self.gelu(self.one(x)), ["gelu"]),
        (lambda self, x: functional.silu(x) * x, ["silu"]),
        (lambda self, x: functional.silu(self.one(x)) * x.mean(), ["silu"]),
        (lambda self, x: functional.silu(self.one(x)) * 2, ["silu"]),
        (lambda self, x: functional.silu(self.one(x)) * self.weights + x, ["silu", "none"]),
        (lambda self, x: functional.silu(self.one(x) + 0, inplace=True) * x, []),
        (lambda self, x: functional.gelu(self.one(x), approximate="tanh") * x, []),
        (lambda self, x: self.relu(x) * self.relu(x), ["relu"]),
        (lambda self, x: self.silu(self.bn(self.conv(x))) * x, ["silu"]),
        (activated_twice, ["silu"]),
        (overwritten_between, []),
        (twice, ["none"]),
        (overwritten, []),
        (other_way, ["none"]),
        (branching, []),
        (unpacked, ["relu"]),
        (viewed, []),
        (looked_at_first, ["silu"]),
        (added_to_its_input, []),
        (scaled_input, ["relu"]),
        (counting, ["relu"]),
        (numbered, []),
        (handed_over, []),
        (at_random, []),
        (without_gradients, []),
        (with_gradients, []),
        (torch.no_grad()(without_gradients), []),
        (in_half, []),
        (not_in_half, []),
    ],
)
def test_what_is_a_chain(forward: Any, found: list[str]) -> None:
    torch.manual_seed(0)
    block = Written(forward).eval()
    assert [activation for _, activation in chains(block)] == found
    patched = tw.patch(copy.deepcopy(block), fuse=True, always=True)
    x = torch.randn(2, 4, 6, 6)
    for grad in (False, True, False):
        results = []
        for model in (block, patched):
            random.seed(0)
            given = x.clone()
            with torch.set_grad_enabled(grad):
                result = model(given)
            result = result if isinstance(result, tuple) else (result,)
            results.append((*result, given, *model.buffers(), *model.seen))
        close(results[1], results[0], rtol=1e-4, atol=1e-5)
        assert [y.requires_grad for y in results[1]] == [y.requires_grad for y in results[0]]


def dropped(self: Any, x: Tensor) -> Any:
    result = self.depth(self.weights * self.conv(x))
    result += x
    return result


def drawn_between(self: Any, x: Tensor) -> Any:
    result = self.depth(self.weights * self.conv(x))
    return result + self.depth(x)


def other_input(self: Any, x: Tensor) -> Any:
    return self.silu(self.one(x)) * self.two(x + 1)


def used_again(self: Any, x: Tensor) -> Any:
    y = self.two(x)
    return self.silu(self.one(x)) * y + y


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        (lambda self, x: self.silu(self.one(x)) * self.two(x), "GatedLinear"),
        (lambda self, x: self.two(x) * self.silu(self.one(x)), "GatedLinear"),
        (other_input, "Gated"),
        (used_again, "Gated"),
    ],
)
def test_both_products_of_a_gated_mlp_are_found(forward: Any, kind: str) -> None:
    plain, x = Written(forward), torch.randn(2, 4, 6, 6)
    assert chains(plain) == [(kind, "silu")]
    patched = tw.patch(copy.deepcopy(plain), fuse=True)
    for one, other in zip(steps(patched, 1, x), steps(plain, 1, x), strict=False):
        close(one, other)
    assert type(tw.unpatch(patched)) is Written


@pytest.mark.parametrize(
    ("forward", "training", "inference"),
    [(dropped, ["Weighed"], ["Weighed"]), (drawn_between, [], ["Weighed"])],
)
def test_dropped_branches_are_found(
    forward: Any, training: list[str], inference: list[str]
) -> None:
    """Where nothing else may draw random numbers in between; hooks see what is dropped."""
    plain, x = Written(forward), torch.randn(4, 4, 6, 6)
    assert [kind for kind, _ in chains(plain)] == training
    patched, results = tw.patch(copy.deepcopy(plain), fuse=True), []
    for model in (plain, patched):
        torch.manual_seed(3)
        results.append(model(x))
        results[-1].square().sum().backward()
    close(results[1], results[0])
    for ours, theirs in zip(patched.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            close(ours.grad, theirs.grad)
    assert [kind for kind, _ in chains(plain.eval())] == inference
    plain.train().depth.register_forward_hook(lambda *_: None)
    assert chains(plain) == []


def test_other_peoples_layers_stay() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.relu(self.bn(self.conv(x)))

    assert chains(Written(forward, norm=OwnNorm)) == []
    edges = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    assert chains(Written(forward, convolution=edges)) == []
    uneven = nn.Conv2d(4, 4, 2, padding="same")
    assert chains(Written(forward, convolution=uneven)) == []
