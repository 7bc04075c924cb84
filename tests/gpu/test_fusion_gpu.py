"""Fused convolutions and chains of layers on a GPU: right, and taken.

PYTHONPATH=src python -m pytest tests/gpu/test_fusion_gpu.py -p no:cacheprovider
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from torch import nn  # noqa: E402

import tilewise as tw  # noqa: E402
from tilewise.dispatch import _dispatcher, default_dispatcher  # noqa: E402
from tilewise.dispatch.remembered import CALLS  # noqa: E402
from tilewise.engines.device import detect  # noqa: E402
from tilewise.torch_ops import convolutions, gated  # noqa: E402
from tilewise.torch_ops.norms import PlainNorm  # noqa: E402

pytestmark = pytest.mark.gpu
functional = torch.nn.functional
BF16 = torch.bfloat16
LAST = torch.channels_last
FAMILIES = {
    "cuda": (
        "im2col",
        "rows",
        "gather",
        "halo",
        "channelwise",
        "depthwise",
        "grouped",
        "stem",
        "taps",
    ),
    "triton": ("implicit", "direct", "packed", "merged"),
}
LAYERS: dict[str, tuple[int, int, int, int, int]] = {
    "dense": (64, 128, 3, 1, 1),
    "1x1": (64, 256, 1, 1, 1),
    "strided": (64, 64, 3, 2, 1),
    "grouped": (128, 128, 3, 1, 32),
    "depthwise": (96, 96, 3, 1, 96),
    "stem": (3, 64, 7, 2, 1),
    "few": (32, 48, 3, 1, 1),
}
"""Channels in and out, size of the filter, stride, groups."""


def near(out: Any, expected: Any, limit: float = 1e-2) -> bool:
    wanted = expected.double()
    return bool((out.double() - wanted).norm() <= limit * wanted.norm())


def _family(kernel: Any) -> tuple[str, str]:
    return kernel.engine, getattr(kernel, "family", "")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets our own convolutions serve, of one family if asked, with or without a model."""
    _dispatcher.cache_clear()
    monkeypatch.setattr(convolutions, "is_known", lambda device: True)

    def choose(engine: str = "", family: str = "") -> bool:
        found = False
        for op in ("conv_fwd", "conv_bwd_data", "conv_bwd_weight"):
            registry = default_dispatcher(op, detect("gpu")).registry
            late = [
                k for k in registry.kernels if _family(k)[1] in ("", "gemm")
            ]  # they add nothing
            registry.declare(late, priority="low")  # these add no residual
            first = [k for k in registry.kernels if _family(k) == (engine, family)]
            registry.declare(first, priority="high")
            found |= op == "conv_fwd" and bool(first)
        CALLS.forget()
        return found

    choose()
    yield choose
    _dispatcher.cache_clear()
    CALLS.forget()


def unfused(*args: Any, **named: Any) -> Any:
    raise AssertionError("what could be fused was done in a pass of its own")


def layer(name: str, dtype: Any = BF16) -> tuple[Any, Any, Any, Any, dict[str, int]]:
    torch.manual_seed(0)
    c, k, size, stride, groups = LAYERS[name]
    x = torch.randn(4, c, 28, 28, device="cuda").to(dtype).to(memory_format=LAST)
    w = torch.randn(k, c // groups, size, size, device="cuda").to(dtype) / size
    side = (28 + 2 * (size // 2) - size) // stride + 1
    residual = torch.randn(4, k, side, side, device="cuda").to(dtype).to(memory_format=LAST)
    bias = torch.randn(k, device="cuda").to(dtype)
    settings = {"stride": stride, "padding": size // 2, "groups": groups}
    return x, w.to(memory_format=LAST), bias, residual, settings


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_epilogues_are_fused(
    name: str, activation: str | None, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_finish", unfused)
    monkeypatch.setattr(convolutions, "torch_convolution", unfused)
    x, w, bias, residual, settings = layer(name)
    after = getattr(functional, activation) if activation else lambda z: z
    wide = functional.conv2d(x.double(), w.double(), bias.double(), **settings)
    for added in (None, residual):
        expected = after(wide if added is None else wide + added.double())
        for _ in range(2):
            out = tw.conv2d(x, w, bias, **settings, activation=activation, residual=added)
            assert near(out, expected)


@pytest.mark.parametrize(("engine", "family"), [(e, f) for e in FAMILIES for f in FAMILIES[e]])
def test_sums_of_every_family(engine: str, family: str, ours: Any) -> None:
    if not ours(engine, family):
        pytest.skip(f"no {family} kernels here")
    for name in LAYERS:
        x, w, _, _, settings = layer(name)
        sizes = ((settings["stride"],) * 2, (settings["padding"],) * 2, (1, 1), settings["groups"])
        sums = torch.full((2, w.shape[0]), float("nan"), device="cuda")
        for _ in range(2):
            z = convolutions.convolution_with_sums(x, w, sums, sizes).double()
            assert near(sums[0], z.sum((0, 2, 3)), 1e-3)
            assert near(sums[1], z.square().sum((0, 2, 3)), 1e-4)


class Block(nn.Module):
    """As ResNeXt and EfficientNet have them."""

    def __init__(self, channels: int, groups: int, act: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.act, self.relu = act(), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        out = self.act(self.bn1(self.conv1(x)))
        out = self.act(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        return self.relu(out)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
        *(Block(64, 16, nn.ReLU), Block(64, 64, nn.SiLU)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)),
    )
    return model.cuda().to(memory_format=LAST)


def images(count: int = 8) -> Any:
    torch.manual_seed(1)
    return torch.randn(count, 3, 64, 64, device="cuda").to(memory_format=LAST)


def nodes(result: Any) -> list[str]:
    seen, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [other for other, _ in node.next_functions]
    return [node.name() for node in seen]


def steps(model: nn.Module, x: Any, cast: bool, count: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cuda", BF16, enabled=cast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.buffers(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_training(cast: bool, always: bool, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainNorm, "forward", unfused)
    plain, patched = network(), tw.patch(network(), fuse=True, always=always)
    with torch.autocast("cuda", BF16, enabled=cast):
        found = nodes(patched(images()))
        plain(images())
    assert found.count("_TrainedBackward") == 7
    assert not any("BatchNorm" in name for name in found)
    limit = 5e-2 if cast else 5e-3
    for one, other in zip(
        steps(patched, images(), cast), steps(plain, images(), cast), strict=True
    ):
        assert one.dtype == other.dtype
        assert near(one, other, limit) or float((one - other).abs().max()) < limit


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_inference(dtype: Any, always: bool, ours: Any) -> None:
    model = network()
    steps(model, images(), False)
    model = model.eval().to(dtype)
    patched = tw.patch(copy.deepcopy(model), fuse=True, always=always)
    for norm in (m for m in patched.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.forward = unfused  # type: ignore[method-assign]
    x = images().to(dtype)
    with torch.no_grad():
        for _ in range(2):
            assert near(patched(x), model(x), 2e-2 if dtype is BF16 else 2e-3)


def test_graphs_of_fused_models(ours: Any) -> None:
    model = network()
    patched = tw.patch(copy.deepcopy(model), fuse=True, always=True)
    x = images()
    for one, task in ((patched.eval(), "inference"), (patched, "training")):
        one.train(task == "training")
        model.train(task == "training")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.set_grad_enabled(task == "training"):
            for _ in range(2):
                result = one(x)
                if task == "training":
                    result.square().mean().backward()
        del result  # which keeps nodes of that stream alive
        torch.cuda.current_stream().wait_stream(stream)
        for parameter in one.parameters():
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.set_grad_enabled(task == "training"):
            result = one(x)
            if task == "training":
                result.square().mean().backward()
        x.copy_(images() * 0.5)
        graph.replay()
        with torch.no_grad():
            assert near(result, model(x), 1e-2)


def test_memory_is_not_more_than_pytorchs(ours: Any) -> None:
    peaks = []
    for model in (network(), tw.patch(network(), fuse=True)):
        x = images(64)
        for _ in range(2):  # the first one builds
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", BF16):
                loss = model(x).float().square().mean()
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            model.zero_grad(set_to_none=True)
            del loss
        peaks.append(peak)
    assert peaks[1] <= 1.05 * peaks[0]


def test_channels_first_models_stay_as_they_are() -> None:
    patched = tw.patch(network().to(memory_format=torch.contiguous_format), fuse=True)
    found = nodes(patched(images().contiguous()))
    assert "_TrainedBackward" not in found


def test_chains_are_kept_apart_from_each_other() -> None:
    """Two models of one class share no folded weights."""
    one, two = (tw.patch(network().eval(), fuse=True) for _ in range(2))
    with torch.no_grad():
        two[0].weight.mul_(0.5)
        first, second = one(images()), two(images())
        assert not torch.allclose(first, second)
        assert near(one(images()), first)


@torch.fx.wrap
def stochastic_depth(x: Any, p: float, mode: str, training: bool = True) -> Any:
    if not training:
        return x
    kept = torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    return x * kept.div_(1 - p)


class Depth(nn.Module):
    def forward(self, x: Any) -> Any:
        return stochastic_depth(x, 0.3, "row", self.training)


class ConvNext(nn.Module):
    """As torchvision has it, wide enough for passes to be worth their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(96, 96, 7, padding=3, groups=96), nn.Conv2d(96, 96, 1))
        self.layer_scale = nn.Parameter(torch.linspace(-1, 2, 96).reshape(-1, 1, 1))
        self.stochastic_depth = Depth()

    def forward(self, x: Any) -> Any:
        result = self.layer_scale * self.block(x)
        result = self.stochastic_depth(result)
        result += x
        return result


class Gate(nn.Module):
    """A gated MLP, then a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(512, 2048, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(2048, 512, bias=False), nn.SiLU()
        self.plain = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x: Any) -> Any:
        return self.plain(x + self.down(self.act(self.gate(x)) * self.up(x)))


PASSES: dict[str, tuple[Any, tuple[int, ...], set[str]]] = {
    "ConvNeXt": (ConvNext, (32, 96, 56, 56), {"_WeighedBackward"}),
    "MLP": (Gate, (8, 1024, 512), {"_GatedBackward", "_ActivatedBackward"}),
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", list(PASSES))
def test_passes_between_layers(name: str, cast: bool) -> None:
    """One node of autograd for each, the same results, and no more memory than PyTorch's."""
    kind, shape, wanted = PASSES[name]
    torch.manual_seed(0)
    plain = kind().cuda()
    patched = tw.patch(copy.deepcopy(plain), fuse=True)
    x = torch.randn(shape, device="cuda")
    x = x.to(memory_format=LAST) if x.dim() == 4 else x
    found, peaks = [], []
    for model in (plain, patched):
        for _ in range(2):  # the first one builds
            torch.manual_seed(1)
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", BF16, enabled=cast):
                result = model(x)
            kinds = set(nodes(result))
            result.float().square().mean().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([result.detach(), *(p.grad for p in model.parameters())])
    assert wanted <= kinds
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == theirs.dtype
        assert near(ours, theirs, 3e-2 if cast else 5e-3)
    assert peaks[3] <= 1.05 * peaks[1]


@pytest.mark.parametrize("tokens", [1, 50, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_a_gated_mlp_in_one_kernel(
    tokens: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Gate().cuda().to(dtype).eval()
    patched = tw.patch(copy.deepcopy(plain), fuse=True, always=True)
    monkeypatch.setattr(gated.Gated, "__call__", unfused)
    x = torch.randn(1, tokens, 512, device="cuda", dtype=dtype)
    with torch.no_grad():
        assert near(patched(x), plain(x), 5e-3 if dtype is torch.float32 else 2e-2)
