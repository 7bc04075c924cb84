"""Tensors as fuzzing draws them: any storage, small whole numbers, so that sums are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64)
STORAGES = (
    *("plain", "plain", "plain", "transposed", "sliced", "stepped", "shifted", "spread"),
    *("last", "negated", "wanting", "freed", "freed shifted"),
)


@dataclass(frozen=True)
class Recipe:
    """A tensor that can be made again, the same each time."""

    shape: tuple[int, ...]
    kind: torch.dtype = torch.float32
    storage: str = "plain"
    seed: int = 0

    def values(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(-3, 4, self.shape, generator=generator).to(self.kind)

    @property
    def is_freed(self) -> bool:
        """Whether there is memory missing; much of PyTorch crashes on such tensors."""
        return self.storage.startswith("freed") and math.prod(self.shape) > 0

    def exact(self) -> Tensor:
        """The values where every sum of the tests is exact."""
        one = replace(self, storage="plain" if self.is_freed else self.storage).make()
        return one.detach().resolve_neg().to(torch.float64)

    def make(self) -> Tensor:
        """The values, stored as asked; freed storage holds none."""
        made, values = self._memory(), self.values()
        if self.storage in ("plain", "negated", "freed"):
            made = values.neg() if self.storage == "negated" else values
        elif self.storage != "spread":
            made.copy_(values)
        if self.storage == "negated" and made.is_floating_point():
            return torch._neg_view(made)
        if self.storage.startswith("freed"):
            made.untyped_storage().resize_(0)
        return made.requires_grad_(self.storage == "wanting" and made.is_floating_point())

    def _memory(self) -> Tensor:
        shape, rank = self.shape, len(self.shape)
        size = math.prod(shape)
        if self.storage == "transposed" and rank > 1:
            return torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=self.kind).mT
        if self.storage == "sliced" and rank:
            return torch.zeros(*shape[:-1], shape[-1] + 3, dtype=self.kind)[..., : shape[-1]]
        if self.storage == "stepped" and rank:
            return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=self.kind)[..., ::2]
        if self.storage in ("shifted", "freed shifted"):
            return torch.zeros(size + 1, dtype=self.kind)[1:].view(shape)
        if self.storage == "spread":
            return self.values().flatten()[:1].sum().to(self.kind).expand(shape)
        if self.storage == "last" and rank > 2:
            order = (0, rank - 1, *range(1, rank - 1))
            packed = torch.zeros(shape[0], *shape[2:], shape[1], dtype=self.kind)
            return packed.permute(order)
        return torch.zeros(shape, dtype=self.kind)


_kinds, _storages, _seeds = st.sampled_from(KINDS), st.sampled_from(STORAGES), st.integers(0, 3)


def stored(draw: st.DrawFn, shape: tuple[int, ...], kind: torch.dtype | None = None) -> Recipe:
    """A tensor of a shape, of a type or any. Strategies that last are drawn from twice as fast."""
    found = kind or draw(_kinds)
    return Recipe(shape, found, draw(_storages), draw(_seeds))
