"""ResNeXt-50 trained by PyTorch and by tilewise, its chains of layers fused: losses and times.

    python examples/resnext.py [STEPS]

On a GPU the whole network at batch 64, channels-last, autocast to bf16; on a CPU a small one. Both
start from the same weights and see the same images: losses agree within rounding.
"""

from __future__ import annotations

import copy
import sys
import time

import torch
from torch import Tensor, nn

import tilewise as tw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 100
BLOCKS, WIDTH, BATCH, SIDE = (
    ((3, 4, 6, 3), 64, 64, 224) if DEVICE == "cuda" else ((1, 1), 16, 4, 32)
)


class Block(nn.Module):
    """1x1, 3x3 in 32 groups, 1x1, and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 2 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        groups = min(32, width // 4)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or channels != out:
            first = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(first, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = WIDTH
    for stage, count in enumerate(BLOCKS):
        width = 2 * WIDTH << stage
        for at in range(count):
            layers.append(Block(channels, width, 2 if stage and not at else 1))
            channels = 2 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def batch() -> tuple[Tensor, Tensor]:
    """The same images and labels whenever asked."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE).to(memory_format=torch.channels_last)
    return x, torch.randint(CLASSES, (BATCH,), device=DEVICE)


class Trainer:
    """Takes steps with a model, and keeps their losses and times in milliseconds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        with autocast():
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
    torch.backends.cudnn.benchmark = True
    model, (images, labels) = network(), batch()
    plain, patched = Trainer(model), Trainer(tw.patch(copy.deepcopy(model), fuse=True))
    with autocast():
        tw.prepare(patched.model, images)  # compiles in parallel what a step will launch
    for _ in range(steps):  # in turn, so that what else runs here falls on both
        plain.step(images, labels)
        patched.step(images, labels)
    print(tw.layers(patched.model))
    before, after = plain.losses, patched.losses
    for at in range(0, steps, max(1, steps // 10)):
        print(f"step {at:3}: loss {before[at]:.4f} by PyTorch, {after[at]:.4f} by tilewise")
    apart = max(abs(one - other) for one, other in zip(before, after, strict=True)) / before[0]
    print(f"losses are at most {apart:.2%} of the first one apart")
    print(f"{DEVICE}: PyTorch {plain.median_ms:.2f} ms a step, tilewise {patched.median_ms:.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
