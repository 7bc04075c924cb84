#!/usr/bin/env python3
"""What a patched layer costs beyond PyTorch's own, where PyTorch serves it and where tilewise does.

usage: python benchmarks/layer_overhead.py [--rounds 200] [--json]

Layers are so small that nothing but the calls counts. All take turns in small blocks; a figure is
the median over rounds of what a block took beyond the plain module's block of the same round.
`theirs` is a patched layer that is left to PyTorch, `ours` one that tilewise serves. `chain` is a
convolution with BatchNorm and ReLU, fused: folded in the forward pass alone, layer by layer with
gradients where nothing is gained, and one node of autograd where tilewise serves (on a CPU with
PyTorch's operators for its passes, which is no measure of what a GPU's cost).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import nn

import tilewise as tw

BLOCK = 20


def block_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(BLOCK):
        call()
    return (time.perf_counter() - start) / BLOCK * 1e6


def step(layer: nn.Module, x: torch.Tensor) -> None:
    y = layer(x)
    y.backward(torch.ones_like(y))


def rows(rounds: int) -> list[dict[str, Any]]:
    """Each kind of layer, a forward pass alone and one with gradients."""
    found = []
    layers: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "linear": (nn.Linear(16, 16), torch.randn(4, 16)),
        "conv": (nn.Conv2d(8, 8, 3, padding=1), torch.randn(1, 8, 8, 8)),
    }
    chain = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    layers["chain"] = (chain, torch.randn(1, 8, 8, 8))
    for name, (plain, x) in layers.items():
        made = {"plain": plain, "theirs": None, "ours": None}
        for kind in ("theirs", "ours"):
            made[kind] = tw.patch(deepcopy(plain), always=kind == "ours", fuse=name == "chain")
        for with_gradients in (False, True):
            given = x.clone().requires_grad_(with_gradients)
            for layer in made.values():
                layer.train(with_gradients)
            with torch.set_grad_enabled(with_gradients):
                times = turns(made, given, with_gradients, rounds)
            found.append({"layer": name, "with_gradients": with_gradients, **times})
    return found


def turns(
    layers: dict[str, Any], x: torch.Tensor, with_gradients: bool, rounds: int
) -> dict[str, float]:
    run = step if with_gradients else (lambda layer, x: layer(x))
    for layer in layers.values():
        for _ in range(5):
            run(layer, x)
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            taken[name].append(block_us(lambda layer=layer: run(layer, x)))
    added = {
        f"{name}_added_us": median(t - p for t, p in zip(taken[name], taken["plain"], strict=True))
        for name in ("theirs", "ours")
    }
    return {"plain_us": median(taken["plain"]), **added}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(args.rounds)
    if args.json:
        print(json.dumps({"rows": found}, indent=1))
        return
    for row in found:
        what = "with gradients" if row["with_gradients"] else "forward"
        print(
            f"{row['layer']:<8}{what:<16}plain {row['plain_us']:7.1f} us   theirs "
            f"{row['theirs_added_us']:+6.2f}   ours {row['ours_added_us']:+7.1f}"
        )


if __name__ == "__main__":
    main()
