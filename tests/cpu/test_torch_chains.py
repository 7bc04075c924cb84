"""Layers that follow each other are found, and served as one: the same results in fewer passes."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusing import fused  # noqa: F401  # a fixture
from residual_blocks import Basic, Inverted, layer, network
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import InputError
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.torch_ops.chains import is_fused, rewrite

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close
IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def nodes(result: Tensor) -> Counter[str]:
    """How often each kind of node is behind a result."""
    seen, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [other for other, _ in node.next_functions]
    return Counter(node.name() for node in seen)


def chains(module: nn.Module) -> list[tuple[str, str]]:
    """What the chains of a module's own forward pass are."""
    made = rewrite(module)
    return [(type(one).__name__, one.activation) for one in made[1]] if made else []


def steps(model: nn.Module, count: int, images: Tensor = IMAGES, **cast: Any) -> list[Tensor]:
    """Results of training steps, then all gradients and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(cast)):
            result = model(images)
        result.float().square().mean().backward()
        optimizer.step()
        found.append(result.detach())
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]  # type: ignore[misc]


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


def test_inference_folds_and_fuses(fused: list[Epilogue]) -> None:  # noqa: F811
    plain, patched = network(), tw.patch(network(), fuse=True, always=True)
    for model in (plain, patched):
        steps(model, 2)
        model.eval()
    fused.clear()
    for _ in range(2):
        with torch.no_grad():
            close(patched(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-4)
    done = Counter((e.bias, e.residual, e.activation) for e in fused)
    assert done == {
        (True, False, "relu"): 2 * 3,  # the stem, and the first layer of each block
        (True, True, "relu"): 2 * 2,
        (True, True, "none"): 2,  # the last of the inverted block
        (True, False, "none"): 2 * 2,  # the shortcut, the inverted block's gate
        (True, False, "silu"): 2 * 3,  # both before it, and the squeezing one
    }
    folded = [row.served.why for row in tw.layers(patched) if not row.with_gradients]
    assert sum("BatchNorm, addition, relu" in why for why in folded) == 2
    assert any("with gelu" in why for why in folded)


class Dropped(nn.Module):
    """Leaves branches out in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.5)


class Deep(nn.Module):
    """A container within a container, a branch that may be dropped, and an addition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Sequential(layer(4, 8, 1), layer(8, 4, 3, activation=False))
        self.depth, self.relu = Dropped(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result = self.depth(self.conv(x))
        result += x
        return self.relu(result)


def deep() -> tuple[nn.Module, nn.Module, Tensor]:
    """Plain, fused, and what goes in."""
    return Deep().eval(), tw.patch(Deep().eval(), fuse=True, always=True), torch.randn(2, 4, 6, 6)


def test_what_a_container_gives_is_added_to_by_its_last_layer(fused: list[Epilogue]) -> None:  # noqa: F811
    plain, patched, x = deep()
    with torch.no_grad():
        close(patched(x), plain(x), rtol=1e-4, atol=1e-4)
    last = Epilogue(bias=True, residual=True, activation="relu")
    assert fused == [Epilogue(bias=True, activation="silu"), last]
    for model in (plain, patched):
        model.depth.train()  # now there is something between them
    fused.clear()
    results = []
    for model in (plain, patched):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(model(x))
    close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert fused and last not in fused


def test_what_is_found_at_inference_alone_is_found(fused: list[Epilogue]) -> None:  # noqa: F811
    patched = tw.patch(Deep(), fuse=True, always=True)
    assert is_fused(patched) and patched.training and patched.depth.training
    with torch.no_grad():
        patched.eval()(torch.randn(2, 4, 6, 6))
    assert Epilogue(bias=True, residual=True, activation="relu") in fused


def test_containers_that_are_watched_or_changed_are_called(fused: list[Epilogue]) -> None:  # noqa: F811
    plain, patched, x = deep()
    seen: list[Tensor] = []
    handle = patched.conv[1].register_forward_hook(
        lambda module, given, result: seen.append(result.clone())  # as it is overwritten
    )
    with torch.no_grad():
        close(patched(x), plain(x), rtol=1e-4, atol=1e-4)
        assert len(seen) == 1 and seen[0].min() < 0
        handle.remove()
        for model in (plain, patched):
            torch.manual_seed(2)
            model.conv[1] = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.Tanh()).eval()
        close(patched(x), plain(x), rtol=1e-4, atol=1e-4)
        for model in (plain, patched):
            model.conv.append(nn.Identity())
        close(patched(x), plain(x), rtol=1e-4, atol=1e-4)


def test_an_addition_behind_a_container_in_training(fused: list[Epilogue]) -> None:  # noqa: F811
    class Bare(Deep):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    x = torch.randn(2, 4, 6, 6)
    plain, patched = Bare(), tw.patch(Bare(), fuse=True, always=True)
    for model, additions in ((plain, 1), (patched, 0)):
        assert nodes(model(x))["AddBackward0"] == additions
    for ours, theirs in zip(steps(patched, 2, x), steps(plain, 2, x), strict=True):
        close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_pytorchs_convolution_is_folded_for_too() -> None:
    plain, patched = network().eval(), tw.patch(network(), fuse=True).eval()
    calls: list[Any] = []
    for norm in (m for m in patched.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.forward = lambda x: calls.append(x) or x  # type: ignore[method-assign]
    with torch.no_grad():
        close(patched(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-4)
    assert calls == []


def test_new_weights_are_folded_anew() -> None:
    plain, patched = network().eval(), tw.patch(network(), fuse=True).eval()
    with torch.no_grad():
        patched(IMAGES)
        for change in (
            lambda m: m[0].weight.mul_(1.5),
            lambda m: m[1].running_var.mul_(3),
            lambda m: m[1].bias.add_(1),
            lambda m: m.load_state_dict({n: t * 1.1 for n, t in m.state_dict().items()}),
            lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight * 2)),
            lambda m: steps_and_back(m),
        ):
            for model in (plain, patched):
                change(model)
            close(patched(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-4)


@torch.enable_grad()
def steps_and_back(model: nn.Module) -> None:
    steps(model.train(), 1)
    model.eval()


def test_gradients_in_eval_mode_see_every_layer() -> None:
    plain, patched = network().eval(), tw.patch(network(), fuse=True).eval()
    assert nodes(patched(IMAGES)) == nodes(plain(IMAGES))


def test_without_a_gain_training_is_pytorchs_own() -> None:
    plain, patched = network(), tw.patch(network(), fuse=True)
    assert nodes(patched(IMAGES)) == nodes(plain(IMAGES))


@pytest.mark.parametrize("is_last", [False, True])
def test_a_chain_in_training_is_one_node(fused: list[Epilogue], is_last: bool) -> None:  # noqa: F811
    images = IMAGES.to(memory_format=torch.channels_last) if is_last else IMAGES
    plain, patched = network(), tw.patch(network(), fuse=True, always=True)
    found = nodes(patched(images))
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    assert found["_TrainedBackward"] == norms
    assert not any("BatchNorm" in name for name in found)
    assert fused.count(Epilogue(sums=True)) == norms
    assert nodes(plain(images))["_TrainedBackward"] == 0
    for ours, theirs in zip(steps(patched, 3, images), steps(plain, 3, images), strict=True):
        close(ours, theirs, rtol=1e-3, atol=1e-3)


def small(*norm: Any, **settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, 3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(6, *norm, **settings), nn.ReLU())


@pytest.mark.parametrize(
    ("settings", "is_one"),
    [
        ({}, True),
        ({"affine": False}, True),
        ({"track_running_stats": False}, True),
        ({"eps": 0.1, "momentum": 0.5}, True),
        ({"momentum": None}, False),
    ],
)
def test_settings_of_batch_norm(settings: dict[str, Any], is_one: bool) -> None:
    plain, patched = small(**settings), tw.patch(small(**settings), fuse=True, always=True)
    assert nodes(patched(IMAGES))["_TrainedBackward"] == is_one
    plain(IMAGES)
    for ours, theirs in zip(steps(patched, 2), steps(plain, 2), strict=True):
        close(ours, theirs, rtol=1e-4, atol=1e-5)
    for model in (plain, patched):
        model.eval()
    with torch.no_grad():
        close(patched(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-5)
        for model in (plain, patched):
            model.train()
        close(patched(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(patched.buffers(), plain.buffers(), strict=True):
        close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_training_under_autocast() -> None:
    plain, patched = network(), tw.patch(network(), fuse=True, always=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert patched(IMAGES).dtype == torch.bfloat16
        plain(IMAGES)
    for ours, theirs in zip(steps(patched, 2, cast=True), steps(plain, 2, cast=True), strict=True):
        assert ours.dtype == theirs.dtype
        close(ours.float(), theirs.float(), rtol=0.1, atol=0.1)


def test_frozen_layers_and_inputs_that_want_gradients() -> None:
    given = []
    for model in (small(), tw.patch(small(), fuse=True, always=True)):
        model[0].weight.requires_grad_(False)
        x = IMAGES.clone().requires_grad_()
        model(x).square().sum().backward()
        assert model[0].weight.grad is None
        given.append((x.grad, model[1].weight.grad, model[1].bias.grad))
    for theirs, ours in zip(*given, strict=True):
        close(ours, theirs, rtol=1e-3, atol=1e-4)


def kept_bytes(model: nn.Module) -> int:
    """What autograd keeps of a forward pass, each piece of memory once; parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(torch.randn(8, 3, 64, 64))
    assert result.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in own)


def test_no_more_is_kept_than_pytorch_keeps() -> None:
    ours, theirs = kept_bytes(tw.patch(network(), fuse=True, always=True)), kept_bytes(network())
    assert ours <= 1.01 * theirs  # statistics have two rows more


def test_hooks_see_their_layers() -> None:
    patched = tw.patch(network(), fuse=True, always=True).eval()
    seen: list[Any] = []
    patched[1].register_forward_hook(lambda module, given, result: seen.append(result))
    with torch.no_grad():
        close(patched(IMAGES), network().eval()(IMAGES), rtol=1e-4, atol=1e-4)
    assert len(seen) == 1


def test_inference_mode_and_checkpoints_of_activations() -> None:
    from torch.utils.checkpoint import checkpoint

    plain, patched = small(), tw.patch(small(), fuse=True, always=True)
    results = []
    for model in (plain, patched):
        checkpoint(model, IMAGES, use_reentrant=False).square().sum().backward()
        with torch.inference_mode():
            results.append([model.eval()(IMAGES).clone(), model[0].weight.grad])
        with torch.no_grad():
            results[-1].append(model(IMAGES))
    for theirs, ours in zip(*results, strict=True):
        close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_layers_that_are_exchanged_later() -> None:
    patched = tw.patch(network(), fuse=True, always=True).eval()
    plain = network().eval()
    with torch.no_grad():
        patched(IMAGES)
        for model in (plain, patched):
            torch.manual_seed(5)
            model[1] = nn.Identity()
            model[3].conv1 = nn.Conv2d(8, 16, 3, 2, padding=1)
        close(patched(IMAGES), plain(IMAGES), rtol=1e-4, atol=1e-4)


class Changing(nn.Module):
    """A chain whose layers somebody changes between calls."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(channels)
        self.bare, self.scale = nn.Conv2d(4, 8, 3, padding=1, bias=False), 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn(self.bare(x)))
        return self.scaled(y + functional.relu(self.conv(x)))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


def pruned(model: Any) -> None:
    for one in (model.conv, model.bare, model.bn):
        for name, tensor in [*one.named_parameters(), *one.named_buffers()]:
            if tensor.dim():
                kept = tensor.detach()[:5].clone()
                setattr(one, name, nn.Parameter(kept) if "running" not in name else kept)
    model.bn.num_features = 5


def strided(model: Any) -> None:
    model.conv.stride = model.bare.stride = (2, 2)


def dilated(model: Any) -> None:
    for one in (model.conv, model.bare):
        one.dilation = one.padding = (2, 2)


def mirrored(model: Any) -> None:
    for one in (model.conv, model.bare):
        one.padding_mode, one._reversed_padding_repeated_twice = "reflect", [1] * 4


def single(model: Any) -> None:
    for one in (model.conv, model.bare):
        one.weight = nn.Parameter(one.weight.detach()[..., 1:2, 1:2].clone())
        one.padding = (0, 0)


def rescaled(model: Any) -> None:
    model.scale = 2.0


def of_one(name: str, tensor: str) -> Any:
    def change(model: Any) -> None:
        layer = getattr(model, name)
        one = getattr(layer, tensor).detach()[:1].clone()
        setattr(layer, tensor, one if "running" in tensor else nn.Parameter(one))

    return change


def in_fp16(model: Any) -> None:
    model.conv.bias = nn.Parameter(model.conv.bias.detach().half())


def outcome(model: nn.Module, x: Tensor) -> Any:
    """What a model gives twice, or that it refuses."""
    try:
        return [model(x) for _ in range(2)]
    except (RuntimeError, InputError):
        return RuntimeError


LATER = [pruned, strided, dilated, mirrored, single, rescaled, in_fp16]
LATER += [of_one("bn", name) for name in ("weight", "bias", "running_mean", "running_var")]
LATER += [of_one("conv", "bias")]


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
def test_settings_and_sizes_that_are_changed_later(
    change: Any, is_training: bool, fuses: bool
) -> None:
    plain = Changing().train(is_training)
    patched = tw.patch(copy.deepcopy(plain), fuse=fuses, always=True)
    images = torch.randn(2, 4, 6, 6)
    for grad in (False, True):
        one, other = copy.deepcopy(plain), copy.deepcopy(patched)
        with torch.set_grad_enabled(grad):
            close(outcome(other, images), outcome(one, images), rtol=1e-4, atol=1e-4)
            for model in (one, other):
                change(model)
            expected, found = outcome(one, images), outcome(other, images)
        assert (found is RuntimeError) == (expected is RuntimeError), (found, expected)
        if found is not RuntimeError:
            close(found, expected, rtol=1e-4, atol=1e-4)


def test_batch_norms_of_other_sizes_are_pytorchs_to_refuse() -> None:
    patched = tw.patch(Changing(channels=1).eval(), fuse=True, always=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="8 elements"):
        patched(torch.randn(2, 4, 6, 6))


def test_fused_models_are_copied_stored_and_undone() -> None:
    patched = tw.patch(network(), fuse=True, always=True)
    names = list(patched.state_dict())
    assert names == list(network().state_dict())
    patched.eval()
    with torch.no_grad():
        expected = patched(IMAGES)
        for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
            assert is_fused(other[3])
            close(other(IMAGES), expected)
            other[3].conv1.weight.zero_()  # a copy's chains are of its own layers
            assert not torch.allclose(other(IMAGES), expected)
        close(patched(IMAGES), expected)
    tw.patch(patched)  # without fuse
    assert not any(map(is_fused, patched.modules()))
    tw.unpatch(tw.patch(patched, fuse=True))
    for ours, theirs in zip(patched.modules(), network().modules(), strict=True):
        assert type(ours) is type(theirs)
        assert not any(name.startswith("_tilewise") for name in ours.__dict__)


def test_compiled_models_are_the_compilers_to_fuse() -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    patched = tw.patch(network(), fuse=True, always=True).eval()
    compiled = torch.compile(patched, backend=backend, fullgraph=True)
    with torch.no_grad():
        close(compiled(IMAGES), network().eval()(IMAGES), rtol=1e-4, atol=1e-4)
    assert functional.batch_norm in seen or any("batch_norm" in str(one) for one in seen)
    assert not any("hain" in str(target) for target in seen)


def test_watched_calls_see_every_layer() -> None:
    """Modes, transforms and traces look at PyTorch's operators."""
    from torch.utils.flop_counter import FlopCounterMode

    patched = tw.patch(small(), fuse=True).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        patched(IMAGES)
    assert counter.get_total_flops() == 2 * 4 * 6 * 100 * 27
    batched = torch.func.vmap(patched)(IMAGES[:, None])
    close(batched[:, 0], patched(IMAGES))


class Block(nn.Module):
    """A chain of its own, and whatever a test does around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))  # type: ignore[no-any-return]


def fused_block(kind: type[Block] = Block) -> Block:
    torch.manual_seed(5)
    made: Block = tw.patch(kind().eval(), fuse=True, always=True)
    with torch.no_grad():
        made(IMAGES)
    return made


def by_hand(block: Block) -> Tensor:
    y = functional.conv2d(IMAGES, block.conv.weight, padding=1)
    return functional.batch_norm(
        y, block.bn.running_mean, block.bn.running_var, block.bn.weight, block.bn.bias
    )


@torch.no_grad()
def test_activations_are_exchanged_and_watched_like_other_layers() -> None:
    block, seen = fused_block(), []
    block.relu = nn.SiLU()
    close(block(IMAGES), functional.silu(by_hand(block)), rtol=1e-4, atol=1e-4)
    handle = block.relu.register_forward_hook(lambda *_: seen.append(1))
    block(IMAGES)
    handle.remove()
    assert seen == [1]
    row = tw.patch(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), fuse=True)
    row(IMAGES)
    row[1] = nn.Identity()
    assert bool((row(IMAGES) < 0).any())


class Optional(Block):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if residual is None else y + residual


class Remembering(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Asking(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if isinstance(x, Tensor) else x


class Overwriting(Block):
    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_zeros(1).expand(len(x), 8, *x.shape[2:]).clone()
        y = self.bn(self.conv(x)) + kept
        kept.add_(100)
        return self.relu(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Optional, Remembering, Asking, Overwriting])
@torch.no_grad()
def test_what_tracing_would_freeze_is_left_alone(kind: type[Block]) -> None:
    block = fused_block(kind)
    close(block(IMAGES), functional.relu(by_hand(block)), rtol=1e-4, atol=1e-4)
    assert isinstance(getattr(block, "last", IMAGES), Tensor)


@torch.no_grad()
def test_folds_are_of_the_very_tensors() -> None:
    """A new parameter often lies where the one before it lay."""
    block = fused_block()
    for _ in range(10):
        block.conv.weight = None  # type: ignore[assignment]
        block.conv.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        close(block(IMAGES), functional.relu(by_hand(block)), rtol=1e-4, atol=1e-4)


def test_parameters_thawed_later_get_gradients() -> None:
    block = fused_block().requires_grad_(False)
    assert not block(IMAGES).requires_grad
    block.bn.requires_grad_(True)
    assert block(IMAGES).requires_grad


def test_statistics_that_are_switched_off_stay() -> None:
    block = fused_block().train()
    block(IMAGES)
    assert block.bn.running_mean is not None
    before = block.bn.running_mean.clone()
    block.bn.track_running_stats = False
    block(IMAGES)
    assert torch.equal(block.bn.running_mean, before)
