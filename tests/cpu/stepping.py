"""What a model gives over training steps, and the nodes that autograd keeps of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from residual_blocks import IMAGES
from torch import Tensor, nn


def nodes(result: Tensor) -> Counter[str]:
    """How often each kind of node is behind a result."""
    seen, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [other for other, _ in node.next_functions]
    return Counter(node.name() for node in seen)


def steps(model: nn.Module, count: int, images: Tensor = IMAGES, **cast: Any) -> list[Tensor]:
    """Results of training steps, then all gradients and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(cast)):
            result = model(images)
        result.float().square().mean().backward()
        optimizer.step()
        found.append(result.detach())
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]  # type: ignore[misc]
