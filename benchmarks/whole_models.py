#!/usr/bin/env python3
"""Whole models, PyTorch's own against patched ones: what a user feels.

usage: python benchmarks/whole_models.py [--only TEXT] [--modes eager,graph,compile,max-autotune]
                                         [--batch 64,256] [--tasks inference,training]
                                         [--sides patched,fused,always] [--layers] [--json]

Each model runs several times in one process, in turns: as PyTorch made it, after `tilewise.patch`
(`patched`), and after `tilewise.patch(fuse=True)` (`fused`); `always` is fused with tilewise
serving whatever it can. Vision models are channels-last in bf16 (training: autocast with fp32
weights). The ratio is PyTorch's time over ours. Beside it: the first step (start-up), peak memory
beyond the weights, and how far results are apart. `--layers` tells who serves each layer.

Vision models, inference and training, plain, patched and fused:
    python benchmarks/whole_models.py --modes eager,graph --batch 64,256
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

ROUNDS, STEPS = 6, 5
MODES = ("eager", "graph", "compile", "max-autotune")
TASKS = ("inference", "training")
SIDES: dict[str, dict[str, bool]] = {
    "patched": {},
    "fused": {"fuse": True},
    "always": {"fuse": True, "always": True},
}
"""What `tilewise.patch` is told."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what it is fed with."""

    name: str
    build: Callable[[], Any]
    feed: Callable[[int], tuple[Any, ...]]
    tasks: tuple[str, ...] = TASKS
    batches: tuple[int, ...] = ()
    """Its own, where `--batch` means nothing to it."""
    is_image: bool = True


@dataclass(kw_only=True)
class Times:
    """Of one side."""

    ms: float
    first_s: float
    memory_gb: float
    ratio: float = 1.0
    """PyTorch's time over this one's."""
    spread: float = 0.0
    """Of the ratio from round to round, relatively."""
    apart: float = 0.0
    """Largest difference of results over the largest result."""


@dataclass(kw_only=True)
class Row:
    model: str
    task: str
    mode: str
    batch: int
    torch: Times | None = None
    sides: dict[str, Times] = field(default_factory=dict)
    failed: str = ""


def images(batch: int) -> tuple[Any, ...]:
    import torch

    x = torch.randn(batch, 3, 224, 224, device="cuda")
    return (x.to(memory_format=torch.channels_last),)


def vision(name: str) -> Case:
    def build() -> Any:
        import torchvision

        return getattr(torchvision.models, name)(weights=None)

    return Case(name=name, build=build, feed=images)


def llama(layers: int = 4, hidden: int = 4096, inner: int = 14336, heads: int = 32) -> Any:
    """A decoder of Llama's shape: grouped attention over a cache, gated MLP, RMS norms."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size = hidden // heads
            self.qkv = nn.Linear(hidden, hidden + 2 * 8 * self.size, bias=False)
            self.out = nn.Linear(hidden, hidden, bias=False)
            self.gate = nn.Linear(hidden, inner, bias=False)
            self.up = nn.Linear(hidden, inner, bias=False)
            self.down = nn.Linear(inner, hidden, bias=False)
            self.before, self.after = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.qkv(self.before(x)).split([hidden, 8 * self.size, 8 * self.size], -1)
            q, k, v = (t.view(batch, tokens, -1, self.size).transpose(1, 2) for t in (q, k, v))
            seen = functional.scaled_dot_product_attention(
                q, k, v, is_causal=tokens > 1, enable_gqa=True
            )
            x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, hidden))
            y = self.after(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    return nn.Sequential(*(Layer() for _ in range(layers)))


def unet_block() -> Any:
    """A residual block of an image diffusion model: group norms, two 3x3 layers, a shortcut."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int, out: int) -> None:
            super().__init__()
            self.first = nn.Sequential(
                nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
            )
            self.second = nn.Sequential(
                nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
            )
            self.shortcut = nn.Conv2d(channels, out, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shortcut(x) + self.second(self.first(x))

    return nn.Sequential(Block(320, 640), Block(640, 640))


def video_decoder() -> Any:
    """The causal 3-D decoder of a video autoencoder: 3x3x3 layers that see no later frame."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Causal(nn.Conv3d):
        def __init__(self, channels: int, out: int) -> None:
            super().__init__(channels, out, 3, padding=(0, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(functional.pad(x, (0, 0, 0, 0, 2, 0)))

    class Block(nn.Module):
        def __init__(self, channels: int, out: int) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.SiLU(), Causal(channels, out), nn.SiLU(), Causal(out, out))
            self.shortcut = nn.Conv3d(channels, out, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shortcut(x) + self.body(x)

    up = [nn.Upsample(scale_factor=(1, 2, 2), mode="nearest") for _ in range(2)]
    return nn.Sequential(
        Causal(16, 384), Block(384, 384), up[0], Block(384, 192), up[1], Block(192, 96)
    )


def cases() -> list[Case]:
    def tokens(count: int) -> Callable[[int], tuple[Any, ...]]:
        import torch

        return lambda batch: (torch.randn(batch, count, 4096, device="cuda", dtype=torch.bfloat16),)

    def features(*shape: int) -> Callable[[int], tuple[Any, ...]]:
        import torch

        layout = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
        return lambda batch: (torch.randn(batch, *shape, device="cuda").to(memory_format=layout),)

    names = ("resnet50", "resnext50_32x4d", "convnext_tiny", "efficientnet_b0", "vit_b_16")
    only = ("inference",)
    return [
        *map(vision, names),
        Case(name="unet_block", build=unet_block, feed=features(320, 64, 64), batches=(8,)),
        Case(
            name="video_decoder", build=video_decoder, feed=features(16, 9, 60, 60),
            tasks=only, batches=(1,),
        ),
        Case(
            name="llama_decode", build=llama, feed=tokens(1), tasks=only, batches=(1, 16, 64),
            is_image=False,
        ),
        Case(
            name="llama_prefill", build=llama, feed=tokens(2048), tasks=only, batches=(1,),
            is_image=False,
        ),
    ]  # fmt: skip


def stepper(model: Any, case: Case, task: str, mode: str) -> Callable[..., Any]:
    """One step of the model as users write it; gives the result, or the loss."""
    import torch

    compiled = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode)
    run = torch.compile(model, mode=compiled) if compiled else model
    if task == "inference":

        def infer(*inputs: Any) -> Any:
            with torch.no_grad():
                return run(*inputs)

        return infer
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def train(*inputs: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(*inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


class Side:
    """PyTorch's model or ours, ready to be timed."""

    def __init__(self, model: Any, case: Case, task: str, mode: str, inputs: Any) -> None:
        import torch

        self.inputs = inputs
        step = stepper(model, case, task, mode)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        self.result = step(*inputs).float().clone()
        torch.cuda.synchronize()
        self.first_s = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(*inputs)
        torch.cuda.synchronize()
        self.memory_gb = (torch.cuda.max_memory_allocated() - before) / 1e9
        self.call: Callable[[], Any] = lambda: step(*inputs)
        if mode == "graph":
            self.call = self._captured()

    def _captured(self) -> Callable[[], Any]:
        import torch

        step = self.call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay: Callable[[], Any] = graph.replay
        return replay

    def time_ms(self) -> float:
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.call()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / STEPS


def run(case: Case, task: str, mode: str, batch: int, names: Sequence[str], tell: bool) -> Row:
    import torch

    import tilewise

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch._dynamo.reset()
    model = case.build().cuda()
    if case.is_image:
        layout = torch.channels_last_3d if case.name == "video_decoder" else torch.channels_last
        model = model.to(memory_format=layout)
    model = model.train() if task == "training" else model.eval().to(torch.bfloat16)
    inputs = case.feed(batch)
    if task == "inference":
        inputs = tuple(x.to(torch.bfloat16) for x in inputs)
    models = [model, *(tilewise.patch(deepcopy(model), **SIDES[name]) for name in names)]
    sides = []
    for one in models:
        if mode == "compile":  # a side compiles when it is made
            tilewise.choose_in_compile(one is not model)
        sides.append(Side(one, case, task, mode, inputs))
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(ROUNDS):
        order = range(len(sides))
        for index in order if turn % 2 == 0 else reversed(order):
            times[index].append(sides[index].time_ms())
    if tell:
        print(tilewise.layers(models[-1]), file=sys.stderr)
    taken = zip(sides, times, strict=True)
    first, *rest = (compared(side, of_side, sides[0], times[0]) for side, of_side in taken)
    row = Row(model=case.name, task=task, mode=mode, batch=batch, torch=first)
    row.sides = dict(zip(names, rest, strict=True))
    return row


def compared(side: Side, taken: list[float], plain: Side, plainly: list[float]) -> Times:
    """One side's figures beside PyTorch's."""
    ratios = sorted(a / b for a, b in zip(plainly, taken, strict=True))
    middle = statistics.median(ratios)
    largest = plain.result.abs().max().clamp(min=1e-30)
    return Times(
        ms=statistics.median(taken),
        first_s=side.first_s,
        memory_gb=side.memory_gb,
        ratio=middle,
        spread=(ratios[-1] - ratios[0]) / middle,
        apart=float((side.result - plain.result).abs().max() / largest),
    )


def shown(row: Row) -> str:
    name = f"{row.model:16} {row.task:9} {row.mode:12} {row.batch:4}"
    if row.failed or row.torch is None:
        return f"{name}  failed: {row.failed}"
    head = (
        f"{name}  PyTorch {row.torch.ms:8.2f} ms  first {row.torch.first_s:5.1f} s  "
        f"memory {row.torch.memory_gb:5.1f} GB"
    )
    lines = [
        f"{'':44}  {side:7} {t.ms:8.2f} ms  first {t.first_s:5.1f} s  memory {t.memory_gb:5.1f} GB"
        f"  {t.ratio:6.3f} +-{t.spread:5.1%}  apart {t.apart:.1e}"
        for side, t in row.sides.items()
    ]
    return "\n".join((head, *lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--modes", default="eager,graph,compile")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--batch", default="64", help="images of a step, several by commas")
    parser.add_argument("--sides", default="patched,fused", help="what stands beside PyTorch's")
    parser.add_argument("--layers", action="store_true", help="who serves each, of the last side")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    modes, tasks, sides = (text.split(",") for text in (args.modes, args.tasks, args.sides))
    asked = (("--modes", modes, MODES), ("--tasks", tasks, TASKS), ("--sides", sides, tuple(SIDES)))
    for what, given, known in asked:
        if set(given) - set(known):
            print(f"whole_models: {what} takes {','.join(known)}", file=sys.stderr)
            return 2
    if not all(text.isdecimal() for text in args.batch.split(",")):
        print("whole_models: --batch takes numbers, by commas", file=sys.stderr)
        return 2
    batches = tuple(map(int, args.batch.split(",")))
    try:
        import torch

        is_there = torch.cuda.is_available()
    except ImportError:
        is_there = False
    if not is_there:
        print("whole_models: it needs PyTorch and a GPU", file=sys.stderr)
        return 2
    rows = []
    for case in cases():
        if args.only not in case.name:
            continue
        for task in (t for t in case.tasks if t in tasks):
            for mode in modes:
                for batch in case.batches or batches:
                    try:
                        row = run(case, task, mode, batch, sides, args.layers)
                    except Exception as error:  # one model's failure is a row, not the end
                        row = Row(model=case.name, task=task, mode=mode, batch=batch)
                        row.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                    torch.cuda.empty_cache()
                    rows.append(row)
                    if not args.json:
                        print(shown(row), flush=True)
    if args.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                          "rows": [asdict(row) for row in rows]}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
