"""Passes between layers against PyTorch in float64, by Triton's interpreter: JSON lines.

Run with TRITON_INTERPRET=1: `pass_interpreted.py [OLD NEW]`; with OLD and NEW the kernels are read
with a piece of their text replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from interpreted import TYPES, poisoned, replace_text, run
from torch import Tensor

from tilewise.core.arch import load_arch
from tilewise.torch_ops import pass_launch
from tilewise.torch_ops.pass_launch import Bias, Gate, GateProducts, Weigh
from tilewise.torch_ops.products import ACTIVATE

ARCH = load_arch("sm_90").with_figures(compute_units=2)
WEIGHED: dict[str, dict[str, Any]] = {
    "more tiles than slices": {
        **{"samples": 5, "pixels": 70, "channels": 128, "dtype": "fp32", "out": "fp32"},
        **{"has_factors": True},
    },
    "a layer of ConvNeXt in training": {
        **{"samples": 3, "pixels": 49, "channels": 96, "dtype": "bf16", "out": "fp32"},
        **{"has_factors": True},
    },
    "odd channels": {
        **{"samples": 2, "pixels": 11, "channels": 5, "dtype": "fp32", "out": "fp32"},
        **{"has_factors": True},
    },
    "halves throughout": {
        **{"samples": 2, "pixels": 300, "channels": 24, "dtype": "bf16", "out": "bf16"},
        **{"weight": "bf16", "has_factors": True},
    },
}
BIASED: dict[str, dict[str, Any]] = {
    "gelu": {"pixels": 300, "channels": 192, "dtype": "bf16", "activation": "gelu"},
    "silu": {"pixels": 33, "channels": 20, "dtype": "fp32", "activation": "silu"},
    "relu": {"pixels": 5, "channels": 128, "dtype": "fp16", "bias": "fp16", "activation": "relu"},
}
GATED: dict[str, dict[str, Any]] = {
    "a packed pair": {"rows": 7, "width": 700, "g_row": 700, "u_row": 700, "activation": "silu"},
    "halves of one product": {
        **{"rows": 9, "width": 1100, "g_row": 2200, "u_row": 2200, "activation": "gelu"},
        **{"dtype": "bf16"},
    },
    "one of them apart": {
        **{"rows": 5, "width": 64, "g_row": 64, "u_row": 128, "activation": "relu"},
        **{"dtype": "fp16"},
    },
}
MULTIPLIED: dict[str, dict[str, Any]] = {
    "one token": {"m": 1, "n": 70, "k": 512, "dtype": "fp16", "activation": "silu"},
    "some tokens": {"m": 50, "n": 64, "k": 40, "dtype": "fp16", "activation": "gelu"},
    "many tokens": {"m": 150, "n": 200, "k": 67, "dtype": "fp32", "activation": "relu"},
}
ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 7e-3}


class Given(dict[int, Any]):
    """Tensors of a call by their position, results among them, and the memory around these."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: list[Tensor] = []

    def result(self, at: int, shape: tuple[int, ...], kind: str) -> Tensor:
        self[at], memory = poisoned(shape, range(len(shape)), kind)
        self.guards.append(memory)
        made: Tensor = self[at]
        return made

    @property
    def is_inside(self) -> bool:
        return all(bool(m[:64].isnan().all() and m[-64:].isnan().all()) for m in self.guards)


Pairs = dict[str, tuple[Tensor, Tensor | None]]


def rows(name: str, given: Given, pairs: Pairs) -> Iterator[dict[str, Any]]:
    for what, (found, wanted) in pairs.items():
        assert wanted is not None
        worst = (found.double() - wanted.detach()).abs().max() / wanted.detach().abs().max()
        yield {
            "case": f"{name}: {what}",
            "error": float(worst),
            "allowed": ALLOWED[found.dtype],
            "is_inside": given.is_inside,
        }


def start(given: Given, made: Any, order: tuple[int, ...]) -> None:
    run(made, {at: given[at] for at in order})


def weighed(name: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    size, given = Weigh(**{"weight": "fp32", "has_factors": False, **case}), Given()
    shape = (size.samples, size.pixels, size.channels)
    z = torch.randn(shape).to(TYPES[size.dtype])
    residual, dy = (torch.randn(shape).to(TYPES[size.out]) for _ in range(2))
    weight = torch.linspace(-1, 2, size.channels).to(TYPES[size.weight])
    factors = (torch.arange(size.samples) % 2 / 0.75).to(TYPES[size.out])
    given |= {
        **{pass_launch.Z: z, pass_launch.RESIDUAL: residual, pass_launch.DY: dy},
        **{pass_launch.VECTOR: weight, pass_launch.FACTORS: factors},
    }
    y = given.result(pass_launch.Y, shape, size.out)
    dz = given.result(pass_launch.DZ, shape, size.dtype)
    dweight = given.result(pass_launch.DVECTOR, (size.channels,), size.weight)
    leaves = [t.double().requires_grad_() for t in (z, weight)]
    expected = leaves[0] * leaves[1]
    if size.has_factors:
        expected = expected * factors.double()[:, None, None]
    expected.backward(dy.double())
    start(given, size.forward(ARCH), size.forward_order)
    start(given, size.backward(ARCH, True), size.backward_order(True))
    alone = dz.clone()
    start(given, size.backward(ARCH, False), size.backward_order(False))
    assert torch.equal(alone.nan_to_num(), dz.nan_to_num()), "without sums the gradient is another"
    pairs: Pairs = {"y": (y, expected + residual.double()), "dz": (dz, leaves[0].grad)}
    yield from rows(name, given, {**pairs, "dweight": (dweight, leaves[1].grad)})


def biased(name: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    size, given = Bias(**{"bias": "fp32", **case}), Given()
    shape = (size.pixels, size.channels)
    z, dy = (torch.randn(shape).to(TYPES[size.dtype]) for _ in range(2))
    bias = torch.linspace(-1, 2, size.channels).to(TYPES[size.bias])
    given |= {pass_launch.Z: z, pass_launch.DY: dy, pass_launch.VECTOR: bias}
    y = given.result(pass_launch.Y, shape, size.dtype)
    dz = given.result(pass_launch.DZ, shape, size.dtype)
    dbias = given.result(pass_launch.DVECTOR, (size.channels,), size.bias)
    leaves = [t.double().requires_grad_() for t in (z, bias)]
    expected = ACTIVATE[size.activation](leaves[0] + leaves[1])
    expected.backward(dy.double())
    start(given, size.forward(ARCH), size.forward_order)
    start(given, size.backward(ARCH), size.backward_order)
    pairs: Pairs = {
        "y": (y, expected),
        "dz": (dz, leaves[0].grad),
        "dbias": (dbias, leaves[1].grad),
    }
    yield from rows(name, given, pairs)


def gated(name: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    size, given = Gate(**{"dtype": "fp32", **case}), Given()
    shape, kind = (size.rows, size.width), TYPES[size.dtype]
    g, u = (
        torch.randn(size.rows, row).to(kind)[:, : size.width] for row in (size.g_row, size.u_row)
    )
    dy = torch.randn(shape).to(kind)
    given |= {pass_launch.G: g, pass_launch.U: u, pass_launch.DY: dy}
    results = (pass_launch.Y, pass_launch.DG, pass_launch.DU)
    y, dg, du = (given.result(at, shape, size.dtype) for at in results)
    leaves = [t.double().requires_grad_() for t in (g, u)]
    expected = ACTIVATE[size.activation](leaves[0]) * leaves[1]
    expected.backward(dy.double())
    start(given, size.forward(ARCH), size.forward_order)
    start(given, size.backward(ARCH), size.backward_order)
    pairs: Pairs = {"y": (y, expected), "dg": (dg, leaves[0].grad), "du": (du, leaves[1].grad)}
    yield from rows(name, given, pairs)


def multiplied(name: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    size, given = GateProducts(**case), Given()
    shapes = {pass_launch.Z: size.m, pass_launch.G: size.n, pass_launch.U: size.n}
    made = {at: torch.randn(rows, size.k).to(TYPES[size.dtype]) for at, rows in shapes.items()}
    given |= made
    y = given.result(pass_launch.Y, (size.m, size.n), size.dtype)
    x, gate, up = (tensor.double() for tensor in made.values())
    start(given, size.forward(ARCH), size.forward_order)
    expected = ACTIVATE[size.activation](x @ gate.mT) * (x @ up.mT)
    yield from rows(name, given, {"y": (y, expected)})


def main() -> None:
    torch.manual_seed(3)
    checks = ((weighed, WEIGHED), (biased, BIASED), (gated, GATED), (multiplied, MULTIPLIED))
    for check, cases in checks:
        for name, case in cases.items():
            for line in check(name, case):
                print(json.dumps(line))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replace_text(pass_launch.MODULE, *sys.argv[1:])
    main()
