"""Blocks as well-known vision models have them, small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


class Basic(nn.Module):
    """Two 3x3 layers and a shortcut, as ResNet-18 has them."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Inverted(nn.Module):
    """Widened, depthwise, squeezed, narrowed, as EfficientNet has it; the addition is apart."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.block = nn.Sequential(
            layer(channels, wide, 1),
            layer(wide, wide, 3, groups=wide),
            Squeeze(wide),
            layer(wide, channels, 1, activation=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        result += x
        return result


def layer(
    channels: int, out: int, size: int, groups: int = 1, activation: bool = True
) -> nn.Sequential:
    """A convolution, its BatchNorm and SiLU."""
    convolution = nn.Conv2d(channels, out, size, padding=size // 2, groups=groups, bias=False)
    after = [nn.SiLU(inplace=True)] if activation else []
    return nn.Sequential(convolution, nn.BatchNorm2d(out, eps=1e-3, momentum=0.3), *after)


class Squeeze(nn.Module):
    """Channels weighed by what all pixels say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = functional.silu(self.fc1(functional.adaptive_avg_pool2d(x, 1)))
        return torch.sigmoid(self.fc2(scale)) * x


def network() -> nn.Sequential:
    """A stem, both kinds of block, and a head with an MLP."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(Basic(8, 16, 2), Basic(16, 16), Inverted(16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model


def small(*norm: Any, **settings: Any) -> nn.Sequential:
    """A convolution, its BatchNorm and ReLU."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, 3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(6, *norm, **settings), nn.ReLU())
