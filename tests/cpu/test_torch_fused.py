"""Chains of layers give the same results in fewer passes, in inference and in training."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from fusing import fused  # noqa: F401  # a fixture
from residual_blocks import IMAGES, layer, network, small
from stepping import nodes, steps
from torch import Tensor, nn

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.torch_ops.chains import is_fused

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


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
            lambda m: setattr(m[0].weight, "data", m[0].weight.data * 3),
            lambda m: nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(m.parameters()) * 0.9, m.parameters()
            ),
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


@pytest.mark.parametrize("is_training", [False, True])
def test_gradients_of_a_batch_of_directions(is_training: bool) -> None:
    """As vectorised Jacobians ask for them: of tensors without memory of their own."""
    plain, patched = network(), tw.patch(network(), fuse=True, always=True)
    x = IMAGES[:2].contiguous()
    jacobian: Any = torch.autograd.functional.jacobian
    found = []
    for model in (plain, patched):
        model.train(is_training)
        found.append(jacobian(lambda z, model=model: model(z).sum(0), x, vectorize=True))
    close(found[1], found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("given", [None, 3.0, IMAGES.numpy()])
def test_what_is_no_tensor_is_pytorchs_to_refuse(given: Any, fuses: bool) -> None:
    for own in (nn.Linear(4, 4), nn.Conv2d(4, 4, 3)):
        model = tw.patch(nn.Sequential(own, nn.ReLU()), fuse=fuses, always=True)
        with pytest.raises(TypeError):
            model(given)


class AddsWhatIsGiven(nn.Module):
    """An addition to a convolution's result, one to a container's, and one to a weighed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Parameter(torch.full((8, 1, 1), 0.5)),
        )
        self.container = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor, one: Any, two: Any, three: Any) -> Tensor:
        y = torch.relu(self.conv(x) + one)
        return self.container(y) + two + (self.weight * three + y)


ADDED = {
    "number": 0.5,
    "flag": True,
    "array": torch.ones(2, 8, 5, 5).numpy(),
    "scalar": torch.tensor(2.0),
    "sparse": torch.ones(2, 8, 5, 5).to_sparse(),
    "none": None,
    "word": "x",
    "list": [1.0],
    "elsewhere": torch.ones(2, 8, 5, 5, device="meta"),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__")  # PyTorch's, of arrays
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", ADDED)
def test_anything_may_be_added(name: str, place: int, is_training: bool) -> None:
    """What PyTorch adds is added, and what it refuses is refused."""
    plain = AddsWhatIsGiven().train(is_training)
    patched = tw.patch(copy.deepcopy(plain), fuse=True, always=True)
    x = torch.randn(2, 8, 5, 5)
    usual: list[Any] = [torch.randn(2, 8, 5, 5) for _ in range(3)]
    with torch.no_grad():
        patched(x, *usual)
        given = [ADDED[name] if at == place else one for at, one in enumerate(usual)]
        try:
            wanted = copy.deepcopy(plain)(x, *given)
        except (TypeError, RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                patched(x, *given)
        else:
            close(patched(x, *given), wanted, rtol=1e-3, atol=1e-3)
