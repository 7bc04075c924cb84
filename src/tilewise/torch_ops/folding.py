"""BatchNorm folded into the convolution before it, for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.torch_ops.convolutions import dense_strides


class Fold:
    """A convolution's filter and bias with the BatchNorm after it in them, kept while they last."""

    def __init__(self, kind: torch.dtype, layout: str) -> None:
        self._kind, self._layout = kind, layout
        self._sign: Any = None
        self._held: tuple[Tensor, Tensor | None, Tensor] | None = None

    def get(self, layer: Any, norm: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Filter, bias, and the bias as the statistics of one pass over the result."""
        parts = [layer.weight, layer.bias]
        if norm is not None:
            parts += [norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps]
        sign = [
            part
            if not isinstance(part, Tensor)
            else (part.data_ptr(), 0 if part.is_inference() else part._version)
            for part in parts
        ]
        if self._held is None or sign != self._sign:
            self._sign, self._held = sign, self._folded(layer, norm)
        return self._held

    @torch.no_grad()
    def _folded(self, layer: Any, norm: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        weight, bias = layer.weight.float(), layer.bias
        shift = torch.zeros(len(weight), device=weight.device) if bias is None else bias.float()
        if norm is not None:
            scale = (norm.running_var.float() + norm.eps).rsqrt()
            scale = scale if norm.weight is None else scale * norm.weight.float()
            shift = (shift - norm.running_mean.float()) * scale
            shift = shift if norm.bias is None else shift + norm.bias.float()
            weight = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
        strides = dense_strides(weight.shape, self._layout)
        w = weight.new_empty_strided(weight.shape, strides, dtype=self._kind).copy_(weight)
        stats = torch.stack((shift, shift, torch.ones_like(shift), shift))
        is_bare = norm is None and bias is None
        return w, None if is_bare else shift.to(self._kind), stats
