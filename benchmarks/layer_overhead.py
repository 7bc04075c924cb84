#!/usr/bin/env python3
"""What a patched layer costs beyond PyTorch's own, where PyTorch serves it and where tilewise does.

usage: python benchmarks/layer_overhead.py [--rounds 100] [--device cpu|cuda] [--json]

Layers are so small that nothing but the calls counts: on a GPU (taken where there is one) the time
until the host is free again, in bf16 and channels-last as models there are. All take turns in
small blocks; a figure is the median over rounds of what a block took beyond the plain module's
block of the same round. `theirs` is a patched layer that is left to PyTorch, `ours` one that
tilewise serves. With gradients, models are under autocast with weights in fp32, all within one
step of it. `chain` is a convolution with BatchNorm and ReLU, fused: folded in the forward pass
alone; with gradients one node of autograd, on a GPU whoever serves the convolution. `weighed` and
`gated`, on a GPU alone, are passes between layers: one of ours in place of several of PyTorch's.

The last line is what `CALL_US` of `tilewise/torch_ops/layers.py` has to say on this machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import nn

import tilewise as tw
from tilewise.torch_ops.layers import CALL_US

BLOCK = 20


def block_us(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(BLOCK):
        call()
    return (time.perf_counter() - start) / BLOCK * 1e6


class Weighed(nn.Module):
    """A layer scale and an addition."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(size)), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.inner(x) + x


class Gated(nn.Module):
    """The middle of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner = nn.SiLU(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.inner(x)
        return self.act(x) * other


def layers(device: str) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Each kind of layer and its input."""
    size = 8 if device == "cpu" else 64
    bare = nn.Conv2d(size, size, 3, padding=1, bias=False)
    image = torch.randn(1, size, 8, 8)
    found = {
        "linear": (nn.Linear(size, size), torch.randn(4, size)),
        "conv": (nn.Conv2d(size, size, 3, padding=1), image),
        "chain": (nn.Sequential(bare, nn.BatchNorm2d(size), nn.ReLU()), image),
    }
    if device == "cpu":
        return found
    found |= {
        "weighed": (Weighed(size), torch.randn(4, size)),
        "gated": (Gated(), torch.randn(4, size)),
    }
    last = torch.channels_last
    return {
        name: (layer.cuda(), x.cuda() if x.dim() == 2 else x.cuda().to(memory_format=last))
        for name, (layer, x) in found.items()
    }


def rows(rounds: int, device: str) -> list[dict[str, Any]]:
    """Each kind of layer, a forward pass alone and one with gradients."""
    found = []
    for name, (plain, x) in layers(device).items():
        for with_gradients in (False, True):
            made = {"plain": plain.train(with_gradients), "theirs": None, "ours": None}
            given = x.clone().requires_grad_(with_gradients)
            if device == "cuda" and not with_gradients:
                made["plain"], given = deepcopy(plain).bfloat16(), given.bfloat16()
            for kind in ("theirs", "ours"):
                fuse = name not in ("linear", "conv")
                made[kind] = tw.patch(deepcopy(made["plain"]), always=kind == "ours", fuse=fuse)
            is_cast = device == "cuda" and with_gradients
            cast = torch.autocast("cuda", torch.bfloat16) if is_cast else nullcontext()
            with torch.set_grad_enabled(with_gradients), cast:
                times = turns(made, given, with_gradients, rounds, device)
            found.append({"layer": name, "with_gradients": with_gradients, **times})
    return found


def step(layer: nn.Module, x: torch.Tensor) -> None:
    y = layer(x)
    y.backward(torch.ones_like(y))


def turns(
    layers: dict[str, Any], x: torch.Tensor, with_gradients: bool, rounds: int, device: str
) -> dict[str, float]:
    run = step if with_gradients else (lambda layer, x: layer(x))
    for layer in layers.values():
        for _ in range(5):
            run(layer, x)
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            taken[name].append(block_us(lambda layer=layer: run(layer, x), device))
    added = {
        f"{name}_added_us": median(t - p for t, p in zip(taken[name], taken["plain"], strict=True))
        for name in ("theirs", "ours")
    }
    served = {name: who(layer) for name, layer in layers.items() if name != "plain"}
    return {"plain_us": median(taken["plain"]), **added, "served": served}


def who(layer: nn.Module) -> str:
    return ", ".join({"tilewise" if r.served.is_ours else "PyTorch" for r in tw.layers(layer)})


def constants(found: list[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """`CALL_US` as this machine has it: linear and convolution, forward and with gradients."""
    return {
        kind: tuple(
            round(max(0.0, row["ours_added_us"]), 1) for row in found if row["layer"] == kind
        )
        for kind in ("linear", "conv", "weighed", "gated")
        if any(row["layer"] == kind for row in found)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known, CALL_US["pass"] = CALL_US["pass"], (0.0, 0.0)  # passes are taken, however small
    found = rows(args.rounds, args.device)
    CALL_US["pass"] = known
    read = constants(found)
    if args.json:
        print(json.dumps({"device": args.device, "rows": found, "call_us": read}, indent=1))
        return
    for row in found:
        what = "with gradients" if row["with_gradients"] else "forward"
        print(
            f"{row['layer']:<8}{what:<16}plain {row['plain_us']:7.1f} us   theirs "
            f"{row['theirs_added_us']:+6.2f}   ours {row['ours_added_us']:+7.1f}   served by "
            f"{row['served']['theirs']} / {row['served']['ours']}"
        )
    print(f"CALL_US = {read}   (now {CALL_US})")


if __name__ == "__main__":
    main()
