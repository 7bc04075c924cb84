"""BatchNorm folded into the convolution before it, for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilewise.torch_ops.calls import is_capturing
from tilewise.torch_ops.convolutions import dense_strides

_Sign = tuple[Any, int, int]


def _sign(part: Any) -> _Sign:
    """What a part was: itself, how often it had changed, and where it lay, as `.data` is set."""
    if not isinstance(part, Tensor):
        return part, 0, 0
    return ref(part), 0 if part.is_inference() else part._version, part.data_ptr()


def _is_same(part: Any, known: Any, version: int, address: int) -> bool:
    """Tensors made for inference are never known to be: they do not count their changes."""
    if not isinstance(part, Tensor):
        return bool(known == part)
    is_it = isinstance(known, ref) and known() is part
    is_kept = not part.is_inference() and part._version == version
    return is_it and is_kept and part.data_ptr() == address


class Kept:
    """What was made of tensors and numbers, as long as these stay what they were."""

    def __init__(self) -> None:
        self._held: tuple[list[_Sign], Any] | None = None
        """What it was made of, and what was made: read and written at once, as threads share it."""

    def get(self, parts: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What `make` gives; a CUDA graph's own is not kept for others."""
        held = self._held
        if held is not None and _are_same(parts, held[0]):
            return held[1]
        sign = [_sign(part) for part in parts]
        made = make()
        if not any(isinstance(part, Tensor) and is_capturing(part) for part in parts):
            self._held = sign, made
        return made


def _are_same(parts: Sequence[Any], sign: Sequence[_Sign]) -> bool:
    """Whether these are the very tensors that something was made of, as they were then."""
    return all(_is_same(part, *was) for part, was in zip(parts, sign, strict=True))


class Fold:
    """A convolution's filter and bias with the BatchNorm after it in them, kept while they last."""

    def __init__(self, kind: torch.dtype, layout: str) -> None:
        self._kind, self._layout, self._kept = kind, layout, Kept()

    def get(self, layer: Any, norm: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Filter, bias, and the bias as the statistics of one pass over the result."""
        parts = [layer.weight, layer.bias]
        if norm is not None:
            parts += [norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps]
        made: tuple[Tensor, Tensor | None, Tensor]
        made = self._kept.get(parts, lambda: self._folded(layer, norm))
        return made

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
