"""Fused models whose passes over results are our Triton kernels, run by Triton's interpreter.

Run with TRITON_INTERPRET=1. A JSON line for every result, gradient and buffer of training steps
and of inference, against PyTorch's own; convolutions are PyTorch's on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from interpreted import run
from torch import Tensor, nn

import tilewise as tw
from tilewise.core.arch import load_arch
from tilewise.torch_ops import fused, norms, weighed

LAUNCHED: list[str] = []


class Interpreted:
    """A launch that the interpreter runs."""

    def __init__(self, launch: Any, arch: Any, name: str, order: Any) -> None:
        self._launch, self._name, self._order = launch, name, order

    def launcher(self) -> Callable[..., None]:
        def start(*tensors: Tensor) -> None:
            LAUNCHED.append(self._name)
            flat = [t.permute(0, 2, 3, 1).reshape(-1) if t.dim() == 4 else t for t in tensors]
            for given, seen in zip(tensors, flat, strict=True):
                assert given.data_ptr() == seen.data_ptr(), "a copy would be written to"
            run(self._launch, dict(zip(self._order, flat, strict=True)))

        return start


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


def model(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 12, 3, stride=2, bias=False), nn.BatchNorm2d(12, **settings), nn.ReLU())
    made = nn.Sequential(*stem, Block(12, settings), Weighed(12), nn.AdaptiveAvgPool2d(1))
    return made.to(memory_format=torch.channels_last)


def found(made: nn.Module, x: Tensor) -> dict[str, Tensor]:
    results = {}
    for step in range(2):
        y = made(x)
        y.square().sum().backward()
        results[f"training {step}"] = y.detach()
    results |= {f"gradient of {n}": p.grad for n, p in made.named_parameters()}  # type: ignore[misc]
    results |= {n: b.clone().double() for n, b in made.named_buffers()}
    made.eval()
    with torch.no_grad():
        results["inference"] = made(x)
        made[4].weights.mul_(3)  # type: ignore[operator]
        results["inference with other weights"] = made(x)
    return results


def main() -> None:
    arch = load_arch("sm_90").with_figures(compute_units=2)
    norms.BoundLaunch = Interpreted  # type: ignore[misc,assignment]
    norms.live_arch = lambda tensor: arch  # type: ignore[assignment]
    for module in (norms, fused, weighed):
        module.why_no_kernels = lambda device: None  # type: ignore[assignment]
    torch.cuda.device = lambda index: nullcontext()  # type: ignore[misc,assignment]
    weighings: list[int] = []
    weigh = norms.TritonNorm.weigh

    def weighing(self: Any, z: Tensor, *rest: Tensor) -> Tensor:
        weighings.append(z.shape[1])
        return weigh(self, z, *rest)

    norms.TritonNorm.weigh = weighing  # type: ignore[method-assign]
    x = torch.randn(2, 3, 11, 9).to(memory_format=torch.channels_last)
    for settings in ({}, {"affine": False}, {"track_running_stats": False, "eps": 1e-2}):
        LAUNCHED.clear()
        weighings.clear()
        ours = found(tw.patch(model(settings), fuse=True), x)
        launched = sorted(set(LAUNCHED))
        assert weighings == [12, 12], "a weighed branch was not one pass"
        for name, expected in found(model(settings), x).items():
            apart = float((ours[name] - expected).abs().max() / expected.abs().max())
            print(json.dumps({"case": name, "error": apart, "launched": launched}))


if __name__ == "__main__":
    main()
