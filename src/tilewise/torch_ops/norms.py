"""BatchNorm of a batch with what follows it: by our kernels on GPUs, elsewhere by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.core.arch import Arch
from tilewise.core.tensors import view
from tilewise.ops.launch import Launch
from tilewise.torch_ops import norm_launch
from tilewise.torch_ops.calls import allocator
from tilewise.torch_ops.launching import Launchers, why_no_kernels
from tilewise.torch_ops.norm_launch import Norm
from tilewise.torch_ops.operators import SLOPES
from tilewise.torch_ops.products import ACTIVATE

Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Of what was normalised, of the residual, of gamma and of beta."""


class TritonNorm:
    """Our kernels, bound to tensors of one size on one device."""

    def __init__(self, norm: Norm, shape: Sequence[int], strides: Sequence[int], z: Tensor) -> None:
        self.norm = norm
        self.result = allocator(shape, strides, z.dtype, z.device)
        size = (4, norm.channels)
        self._stats = allocator(size, (norm.channels, 1), torch.float32, z.device)
        self._launchers = Launchers(z, "BatchNorm")

    def forward(
        self, z: Tensor, *given: Tensor | None, buffers: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """The result and its statistics; `given` are sums, residual, gamma and beta.

        `buffers` are the running mean and variance and the count of batches, which are written.
        """
        y, stats = self.result(), self._stats()
        more = [tensor for tensor in (*given, *buffers) if tensor is not None]
        self._launcher("forward")(y, z, stats, *more)
        return y, stats

    def apply(self, z: Tensor, stats: Tensor, residual: Tensor | None) -> Tensor:
        """z, which is overwritten, by statistics that are known."""
        self._launcher("apply")(z, z, stats, *(() if residual is None else (residual,)))
        return z

    def backward(
        self, dy: Tensor, z: Tensor, y: Tensor | None, stats: Tensor, gamma: Tensor | None,
        wants_residual: bool,
    ) -> Gradients:  # fmt: skip
        is_same = self.norm.activation == "none"  # then the residual's gradient is the result's
        dz = self.result()
        dresidual = self.result() if wants_residual and not is_same else None
        own = () if gamma is None else (torch.empty_like(gamma), torch.empty_like(gamma))
        more = [tensor for tensor in (y, dresidual) if tensor is not None]
        key = "backward" if dresidual is None else "backward with residual"
        self._launcher(key)(dz, dy, z, stats, *more, *own)
        return dz, dy if wants_residual and is_same else dresidual, *(own or (None, None))

    def _launcher(self, what: str) -> Callable[..., None]:
        return self._launchers.get(what, partial(self._launch, what))

    def _launch(self, what: str, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        """What is launched, and the tensors of a call in their order."""
        norm = self.norm
        if what == "forward":
            return norm_launch.forward(norm, arch), norm.forward_order
        if what == "apply":
            return norm_launch.apply(norm, arch), norm.apply_order
        has_residual = what.endswith("residual")
        return norm_launch.backward(norm, arch, has_residual), norm.backward_order(has_residual)


class PlainNorm:
    """The same by PyTorch's operators, where we have no kernels."""

    def __init__(self, norm: Norm, shape: Sequence[int], strides: Sequence[int], z: Tensor) -> None:
        self.norm, self._axes = norm, [0, *range(2, len(shape))]
        self._sides = (1, norm.channels, *[1] * (len(shape) - 2))

    def forward(
        self, z: Tensor, *given: Tensor | None, buffers: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, Tensor]:
        norm, (sums, residual, gamma, beta) = self.norm, given
        if sums is None:
            sums = channel_sums(z)
        mean = sums[0] / norm.pixels
        var = (sums[1] / norm.pixels - mean.square()).clamp(min=0)
        inverse = (var + norm.eps).rsqrt()
        scale = inverse if gamma is None else inverse * gamma
        shift = -mean * scale if beta is None else beta - mean * scale
        unbiased = var * (norm.pixels / max(1, norm.pixels - 1))
        for buffer, value in zip(buffers, (mean, unbiased), strict=False):
            if buffer is not None:
                buffer.lerp_(value.to(buffer.dtype), norm.momentum)
        if len(buffers) > 2 and buffers[2] is not None:
            buffers[2].add_(1)
        stats = torch.stack((mean, inverse, scale.float(), shift.float()))
        return self.apply(z, stats, residual), stats

    def apply(self, z: Tensor, stats: Tensor, residual: Tensor | None) -> Tensor:
        value = z * self._spread(stats[2]) + self._spread(stats[3])
        if residual is not None:
            value += residual
        return ACTIVATE[self.norm.activation](value).to(z.dtype)

    def backward(
        self, dy: Tensor, z: Tensor, y: Tensor | None, stats: Tensor, gamma: Tensor | None,
        wants_residual: bool,
    ) -> Gradients:  # fmt: skip
        mean, inverse, scale, shift = map(self._spread, stats)
        gradient, name = dy.float(), self.norm.activation
        if name != "none":
            gradient = gradient * SLOPES[name](z * scale + shift if y is None else y)
        normal = (z - mean) * inverse
        first, second = gradient.sum(self._axes), (gradient * normal).sum(self._axes)
        even = (self._spread(first) + normal * self._spread(second)) / self.norm.pixels
        dz = (scale * (gradient - even)).to(z.dtype)
        dresidual = gradient.to(dy.dtype) if wants_residual else None
        if gamma is None:
            return dz, dresidual, None, None
        return dz, dresidual, second.to(gamma.dtype), first.to(gamma.dtype)

    def _spread(self, vector: Tensor) -> Tensor:
        return vector.reshape(self._sides)


def channel_sums(z: Tensor) -> Tensor:
    """Sums and sums of squares over all pixels: [2, channels] in fp32."""
    axes, wide = [0, *range(2, z.dim())], z.float()
    return torch.stack((wide.sum(axes), wide.square().sum(axes)))


def normaliser(
    norm: Norm, shape: Sequence[int], strides: Sequence[int], z: Tensor
) -> TritonNorm | PlainNorm:
    """What normalises tensors of this shape, of the kind and on the device of `z`."""
    kind = PlainNorm if why_no_kernels(z.device) else TritonNorm
    return kind(norm, shape, strides, z)


def norm_of(
    module: Any, z: Tensor, shape: Sequence[int], *, activation: str, has_residual: bool,
    has_sums: bool,
) -> Norm:  # fmt: skip
    """A module of PyTorch's in training, over results of this shape."""
    channels = shape[1]
    pixels = 1
    for size in (shape[0], *shape[2:]):
        pixels *= size
    tracks = module.training and module.track_running_stats
    return Norm(
        pixels=pixels,
        channels=channels,
        dtype=view(z).dtype,
        parameters="" if module.weight is None else view(module.weight).dtype,
        running=view(module.running_mean).dtype if tracks else "",
        is_tracked=tracks and module.num_batches_tracked is not None,
        has_sums=has_sums,
        has_residual=has_residual,
        activation=activation,
        eps=module.eps,
        momentum=module.momentum or 0.0,
    )
