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


class Trainer:
    """Takes steps with a model, and keeps their losses and times in milliseconds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.times.append(1e3 * (time.perf_counter() - start))

    @property
    def median_ms(self) -> float:
        return sorted(self.times)[len(self.times) // 2]


def main(steps: int) -> None:
    model, data = network(), batches(steps)
    Trainer(tw.patch(copy.deepcopy(model))).step(*data[0])  # builds kernels
    plain, patched = Trainer(model), Trainer(tw.patch(copy.deepcopy(model)))
    for images, labels in data:  # in turn, so that what else runs here falls on both
        plain.step(images, labels)
        patched.step(images, labels)
    print(tw.layers(patched.model))
    print(f"{DEVICE}: PyTorch {plain.median_ms:.2f} ms a step, tilewise {patched.median_ms:.2f} ms")
    before, after = plain.losses, patched.losses
    apart = max(abs(a - b) for a, b in zip(before, after, strict=True))
    print(
        f"loss {before[0]:.4f} -> {before[-1]:.4f} and {after[-1]:.4f}, at most {apart:.1e} apart"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
