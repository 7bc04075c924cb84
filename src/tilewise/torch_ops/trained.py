"""A chain of layers in training as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from tilewise.torch_ops import convolutions
from tilewise.torch_ops.calls import allocator
from tilewise.torch_ops.casting import CASTS
from tilewise.torch_ops.convolutions import Layer
from tilewise.torch_ops.norms import PlainNorm, TritonNorm
from tilewise.torch_ops.registering import is_deterministic

ALIGNMENT = 16
CONVOLVE: tuple[Callable[..., Tensor], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class Trained:
    """A convolution, a BatchNorm in training and what follows, ready for tensors like a call's."""

    def __init__(
        self,
        x: Tensor,
        sizes: Layer,
        bound: TritonNorm | PlainNorm,
        strides: Sequence[int],
        *,
        is_ours: bool,
    ) -> None:
        self.bound, self.strides, self.is_ours, self.sizes = bound, strides, is_ours, sizes
        self._kind, rank = x.dtype, x.dim() - 2
        self._convolve = CONVOLVE[rank - 1]
        stride, padding, dilation, groups = sizes
        zeros = [0] * rank
        self._lists = (list(stride), list(padding), list(dilation), False, zeros, groups)
        norm = bound.norm
        self._tracks, self._writes_unseen = bool(norm.running), isinstance(bound, TritonNorm)
        self._sums = None
        if norm.has_sums:
            size = (2, norm.channels)
            self._sums = allocator(size, (norm.channels, 1), torch.float32, x.device)

    def __call__(self, layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        kind, weight = self._kind, layer.weight
        if x.dtype is not kind:
            x = x.to(kind)
        if weight.dtype is not kind:
            weight = CASTS.get(weight, kind)
        buffers: tuple[Tensor | None, ...] = ()
        if self._tracks:
            buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        if torch.is_grad_enabled():
            result: Tensor = _Trained.apply(  # type: ignore[no-untyped-call]
                x, weight, norm.weight, norm.bias, residual, self, buffers
            )
            return result
        return self.forward(x, weight, norm.weight, norm.bias, residual, buffers)[1]

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        buffers: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What was normalised, the result, and the statistics."""
        sums = None
        if self._sums is not None:
            sums = self._sums()
            z = convolutions.convolution_with_sums(x, w, sums, self.sizes)
        elif self.is_ours:
            z = convolutions.convolution(x, w, None, self.sizes)
        else:
            z = self._convolve(x, w, None, *self.sizes)
        z = stored(z, self.strides)
        y, stats = self.bound.forward(z, sums, residual, gamma, beta, buffers=buffers)
        if self._writes_unseen and buffers:
            increment_version([buffer for buffer in buffers if buffer is not None])
        return z, y, stats

    def backward(self, saved: Sequence[Any], dy: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
        x, w, gamma, z, y, stats = saved
        dy = stored(dy, self.strides)
        dz, dresidual, dgamma, dbeta = self.bound.backward(dy, z, y, stats, gamma, needs[4])
        dx = dw = None
        if not self.is_ours:
            dx, dw, _ = torch.ops.aten.convolution_backward.default(
                dz, x, w, None, *self._lists, [needs[0], needs[1], False]
            )
        else:
            fixed = is_deterministic()
            if needs[0]:
                dx = convolutions.input_gradient(x.shape, w, dz, self.sizes, fixed)
            if needs[1]:
                dw = convolutions.weight_gradient(x, w.shape, dz, self.sizes, fixed)
        return dx, dw, dgamma, dbeta, dresidual, None, None


class _Trained(torch.autograd.Function):
    """A chain in training as one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, *given: Any) -> Tensor:
        gamma, beta, residual, chain, buffers = given
        z, y, stats = chain.forward(x, w, gamma, beta, residual, buffers)
        ctx.chain = chain
        # What was normalised is kept, the result only where relu's slope is read off it: the next
        # layer keeps that anyway.
        kept = y if chain.bound.norm.reads_result else None
        ctx.save_for_backward(x, w, gamma, z, kept, stats)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.chain.backward(ctx.saved_tensors, dy, ctx.needs_input_grad)


def stored(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A tensor as kernels read it: packed in the result's layout, at a multiple of 16 bytes."""
    is_there = tensor.stride() == strides and _is_aligned(tensor)
    if is_there and not tensor.is_neg():
        return tensor
    return tensor.new_empty_strided(tuple(tensor.shape), tuple(strides)).copy_(tensor)


def _is_aligned(tensor: Tensor) -> bool:
    try:
        return not tensor.data_ptr() % ALIGNMENT
    except RuntimeError:  # one for many directions, as vectorised Jacobians have: for PyTorch alone
        return True
