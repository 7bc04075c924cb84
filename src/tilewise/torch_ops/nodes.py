"""What nodes of a traced forward pass are: children, activations, and which share memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from tilewise.torch_ops.fused import has_hooks
from tilewise.torch_ops.layers import PLAIN_CLASS

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
"""By the rank of the convolution before; subclasses, synchronised ones among them, stay."""
RANKS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((functional.relu, torch.relu, torch.relu_), "relu"),
    functional.silu: "silu",
    functional.gelu: "gelu",
}
_METHODS = {"relu": "relu", "relu_": "relu"}
_NEW = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, torch.add)
"""Functions whose results lie in memory of their own."""
_MEMORY = "tilewise memory"
"""Where a node keeps one that stands for all whose results may lie in the same memory."""


def child(owner: nn.Module, node: fx.Node) -> nn.Module | None:
    """The child that a node calls with one tensor, or None."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return owner.get_submodule(str(node.target))


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def may_wait(nodes: Sequence[fx.Node], last: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a chain can be put off until `last`: no other may overwrite what it reads."""
    others = [one for one in order if one not in nodes]
    return not any(
        order[node] < order[other] < order[last] and _memory_of(node) & _memory_of(other)
        for node in nodes
        for other in others
    )


def _memory_of(node: fx.Node) -> set[fx.Node]:
    """What a node reads and may overwrite."""
    return {read.meta[_MEMORY] for read in node.all_input_nodes}


def mark_memory(owner: nn.Module, graph: fx.Graph) -> None:
    """Finds which nodes may share memory: views do, and inputs as their caller likes."""
    named: dict[str, fx.Node] = {}
    for node in graph.nodes:
        node.meta[_MEMORY] = node
        shares = [] if _is_new(owner, node) else node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            shares = [named.setdefault(str(node.target) * (node.op == "get_attr"), node)]
        for other in shares:
            _last_known(other).meta[_MEMORY] = node
    for node in reversed(graph.nodes):
        node.meta[_MEMORY] = _last_known(node)


def _last_known(node: fx.Node) -> fx.Node:
    """The last node that is known to share a node's memory, or the one that stands for these."""
    following: fx.Node = node.meta[_MEMORY]
    while following is not node:
        node, following = following, following.meta[_MEMORY]
    return node


def _is_new(owner: nn.Module, node: fx.Node) -> bool:
    """Whether a node's result lies in memory of its own, as far as we know."""
    if node.op == "call_function" and node.target in _NEW:
        return not node.kwargs
    if any(activation_of(owner, node)[:1]):
        return not activation_of(owner, node)[1]
    module = child(owner, node)
    kind = getattr(type(module), PLAIN_CLASS, type(module))
    return kind in (*RANKS, *NORMS.values(), nn.Linear) and not has_hooks(module)


def activation_of(owner: nn.Module, node: fx.Node | None) -> tuple[str, bool]:
    """The activation that a node is, and whether it overwrites; the name is empty for none."""
    if node is None:
        return "", False
    module = child(owner, node)
    if module is not None and ("." in str(node.target) or has_hooks(module)):
        return "", False  # `chains._sign` tells of a module's own children when they change
    if type(module) in ACTIVATIONS and getattr(module, "approximate", "none") == "none":
        return ACTIVATIONS[type(module)], bool(getattr(module, "inplace", False))
    is_plain = len(node.args) == 1 and node.kwargs.get("approximate", "none") == "none"
    if not is_plain or set(node.kwargs) - {"inplace", "approximate"}:
        return "", False
    in_place = node.kwargs.get("inplace", False) is True
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target], in_place or node.target is torch.relu_
    if node.op == "call_method" and node.target in _METHODS:
        return _METHODS[str(node.target)], node.target == "relu_"
    return "", False
