"""A small convolutional network, trained for a few steps before and after `tw.patch`.

    python examples/vision_model.py [STEPS]

Runs on whatever device is there, and prints the time of a step, the losses and what serves each
layer. Losses agree within rounding: only the kernels differ.
"""

from __future__ import annotations

import copy
import sys
import time

import torch
from torch import Tensor, nn

import tilewise as tw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES, BATCH, SIDE = 10, 8, 32


def block(channels: int, out: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, 3, stride, padding=1, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        block(3, 32),
        block(32, 64, stride=2),
        block(64, 64, groups=16),
        block(64, 64, groups=64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    ).to(DEVICE, memory_format=torch.channels_last)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    images = torch.randn(count, BATCH, 3, SIDE, SIDE, device=DEVICE)
    labels = torch.randint(CLASSES, (count, BATCH), device=DEVICE)
    return [
        (x.to(memory_format=torch.channels_last), y) for x, y in zip(images, labels, strict=True)
    ]


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[list[float], float]:
    """The losses, and the median time of a step in milliseconds."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses, times = [], []
    for images, labels in data:
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        times.append(1e3 * (time.perf_counter() - start))
    return losses, sorted(times)[len(times) // 2]


def main(steps: int) -> None:
    plain, data = network(), batches(steps)
    patched = copy.deepcopy(plain)
    tw.patch(patched)
    train(copy.deepcopy(patched), data[:2])  # kernels are built on the first step
    before, before_ms = train(plain, data)
    after, after_ms = train(patched, data)
    print(tw.layers(patched))
    print(f"{DEVICE}: PyTorch {before_ms:.2f} ms a step, tilewise {after_ms:.2f} ms")
    apart = max(abs(a - b) for a, b in zip(before, after, strict=True))
    print(
        f"loss {before[0]:.4f} -> {before[-1]:.4f} and {after[-1]:.4f}, at most {apart:.1e} apart"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
