"""BatchNorm's Triton kernels against PyTorch in float64, by Triton's interpreter: JSON lines.

Run with TRITON_INTERPRET=1: `norm_interpreted.py [OLD NEW]`; with OLD and NEW the kernels are read
with a piece of their text replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from interpreted import TYPES, poisoned, replace_text, run
from torch.nn import functional

from tilewise.core.arch import load_arch
from tilewise.torch_ops import norm_launch
from tilewise.torch_ops.norm_launch import Norm

ARCH = load_arch("sm_90").with_figures(compute_units=2)
ACTIVATIONS: dict[str, Any] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
}
FULL: dict[str, Any] = {"parameters": "fp32", "running": "fp32", "is_tracked": True}
CASES: dict[str, dict[str, Any]] = {
    "one tile": {"pixels": 32, "channels": 128, "dtype": "fp32", **FULL},
    "several slices": {"pixels": 300, "channels": 192, "dtype": "fp32", **FULL},
    "few channels": {"pixels": 1001, "channels": 24, "dtype": "bf16", "activation": "silu", **FULL},
    "odd channels": {"pixels": 77, "channels": 5, "dtype": "fp32", "activation": "relu", **FULL},
    "a residual": {
        **{"pixels": 130, "channels": 64, "dtype": "bf16", "activation": "relu"},
        **{"has_residual": True, **FULL},
    },
    "a residual, not activated": {
        **{"pixels": 64, "channels": 48, "dtype": "fp16", "has_residual": True, **FULL},
    },
    "sums given": {
        **{"pixels": 90, "channels": 40, "dtype": "fp32", "activation": "gelu"},
        **{"has_sums": True, **FULL},
    },
    "bare": {"pixels": 50, "channels": 16, "dtype": "fp32", "activation": "relu"},
    "halves throughout": {
        **{"pixels": 40, "channels": 32, "dtype": "bf16", "activation": "relu"},
        **{"parameters": "bf16", "running": "bf16", "momentum": 0.3, "eps": 1e-3},
    },
}


def tensors(norm: Norm) -> dict[int, Any]:
    torch.manual_seed(3)
    pixels, channels = norm.pixels, norm.channels
    kind = TYPES[norm.dtype]
    made = {
        norm_launch.Z: torch.randn(pixels, channels) * 2 + torch.linspace(-1, 3, channels),
        norm_launch.DY: torch.randn(pixels, channels),
        norm_launch.RESIDUAL: torch.randn(pixels, channels),
    }
    made = {at: tensor.to(kind) for at, tensor in made.items()}
    if norm.parameters:
        own = TYPES[norm.parameters]
        made[norm_launch.GAMMA] = (torch.rand(channels) + 0.5).to(own)
        made[norm_launch.BETA] = torch.randn(channels).to(own)
        made |= {
            at: torch.full((channels,), float("nan"), dtype=own)
            for at in (norm_launch.DGAMMA, norm_launch.DBETA)
        }
    if norm.running:
        own = TYPES[norm.running]
        made[norm_launch.MEAN] = torch.randn(channels).to(own)
        made[norm_launch.VAR] = (torch.rand(channels) + 0.5).to(own)
    made[norm_launch.TRACKED] = torch.tensor(7)
    wide = made[norm_launch.Z].double()
    made[norm_launch.SUMS] = torch.stack((wide.sum(0), wide.square().sum(0))).float()
    made[norm_launch.STATS] = torch.full((4, channels), float("nan"))
    return made


def expected(norm: Norm, given: dict[int, Any]) -> dict[str, Any]:
    """By PyTorch, in float64."""
    leaves = {
        at: given[at].double().requires_grad_()
        for at in (norm_launch.Z, norm_launch.RESIDUAL, norm_launch.GAMMA, norm_launch.BETA)
        if at in given
    }
    running = [
        given[at].double() if norm.running else None for at in (norm_launch.MEAN, norm_launch.VAR)
    ]
    result = functional.batch_norm(
        *(leaves[norm_launch.Z], *running),
        *(leaves.get(norm_launch.GAMMA), leaves.get(norm_launch.BETA)),
        training=True,
        momentum=norm.momentum,
        eps=norm.eps,
    )
    if norm.has_residual:
        result = result + leaves[norm_launch.RESIDUAL]
    result = ACTIVATIONS[norm.activation](result)
    result.backward(given[norm_launch.DY].double())
    found = {"y": result, "dz": leaves[norm_launch.Z].grad}
    if norm.running:
        found |= {"mean": running[0], "var": running[1]}
    if norm.parameters:
        found["dgamma"] = leaves[norm_launch.GAMMA].grad
        found["dbeta"] = leaves[norm_launch.BETA].grad
    if norm.has_residual:
        found["dresidual"] = leaves[norm_launch.RESIDUAL].grad
    return found


def computed(norm: Norm, given: dict[int, Any]) -> tuple[dict[str, Any], bool]:
    """By our kernels, and whether they wrote nowhere else."""
    shape, kind = (norm.pixels, norm.channels), norm.dtype
    y, y_memory = poisoned(shape, (0, 1), kind)
    dz, dz_memory = poisoned(shape, (0, 1), kind)
    dresidual, dresidual_memory = poisoned(shape, (0, 1), kind)
    given |= {norm_launch.Y: y, norm_launch.DZ: dz, norm_launch.DRESIDUAL: dresidual}
    forward = norm_launch.forward(norm, ARCH)
    run(forward, {at: given[at] for at in norm.forward_order})
    again = torch.empty_like(y)
    run(
        norm_launch.apply(norm, ARCH),
        {at: again if at == norm_launch.Y else given[at] for at in norm.apply_order},
    )
    assert torch.equal(again, y)
    backward = norm_launch.backward(norm, ARCH, norm.has_residual)
    run(backward, {at: given[at] for at in norm.backward_order(norm.has_residual)})
    found = {"y": y, "dz": dz}
    if norm.running:
        found |= {"mean": given[norm_launch.MEAN], "var": given[norm_launch.VAR]}
    if norm.parameters:
        found |= {"dgamma": given[norm_launch.DGAMMA], "dbeta": given[norm_launch.DBETA]}
    if norm.has_residual:
        found["dresidual"] = dresidual
    guards = (y_memory, dz_memory, dresidual_memory)
    is_inside = all(bool(m[:64].isnan().all() and m[-64:].isnan().all()) for m in guards)
    counted = int(given[norm_launch.TRACKED]) == (8 if norm.is_tracked else 7)
    return found, is_inside and counted


def results() -> Iterator[dict[str, Any]]:
    for name, case in CASES.items():
        norm = Norm(**case)
        given = tensors(norm)
        wanted = expected(norm, given)
        found, is_inside = computed(norm, given)
        narrow = {"fp32": 2e-5, "fp16": 1e-3, "bf16": 1e-2}
        for what, value in wanted.items():
            value = value.detach()
            worst = (found[what].double() - value).abs().max() / value.abs().max()
            is_wide = norm.parameters != "bf16" and what in ("mean", "var", "dgamma", "dbeta")
            allowed = narrow["fp32" if is_wide else norm.dtype]
            yield {
                "case": f"{name}: {what}",
                "error": float(worst),
                "allowed": allowed,
                "is_inside": is_inside,
            }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replace_text(norm_launch.MODULE, *sys.argv[1:])
    for line in results():
        print(json.dumps(line))
