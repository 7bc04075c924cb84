"""Whatever is changed, exchanged, watched, copied or compiled: a fused model follows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from residual_blocks import IMAGES, network, small
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import InputError
from tilewise.torch_ops.chains import is_fused

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


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
