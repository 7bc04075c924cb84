"""A convolution that ends a container, served with the addition to the container's result."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tilewise.torch_ops.fused import ConvChain, has_global_hooks, has_hooks

FORWARD = "_tilewise_forward"
"""Under which a class whose `forward` was rewritten keeps the one before."""


def is_container(module: Any) -> bool:
    """Whether a module does nothing but call its children, one after the other."""
    kind = type(module)
    is_kind = isinstance(module, nn.Sequential) and bool(module._modules)
    return is_kind and getattr(kind, FORWARD, kind.forward) is nn.Sequential.forward


def _containers(module: Any) -> list[Any]:
    """A container, its last child where that is one, and so on."""
    found = []
    while is_container(module):
        found.append(module)
        *_, module = module._modules.values()
    return found


def last_layers(module: Any) -> tuple[Any, Any]:
    """The layer that a container ends with, and the BatchNorm behind it or None."""
    containers = _containers(module)
    children = list(containers[-1]._modules.values()) if containers else []
    if not children:
        return None, None
    if len(children) > 1 and isinstance(children[-1], nn.modules.batchnorm._BatchNorm):
        return children[-2], children[-1]
    return children[-1], None


class Tail:
    """Calls a container's children, the last of them with what is added to the result."""

    __name__ = "tail"

    def __init__(self, chain: ConvChain) -> None:
        self._chain = chain
        self.activation = chain.activation

    def __call__(self, container: Any, norm: Any, x: Tensor, residual: Tensor) -> Tensor:
        within, layers = _containers(container), last_layers(container)
        is_watched = has_global_hooks() or any(map(has_hooks, within))
        if is_watched or not self._chain.is_of(*layers):
            return self._chain.finished(container(x), residual)
        for one in within:
            *before, _ = one._modules.values()
            for child in before[:-1] if one is within[-1] and layers[1] is not None else before:
                x = child(x)
        return self._chain(*layers, x, residual)
