"""Bias and activation of a linear layer in training: one pass forward, and one backward.

PyTorch's forward pass moves as much; backward it reads the gradient once more, for the bias's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.arch import Arch
from tilewise.ops.launch import Launch
from tilewise.torch_ops.calls import allocator
from tilewise.torch_ops.convolutions import dense_strides
from tilewise.torch_ops.launching import Launchers
from tilewise.torch_ops.layers import NAMES
from tilewise.torch_ops.pass_launch import Bias
from tilewise.torch_ops.trained import stored


class Activated:
    """A linear layer's chain in training; `multiply` serves the product."""

    def __init__(
        self,
        x: Tensor,
        layer: Any,
        kind: torch.dtype,
        activation: str,
        multiply: Callable[..., Any],
    ) -> None:
        channels, self._multiply = layer.weight.shape[0], multiply
        shape = (*x.shape[:-1], channels)
        self.strides = dense_strides(shape, "nchw")
        self._size = Bias(
            pixels=prod(shape[:-1]),
            channels=channels,
            dtype=NAMES[kind],
            bias=NAMES[layer.bias.dtype],
            activation=activation,
        )
        self._allocate = allocator(shape, self.strides, kind, x.device)
        self._launchers = Launchers(x.detach(), "bias and activation")

    def __call__(self, layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        z = self._multiply(x, layer.weight)
        result: Tensor = _Activated.apply(z, layer.bias, self)  # type: ignore[no-untyped-call]
        return result

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        y = self._allocate()
        self._launchers.get("forward", self._forward)(y, z, bias)
        return y

    def backward(self, dy: Tensor, z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        dz, dbias = self._allocate(), torch.empty_like(bias)
        launch = self._launchers.get("backward", self._backward)
        launch(dz, stored(dy, self.strides), z, bias, dbias)
        return dz, dbias

    def _forward(self, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        return self._size.forward(arch), self._size.forward_order

    def _backward(self, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        return self._size.backward(arch), self._size.backward_order


class _Activated(torch.autograd.Function):
    """Bias and activation as one node, which keeps the product."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, passes: Activated) -> Tensor:
        z = stored(z, passes.strides)
        ctx.passes = passes
        ctx.save_for_backward(z, bias)
        return passes.forward(z, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *ctx.passes.backward(dy, *ctx.saved_tensors), None
