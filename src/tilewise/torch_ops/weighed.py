"""A result times a weight of each channel, perhaps dropped, and an addition: one pass each way.

ConvNeXt's blocks end so. In training whole samples of a branch may be dropped: the module that does
it is asked about a one for each sample, so that it draws what it would have drawn.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.arch import Arch
from tilewise.core.tensors import view
from tilewise.dispatch.remembered import CALLS
from tilewise.ops.launch import Launch
from tilewise.torch_ops.calls import allocator, is_capturing
from tilewise.torch_ops.convolutions import dense_strides
from tilewise.torch_ops.fallback import PLAIN
from tilewise.torch_ops.launching import Launchers, why_no_kernels
from tilewise.torch_ops.layers import is_worth, needs_gradient
from tilewise.torch_ops.pass_launch import Weigh
from tilewise.torch_ops.products import NATIVE
from tilewise.torch_ops.registering import is_seen
from tilewise.torch_ops.trained import ALIGNMENT, stored

MOST = 16
"""Sizes that are kept of one place in a model."""


class Weighed:
    """Weights, who drops, a result and what is added, as a rewritten forward pass gives them."""

    __name__ = "weighed"
    activation = "none"

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._passes: dict[Any, WeighPass | None] = {}

    def __call__(self, weight: Tensor, drop: Any, z: Any, residual: Any) -> Tensor:
        if not _is_one_pass(weight, z, residual):
            return self._apart(weight, drop, z, residual)
        wants = needs_gradient(weight, z, residual)
        kind = z.shape, z.stride(), z.dtype, z.device
        key = (*kind, weight.dtype, wants, drop is None, CALLS.generation)
        try:
            passes = self._passes[key]
        except KeyError:
            passes = self._decide(key, weight, z, residual)
        if passes is None:
            return self._apart(weight, drop, z, residual)
        factors = None if drop is None else drop(residual.new_ones((len(z), *[1] * (z.dim() - 1))))
        if not wants:
            return passes.forward(weight, z, residual, factors)
        result: Tensor = _Weighed.apply(weight, z, residual, factors, passes)  # type: ignore[no-untyped-call]
        return result

    def _decide(self, key: Any, weight: Tensor, z: Tensor, residual: Tensor) -> WeighPass | None:
        *_, wants, is_kept, _ = key
        if is_capturing(z):  # nothing may be compiled now
            return None
        if len(self._passes) >= MOST:
            self._passes.clear()
        # What PyTorch reads and writes more of the result's type, dropping and casting included.
        passes = 2 + 2 * (not is_kept) + wants * (3 + 2 * (not is_kept))
        passes += 2 * wants * (z.dtype is not residual.dtype)
        saved = passes * residual.numel() * residual.element_size()
        found = None
        if is_worth(saved, z.device, with_gradients=wants):
            found = WeighPass(weight, z, residual, has_factors=not is_kept)
        self._passes[key] = found
        return found

    def _apart(self, weight: Tensor, drop: Any, z: Any, residual: Any) -> Tensor:
        result: Tensor = weight * z
        if drop is not None:
            result = drop(result)
        return result.add_(residual) if self._in_place else result + residual


class WeighPass:
    """Our kernels for tensors of one size, forward and backward."""

    def __init__(self, weight: Tensor, z: Tensor, residual: Tensor, *, has_factors: bool) -> None:
        shape, self._strides = tuple(z.shape), z.stride()
        samples, channels = shape[0], weight.numel()
        self._size = Weigh(
            samples=samples,
            pixels=prod(shape) // (samples * channels),
            channels=channels,
            dtype=view(z.detach()).dtype,
            weight=view(weight.detach()).dtype,
            out=view(residual.detach()).dtype,
            has_factors=has_factors,
        )
        self._result = allocator(shape, self._strides, residual.dtype, z.device)
        self._gradient = allocator(shape, self._strides, z.dtype, z.device)
        self._launchers = Launchers(z.detach(), "weighed addition")

    def forward(
        self, weight: Tensor, z: Tensor, residual: Tensor, factors: Tensor | None
    ) -> Tensor:
        y = self._result()
        more = () if factors is None else (factors,)
        self._launchers.get("forward", self._forward)(y, z, weight, residual, *more)
        return y

    def backward(
        self, dy: Tensor, weight: Tensor, z: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of what was weighed and, where that is given, of the weight."""
        dz, dweight = self._gradient(), None if z is None else torch.empty_like(weight)
        more = [tensor for tensor in (factors, z, dweight) if tensor is not None]
        what = "backward without sums" if z is None else "backward"
        launch = self._launchers.get(what, partial(self._backward, z is not None))
        launch(dz, stored(dy, self._strides), weight, *more)
        return dz, dweight

    def _forward(self, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        return self._size.forward(arch), self._size.forward_order

    def _backward(self, wants_weight: bool, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        launch = self._size.backward(arch, wants_weight)
        return launch, self._size.backward_order(wants_weight)


class _Weighed(torch.autograd.Function):
    """A weighed addition as one node; what was weighed is kept for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        z: Tensor,
        residual: Tensor,
        factors: Tensor | None,
        passes: WeighPass,
    ) -> Tensor:
        ctx.passes = passes
        ctx.save_for_backward(weight, z if ctx.needs_input_grad[0] else None, factors)
        return passes.forward(weight, z, residual, factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, z, factors = ctx.saved_tensors
        dz = dweight = None
        if any(ctx.needs_input_grad[:2]):
            dz, dweight = ctx.passes.backward(dy, weight, z, factors)
        return dweight, dz, dy, None, None


def _is_one_pass(weight: Tensor, z: Any, residual: Any) -> bool:
    """Whether our kernel reads these as they are and gives what PyTorch would."""
    tensors = (weight, z, residual)
    if not all(type(one) in PLAIN and one.dtype in NATIVE and not one.is_neg() for one in tensors):
        return False
    if not all(one.layout is torch.strided for one in tensors):
        return False
    if z.dim() < 2 or not z.numel() or residual.dtype != torch.promote_types(weight.dtype, z.dtype):
        return False
    is_stored = z.stride() == residual.stride() == _strides(weight, z)
    if not (is_stored and z.shape == residual.shape and weight.device == z.device):
        return False
    is_aligned = not (z.data_ptr() | residual.data_ptr()) % ALIGNMENT
    is_there = residual.device == z.device and weight.is_contiguous()
    return is_aligned and is_there and not is_seen() and why_no_kernels(z.device) is None


def _strides(weight: Tensor, z: Tensor) -> tuple[int, ...] | None:
    """Of a tensor with the weighed dimension innermost, the second or the last; None for others."""
    sides = tuple(weight.shape)
    if len(sides) > z.dim():
        return None
    while len(sides) > 1 and sides[0] == 1:
        sides = sides[1:]
    if sides == (z.shape[-1],):
        return dense_strides(z.shape, "nchw")
    if z.dim() > 2 and sides == (z.shape[1], *[1] * (z.dim() - 2)):
        return dense_strides(z.shape, "nhwc")
    return None
