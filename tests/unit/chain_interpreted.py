"""Fused models whose passes over results are our Triton kernels, run by Triton's interpreter.

Run with TRITON_INTERPRET=1. A JSON line for every result, gradient and buffer of training steps
and of inference, against PyTorch's own; convolutions are PyTorch's on both sides.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from interpreted import run
from torch import Tensor, nn

import tilewise as tw
from tilewise.core.arch import load_arch
from tilewise.torch_ops import fused, gated, launching, layers, norms, weighed

LAUNCHED: list[str] = []


class Interpreted:
    """A launch that the interpreter runs."""

    def __init__(self, launch: Any, arch: Any, name: str, order: Any) -> None:
        self._launch, self._name, self._order = launch, name, order

    def launcher(self) -> Callable[..., None]:
        def start(*tensors: Tensor) -> None:
            LAUNCHED.append(self._name)
            flat = [t.permute(0, 2, 3, 1).reshape(-1) if _is_image(t) else t for t in tensors]
            for given, seen in zip(tensors, flat, strict=True):
                assert given.data_ptr() == seen.data_ptr(), "a copy would be written to"
            run(self._launch, dict(zip(self._order, flat, strict=True)))

        return start


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.shape[1] > 1


class Block(nn.Module):
    def __init__(self, channels: int, settings: dict[str, Any]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels, **settings)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, **settings)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


class Weighed(nn.Module):
    """A branch times a weight of each channel, added to what it comes from."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Tanh())
        self.weights = nn.Parameter(torch.linspace(-1, 2, channels).reshape(-1, 1, 1))
        self.drop = nn.Dropout2d(0.0)

    def forward(self, x: Tensor) -> Tensor:
        result = self.drop(self.weights * self.branch(x))
        result += x
        return result


@torch.fx.wrap
def stochastic_depth(x: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    """As torchvision has it: samples are dropped, and those kept weigh more."""
    if not training or p == 0.0:
        return x
    noise = torch.empty([x.shape[0], *[1] * (x.ndim - 1)], dtype=x.dtype).bernoulli_(1 - p)
    return x * noise.div_(1 - p)


class Depth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return stochastic_depth(x, 0.4, "row", self.training)


class ConvNext(nn.Module):
    """As torchvision has it, with a branch in bf16 under autocast."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Tanh())
        self.layer_scale = nn.Parameter(torch.linspace(-1, 2, channels).reshape(-1, 1, 1))
        self.stochastic_depth = Depth()

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer_scale * self.block(x)
        result = self.stochastic_depth(result)
        result += x
        return result


class Mlp(nn.Module):
    """Linear layers with GELU between them, then a gated MLP, over tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(hidden, 40), nn.GELU(), nn.Linear(40, hidden))
        self.gate, self.up = (nn.Linear(hidden, 48, bias=False) for _ in range(2))
        self.both, self.down = nn.Linear(hidden, 64), nn.Linear(80, hidden)
        self.act = nn.SiLU()
        self.scale = nn.Parameter(torch.linspace(-1, 2, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.wide(x)
        gate, up = self.both(x).chunk(2, dim=-1)
        both = torch.cat((self.act(self.gate(x)) * self.up(x), up * nn.functional.gelu(gate)), -1)
        return x + self.down(both)


def model(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 12, 3, stride=2, bias=False), nn.BatchNorm2d(12, **settings), nn.ReLU())
    made = nn.Sequential(*stem, Block(12, settings), Weighed(12), nn.AdaptiveAvgPool2d(1))
    return made.to(memory_format=torch.channels_last)


def found(made: nn.Module, x: Tensor, cast: bool = False) -> dict[str, Tensor]:
    results = {}
    torch.manual_seed(7)  # what a step draws, both sides draw
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = made(x)
        y.square().sum().backward()
        results[f"training {step}"] = y.detach()
    results |= {f"gradient of {n}": p.grad for n, p in made.named_parameters()}  # type: ignore[misc]
    results |= {n: b.clone().double() for n, b in made.named_buffers()}
    made.eval()
    with torch.no_grad():
        results["inference"] = made(x)
        for name, parameter in made.named_parameters():
            if name.endswith(("weights", "scale")):
                parameter.mul_(3)
        results["inference with other weights"] = made(x)
    return results


def interpret() -> None:
    """Lets the interpreter run all launches, and all passes be worth it."""
    arch = load_arch("sm_90").with_figures(compute_units=2)
    launching.BoundLaunch = Interpreted  # type: ignore[misc,assignment]
    launching.live_arch = layers.live_arch = lambda tensor: arch  # type: ignore[assignment]
    layers.CALL_US["pass"] = (0.0, 0.0)
    for module in (norms, fused, weighed, gated):
        module.why_no_kernels = lambda device: None  # type: ignore[attr-defined]
    torch.cuda.device = lambda index: nullcontext()  # type: ignore[misc,assignment]


def convolutions() -> Iterator[tuple[str, Callable[[], nn.Module], Tensor, bool]]:
    x = torch.randn(2, 3, 11, 9).to(memory_format=torch.channels_last)
    for settings in ({}, {"affine": False}, {"track_running_stats": False, "eps": 1e-2}):
        yield "convolutions", lambda settings=settings: model(settings), x, False


def others() -> Iterator[tuple[str, Callable[[], nn.Module], Tensor, bool]]:
    def make(kind: type[nn.Module], size: int) -> nn.Module:
        torch.manual_seed(0)
        return kind(size).to(memory_format=torch.channels_last)

    images = torch.randn(5, 12, 7, 9).to(memory_format=torch.channels_last)
    tokens = torch.randn(3, 7, 24)
    for cast in (False, True):
        yield "ConvNeXt", lambda: make(ConvNext, 12), images, cast
        yield "MLP", lambda: make(Mlp, 24), tokens, cast


def asked_always() -> None:
    """A gated MLP in one kernel, or in two products and a pass where somebody looks at a layer."""
    torch.manual_seed(0)
    plain, x = Mlp(24).eval(), torch.randn(3, 7, 24)
    patched = tw.patch(deepcopy(plain), fuse=True)
    for layer in (patched.gate, patched.up):
        layer.__dict__[layers.ALWAYS] = True
    for is_watched in (False, True):
        if is_watched:
            patched.up.register_forward_hook(lambda *_: None)
        LAUNCHED.clear()
        with torch.no_grad():
            expected, ours = plain(x), patched(x)
        apart = float((ours - expected).abs().max() / expected.abs().max())
        row = {"model": "always", "case": f"{is_watched}", "error": apart, "cast": False}
        print(json.dumps({**row, "launched": dict(Counter(LAUNCHED)), "same": True}))


def twice() -> None:
    """Gradients of gradients are refused, as PyTorch's own nodes of one derivative do."""
    model = tw.patch(Mlp(24), fuse=True)
    x = torch.randn(2, 3, 24, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    try:
        dx.sum().backward()
        refused = False
    except RuntimeError as error:
        refused = "once_differentiable" in str(error)
    row = {"model": "twice", "case": "", "error": 1.0 - refused, "cast": False, "same": True}
    print(json.dumps({**row, "launched": {}}))


def main() -> None:
    interpret()
    asked_always()
    twice()
    for name, make, x, cast in (*convolutions(), *others()):
        LAUNCHED.clear()
        ours = found(tw.patch(make(), fuse=True), x, cast)
        launched = dict(Counter(LAUNCHED))
        for what, expected in found(make(), x, cast).items():
            apart = float((ours[what] - expected).abs().max() / expected.abs().max())
            row = {"model": name, "case": what, "error": apart, "launched": launched}
            print(json.dumps({**row, "cast": cast, "same": ours[what].dtype == expected.dtype}))


if __name__ == "__main__":
    main()
