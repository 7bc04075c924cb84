"""Patched layers and chains against the same values in float64, whatever tensors they are given."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzzing import fuzz
from hypothesis import assume
from hypothesis import strategies as st
from tensors import Recipe
from test_fuzz_api import agree, convolutions, failed, layers, ours, outcome, theirs_of, whole
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # PyTorch's, once


class Bare(nn.Module):
    """A layer alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Activated(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layer(x))


class Added(Bare):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + residual
        return y


class AddedActivated(Bare):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return functional.relu(self.layer(x) + residual)


BLOCKS = {(False, False): Bare, (False, True): Activated}
BLOCKS |= {(True, False): Added, (True, True): AddedActivated}
"""Whether something is added, and whether an activation follows."""


def patched(
    kind: type[Bare], layer: nn.Module, weight: Tensor, bias: Tensor | None, *, fuses: bool
) -> nn.Module:
    """The layer with these parameters, served by tilewise wherever it can."""
    layer.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return tw.patch(kind(layer), always=True, fuse=fuses)


def served(block: nn.Module, *tensors: Any) -> Any:
    """What a later call gives: earlier ones, on plainer tensors too, may leave something behind."""
    plain = [tensor.resolve_neg() for tensor in tensors]
    for given in (plain, tensors, plain):
        with torch.no_grad():
            ours(lambda given=given: block(*given))  # type: ignore[misc]
        ours(lambda given=given: block(*given))  # type: ignore[misc]
    return ours(lambda: block(*tensors))


@fuzz(60, layer=layers(), activates=st.booleans(), fuses=st.booleans())
def test_linear_layers(layer: Any, activates: bool, fuses: bool) -> None:
    assume(layer[2] is None or layer[2].shape == layer[1].shape[:1])
    assume(not any(r and r.is_freed for r in layer))  # PyTorch's own may serve
    x, weight, bias = (recipe and recipe.make() for recipe in layer)
    with warnings.catch_warnings(action="ignore"):  # of layers without elements
        linear = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    block = patched(BLOCKS[False, activates], linear, weight, bias, fuses=fuses)
    act = functional.relu if activates else lambda z: z
    theirs = theirs_of(lambda: act(functional.linear(x, weight, bias)), layer)
    agree(served(block, x), theirs, lambda: act(functional.linear(*whole(layer))))


def sound(case: Any) -> tuple[int, list[Recipe | None], dict[str, Any]]:
    """The case with what every layer would refuse put right."""
    rank, x, w, bias, drawn = case
    live = [r and replace(r, storage="plain") if r and r.is_freed else r for r in (x, w, bias)]
    if live[2] is not None:
        live[2] = replace(live[2], shape=w.shape[:1])
    settings = {
        name: 1 if value in (0, -1, 2**40, "full") else value for name, value in drawn.items()
    }
    settings["groups"] = max(1, x.shape[-rank - 1] // max(1, w.shape[1]))
    return rank, live, settings


@fuzz(
    100,
    case=convolutions(),
    activates=st.booleans(),
    fuses=st.booleans(),
    lazy=st.sampled_from((None, None, "plain", "negated", "last", "shifted", "spread", "wanting")),
)
def test_convolutional_layers(case: Any, activates: bool, fuses: bool, lazy: str | None) -> None:
    rank, drawn, settings = sound(case)
    exact = whole(drawn)
    theirs = outcome(lambda: getattr(functional, f"conv{rank}d")(*exact, **settings))
    assume(not failed(theirs) and theirs.numel())
    x, w, bias = (recipe and recipe.make() for recipe in drawn)
    with warnings.catch_warnings(action="ignore"):
        made = outcome(
            lambda: getattr(nn, f"Conv{rank}d")(x.shape[-rank - 1], len(w), 1, **settings)
        )
    assume(not failed(made))  # layers are stricter than functions
    made.kernel_size = tuple(w.shape[2:])
    residual = None if lazy is None else Recipe(tuple(theirs.shape), x.dtype, lazy, 1)
    block = patched(BLOCKS[lazy is not None, activates], made, w, bias, fuses=fuses)
    found = served(block, x, *([] if residual is None else [residual.make()]))

    def wanted() -> Tensor:
        # Layer by layer the sum is rounded before it is added to.
        apart = theirs if residual is None else theirs + residual.exact()
        return functional.relu(apart) if activates else apart

    agree(found, theirs, wanted)
