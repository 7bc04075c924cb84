"""A result times a weight of each channel, and an addition: one pass, where nothing is trained.

ConvNeXt's blocks end so.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.core.tensors import view
from tilewise.dispatch.remembered import CALLS
from tilewise.torch_ops.convolutions import dense_strides
from tilewise.torch_ops.folding import Kept
from tilewise.torch_ops.layers import needs_gradient
from tilewise.torch_ops.library import is_seen
from tilewise.torch_ops.norm_launch import Norm
from tilewise.torch_ops.norms import TritonNorm, why_no_kernels
from tilewise.torch_ops.products import NATIVE
from tilewise.torch_ops.theirs import PLAIN
from tilewise.torch_ops.trained import ALIGNMENT


class Weighed:
    """Weights, then a result and what is added, as a rewritten forward pass gives them."""

    __name__ = "weighed"
    activation = "none"

    def __init__(self, *, in_place: bool) -> None:
        self._in_place, self._kept = in_place, Kept()
        self._passes: dict[Any, TritonNorm] = {}

    def __call__(self, weight: Tensor, norm: None, z: Tensor, residual: Tensor) -> Tensor:
        if not _is_one_pass(weight, z, residual):
            result = weight * z
            return result.add_(residual) if self._in_place else result + residual
        key = (z.shape, z.dtype, z.device, CALLS.generation)
        passes = self._passes.get(key)
        if passes is None:
            self._passes.clear()
            passes = self._passes[key] = _pass(z)
        stats = self._kept.get([weight], lambda: _stats(weight))
        return passes.weigh(z, stats, residual)


def _is_one_pass(weight: Tensor, z: Tensor, residual: Tensor) -> bool:
    """Whether our kernel reads these as they are and gives what PyTorch would."""
    tensors = (weight, z, residual)
    if not all(type(one) in PLAIN and one.dtype is z.dtype for one in tensors):
        return False
    if z.dtype not in NATIVE or z.dim() < 3 or not z.numel() or needs_gradient(*tensors):
        return False
    sides = (z.shape[1], *[1] * (z.dim() - 2))
    strides = dense_strides(z.shape, "nhwc")
    is_stored = z.stride() == strides and residual.stride() == strides
    is_alike = tuple(weight.shape) in (sides, (1, *sides)) and z.shape == residual.shape
    if not (is_stored and is_alike and weight.device == z.device == residual.device):
        return False
    is_aligned = not (z.data_ptr() | residual.data_ptr()) % ALIGNMENT
    return is_aligned and not is_seen() and why_no_kernels(z.device) is None


def _pass(z: Tensor) -> TritonNorm:
    channels = z.shape[1]
    norm = Norm(
        pixels=prod(z.shape) // channels,
        channels=channels,
        dtype=view(z).dtype,
        has_residual=True,
    )
    return TritonNorm(norm, z.shape, z.stride(), z)


@torch.no_grad()
def _stats(weight: Tensor) -> Tensor:
    """Rows as the kernel reads them, of which the last two count: scale and shift."""
    scale = weight.detach().float().reshape(-1)
    none = torch.zeros_like(scale)
    return torch.stack((none, none, scale, none))
