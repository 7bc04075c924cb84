"""Models that users run, what they are fed with, and small stand-ins for trying a benchmark out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TASKS = ("inference", "training")
VISION = ("resnext50_32x4d", "convnext_tiny", "efficientnet_b0", "resnet50", "vit_b_16")
"""As torchvision has them; the most telling come first."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what it is fed with."""

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    """One input without the batch: channels and pixels, or tokens and their size."""
    tasks: tuple[str, ...] = TASKS
    batches: tuple[int, ...] = ()
    """Its own, where nobody else's mean anything to it."""

    @property
    def layout(self) -> torch.memory_format:
        known = {3: torch.channels_last, 4: torch.channels_last_3d}
        return known.get(len(self.sample), torch.contiguous_format)

    def feed(self, batch: int, device: str) -> Tensor:
        return torch.randn(batch, *self.sample, device=device).to(memory_format=self.layout)


def cases(tiny: bool) -> list[Case]:
    """All of them, or stand-ins that a CPU runs in moments."""
    size = 32 if tiny else 224
    vision = [Case(name=n, build=_vision(n, tiny), sample=(3, size, size)) for n in VISION]
    hidden = 64 if tiny else 4096
    llamas: dict[str, tuple[int, tuple[int, ...], tuple[str, ...]]] = {
        "llama_decode": (1, (1, 16, 64), ("inference",)),
        "llama_prefill": (8 if tiny else 2048, (1,), TASKS),
    }
    return [
        *vision,
        Case(
            name="video_decoder",
            build=lambda: video_decoder(32 if tiny else 384),
            sample=(16, 3, 8, 8) if tiny else (16, 9, 60, 60),
            tasks=("inference",),
            batches=(1,),
        ),
        Case(
            name="unet_block",
            build=lambda: unet_block(32 if tiny else 320),
            sample=(32, 8, 8) if tiny else (320, 64, 64),
            batches=(8,),
        ),
        *(
            Case(
                name=name,
                build=lambda: llama(hidden=hidden, inner=hidden * 7 // 2, heads=hidden // 128 or 1),
                sample=(tokens, hidden),
                tasks=tasks,
                batches=batches,
            )
            for name, (tokens, batches, tasks) in llamas.items()
        ),
    ]


def _vision(name: str, tiny: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        made: nn.Module = getattr(torchvision.models, name)(weights=None)
        return made

    return TINY[name] if tiny else build


class Llama(nn.Module):
    """A layer of Llama's shape: grouped attention, gated MLP, RMS norms."""

    def __init__(self, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.size, self.shared = hidden // heads, max(1, heads // 4)
        self.sizes = [hidden, self.shared * self.size, self.shared * self.size]
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.before, self.after = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (t.view(batch, tokens, -1, self.size).transpose(1, 2) for t in parts)
        seen = functional.scaled_dot_product_attention(
            q, k, v, is_causal=tokens > 1, enable_gqa=True
        )
        return self.out(seen.transpose(1, 2).reshape(batch, tokens, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def llama(hidden: int, inner: int, heads: int, layers: int = 4) -> nn.Module:
    return nn.Sequential(*(Llama(hidden, inner, heads) for _ in range(layers)))


class Residual(nn.Module):
    """Group norms, two 3x3 layers and a shortcut, as image diffusion models have them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.second = nn.Sequential(
            nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(self.first(x))


def unet_block(channels: int) -> nn.Module:
    return nn.Sequential(Residual(channels, 2 * channels), Residual(2 * channels, 2 * channels))


class Causal(nn.Module):
    """A 3x3x3 layer that sees no later frame."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, out, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x, (0, 0, 0, 0, 2, 0)))


class Frames(nn.Module):
    """A residual block over frames."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.SiLU(), Causal(channels, out), nn.SiLU(), Causal(out, out))
        self.shortcut = nn.Conv3d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


def video_decoder(channels: int) -> nn.Module:
    """The causal 3-D decoder of a video autoencoder."""
    up = [nn.Upsample(scale_factor=(1, 2, 2), mode="nearest") for _ in range(2)]
    half, quarter = channels // 2, channels // 4
    return nn.Sequential(
        *(Causal(16, channels), Frames(channels, channels), up[0]),
        *(Frames(channels, half), up[1], Frames(half, quarter)),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 in groups, 1x1 and a shortcut, as ResNet-50 and ResNeXt have them."""

    def __init__(self, channels: int, inner: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, groups=groups, bias=False)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += x
        return self.relu(out)


@torch.fx.wrap
def stochastic_depth(x: Tensor, rate: float, mode: str, training: bool = True) -> Tensor:
    """As torchvision has it: factors of whole samples, with kept ones weighing more."""
    if not training:
        return x
    sides = (len(x), *[1] * (x.dim() - 1))
    kept = torch.empty(sides, device=x.device, dtype=x.dtype).bernoulli_(1 - rate)
    return x * kept.div_(1 - rate)


class Kept(nn.Module):
    """Some branches are left out in training, whole samples at once; all are kept otherwise."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return stochastic_depth(x, self.rate, "row", self.training)


class Swapped(nn.Module):
    """Dimensions in another order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class ConvNext(nn.Module):
    """Depthwise 7x7, LayerNorm, an MLP over channels and a scale, as ConvNeXt has them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Swapped(0, 2, 3, 1),
            nn.LayerNorm(channels, eps=1e-6),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            Swapped(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))
        self.stochastic_depth = Kept()

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer_scale * self.block(x)
        result = self.stochastic_depth(result)
        result += x
        return result


class Squeeze(nn.Module):
    """Channels weighed by what all pixels say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.activation, self.scale = nn.SiLU(inplace=True), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.fc2(self.activation(self.fc1(self.pool(x))))) * x


def convolved(channels: int, out: int, size: int, groups: int = 1, after: bool = True) -> nn.Module:
    conv = nn.Conv2d(channels, out, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), *([nn.SiLU(inplace=True)] if after else []))


class Inverted(nn.Module):
    """Widened, depthwise, squeezed, narrowed and added, as EfficientNet has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.block = nn.Sequential(
            convolved(channels, wide, 1),
            convolved(wide, wide, 3, groups=wide),
            Squeeze(wide),
            convolved(wide, channels, 1, after=False),
        )
        self.stochastic_depth = Kept()

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        result = self.stochastic_depth(result)
        result += x
        return result


class Encoder(nn.Module):
    """Attention and an MLP over tokens, as ViT has them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attention = nn.MultiheadAttention(hidden, 2, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.mlp = nn.Sequential(
            *(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Dropout(0.0)),
            *(nn.Linear(4 * hidden, hidden), nn.Dropout(0.0)),
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torchvision's name
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + input
        return x + self.mlp(self.ln_2(x))


class Patches(nn.Module):
    """An image as tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, hidden, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


def _network(*blocks: nn.Module, stem: nn.Module, channels: int) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, 10))
    return nn.Sequential(stem, *blocks, *head)


TINY: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: _network(
        Bottleneck(32, 16, 1), Bottleneck(32, 16, 1), stem=convolved(3, 32, 3), channels=32
    ),
    "resnext50_32x4d": lambda: _network(
        Bottleneck(32, 16, 4), Bottleneck(32, 16, 4), stem=convolved(3, 32, 3), channels=32
    ),
    "convnext_tiny": lambda: _network(
        ConvNext(16), ConvNext(16), stem=nn.Conv2d(3, 16, 4, 4), channels=16
    ),
    "efficientnet_b0": lambda: _network(
        Inverted(16), Inverted(16), stem=convolved(3, 16, 3), channels=16
    ),
    "vit_b_16": lambda: nn.Sequential(Patches(32), Encoder(32), Encoder(32), nn.Linear(32, 10)),
}
"""What torchvision's models are made of, small."""
