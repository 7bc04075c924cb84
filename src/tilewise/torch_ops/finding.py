"""Which nodes of a traced forward pass make a chain that is served as one.

A convolution followed by a BatchNorm, an addition or an activation; a linear layer followed by an
activation or a product; and an addition to what a container gives that ends with a convolution, or
to a product with a parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from tilewise.torch_ops.fused import Chain, ConvChain, LinearChain, has_hooks, is_served
from tilewise.torch_ops.gated import Gated, GatedLinear
from tilewise.torch_ops.layers import PLAIN_CLASS
from tilewise.torch_ops.nodes import (
    ACTIVATIONS,
    NORMS,
    RANKS,
    activation_of,
    child,
    mark_memory,
    may_wait,
    only_user,
)
from tilewise.torch_ops.tails import Tail, is_container, last_layers
from tilewise.torch_ops.tracing import looks_at_inputs, traced
from tilewise.torch_ops.weighed import Weighed

_ADDITIONS = (operator.add, operator.iadd, torch.add)
Link = Chain | Tail | Weighed | Gated | GatedLinear
"""What is called in place of several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A chain in a graph: its nodes from the first layer on, and what it is made of."""

    nodes: tuple[fx.Node, ...]
    chain: Link
    layer: str = ""
    """The child, or the parameter, that a call is given first; empty for none."""
    norm: str = ""
    addition: fx.Node | None = None
    """The last but for an activation: the addition, or product, with something else."""

    @property
    def x(self) -> Any:
        """What goes in; asked late, too."""
        first = self.nodes[0]
        if first.op == "call_module":
            return first.args[0]
        return next(one for one in first.args if getattr(one, "target", None) != self.layer)

    @property
    def residual(self) -> tuple[Any, ...]:
        """What is added; asked late, as another chain may have taken its place."""
        own = {*self.nodes}
        return tuple(one for one in (self.addition.args if self.addition else ()) if one not in own)


def find_chains(owner: nn.Module, graph: fx.Graph) -> Iterator[Found]:
    """The chains of a module's own forward pass."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    mark_memory(owner, graph)
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node in taken:
            continue
        layer = child(owner, node)
        kind = getattr(type(layer), PLAIN_CLASS, type(layer))
        found = None
        if kind in RANKS and is_served(layer):
            found = _after_convolution(owner, node, RANKS[kind], order, taken)
        elif kind is nn.Linear:
            found = _after_linear(owner, node, order)
        elif is_container(layer):
            found = _after_container(owner, node, order, taken)
        elif _is_product(node):
            found = _after_weights(owner, node, order, taken)
        else:
            found = _after_gate(owner, node, order)
        if found is not None:
            taken.update(found.nodes)
            yield found


def _after_container(
    owner: nn.Module, node: fx.Node, order: dict[fx.Node, int], taken: set[fx.Node]
) -> Found | None:
    """An addition to what a container gives, where that ends with a convolution."""
    container = child(owner, node)
    layer, norm = last_layers(container)
    rank = RANKS.get(getattr(type(layer), PLAIN_CLASS, type(layer)), 0)
    if not rank or not is_served(layer) or type(norm) not in (NORMS[rank], type(None)):
        return None
    nodes = _up_to_addition(owner, node, taken)
    if not nodes:
        return None
    addition = nodes[-1]
    user = only_user(addition)
    activation, in_place = activation_of(owner, user)
    if user is not None and activation:
        nodes.append(user)
    if not may_wait(nodes[:-1], nodes[-1], order):
        return None
    chain = ConvChain(
        layer=type(layer),
        norm=type(norm),
        activation=activation or "none",
        in_place=(addition.target is operator.iadd, in_place),
    )
    return Found(nodes=tuple(nodes), chain=Tail(chain), layer=str(node.target), addition=addition)


def _after_weights(
    owner: nn.Module, node: fx.Node, order: dict[fx.Node, int], taken: set[fx.Node]
) -> Found | None:
    """An addition to a product with one of the module's own parameters."""
    given = [one for one in node.args if isinstance(one, fx.Node)]
    weights = [one for one in given if isinstance(_parameter(owner, one), nn.Parameter)]
    if node.kwargs or len(given) != 2 or len(weights) != 1:
        return None
    drops = [user for user in (only_user(node),) if user is not None and _drops(owner, user)]
    nodes = _up_to_addition(owner, drops[-1] if drops else node, taken)
    nodes = [node, *nodes] if drops and nodes else nodes
    if not nodes or not may_wait(nodes[:-1], nodes[-1], order):
        return None
    if drops and not _is_next(drops[0], nodes[-1], order):
        return None
    return Found(
        nodes=tuple(nodes),
        chain=Weighed(in_place=nodes[-1].target is operator.iadd),
        layer=str(weights[0].target),
        norm=str(drops[0].target) if drops else "",
        addition=nodes[-1],
    )


def _is_next(node: fx.Node, last: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nothing may draw random numbers between two nodes, which would change places."""
    between = [one for one, at in order.items() if order[node] < at < order[last]]
    return all(one.op == "get_attr" for one in between)


def _is_product(node: fx.Node | None) -> bool:
    return node is not None and node.target in (operator.mul, torch.mul)


def _gated(node: fx.Node | None) -> fx.Node | None:
    """The product of what a node gives, and nobody else gets, with something else."""
    user = only_user(node) if node is not None else None
    if user is None or not _is_product(user) or user.kwargs or len(user.args) != 2:
        return None
    others = [one for one in user.args if one is not node]
    is_result = [isinstance(one, fx.Node) and one.op != "get_attr" for one in others]
    return user if is_result == [True] else None


def _after_gate(owner: nn.Module, node: fx.Node, order: dict[fx.Node, int]) -> Found | None:
    """An activation, and the product of what it gives with something else."""
    activation, in_place = activation_of(owner, node)
    product = _gated(node) if activation and not in_place else None
    if product is None or not may_wait([node], product, order):
        return None
    return Found(nodes=(node, product), chain=Gated(activation=activation), addition=product)


def _parameter(owner: nn.Module, node: fx.Node) -> Any:
    """The module's own parameter that a node is, or None."""
    return owner._parameters.get(str(node.target)) if node.op == "get_attr" else None


def _up_to_addition(owner: nn.Module, node: fx.Node, taken: set[fx.Node]) -> list[fx.Node]:
    """A node and those after it that change nothing, up to an addition; empty without one."""
    nodes = [node]
    user = only_user(node)
    while user is not None and _changes_nothing(owner, user):
        nodes.append(user)
        user = only_user(user)
    if user is None or user in taken or not _is_addition(user, nodes[-1]):
        return []
    return [*nodes, user]


def _changes_nothing(owner: nn.Module, node: fx.Node) -> bool:
    """Whether a child gives what it is given, as dropped branches do when nothing is trained."""
    module = child(owner, node)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return not module.training and not has_hooks(module) and "." not in str(node.target)
    between = _steps(owner, node)
    return between is not None and all(_drops_branches(one) is False for one in between)


def _drops(owner: nn.Module, node: fx.Node) -> bool:
    """Whether a child drops branches of whole samples now, and does nothing else."""
    between = _steps(owner, node)
    return between is not None and [_drops_branches(one) for one in between] == [True]


def _steps(owner: nn.Module, node: fx.Node) -> list[fx.Node] | None:
    """What a child without children and hooks does, one after the other; None where unknown."""
    module = child(owner, node)
    if module is None or "." in str(node.target) or has_hooks(module):
        return None
    if type(module) in ACTIVATIONS or module._modules or looks_at_inputs(type(module).forward):
        return None
    graph = traced(module, "forward")
    if graph is None:
        return None
    first, *between, last = graph.nodes
    is_line = all(one.args[:1] == (two,) for two, one in pairwise((first, *between, last)))
    return between if is_line else None


def _drops_branches(node: fx.Node) -> bool | None:
    """Whether a node, torchvision's stochastic depth, drops samples; None for other nodes."""
    name = getattr(node.target, "__name__", "")
    if name != "stochastic_depth" or len(node.args) != 4 or node.kwargs:
        return None
    return node.args[3] if type(node.args[3]) is bool else None


def _after_convolution(
    owner: nn.Module,
    node: fx.Node,
    rank: int,
    order: dict[fx.Node, int],
    taken: set[fx.Node],
) -> Found | None:
    nodes, norm, addition = [node], "", None

    def following() -> fx.Node | None:
        user = only_user(nodes[-1])
        return user if user is not None and may_wait(nodes, user, order) else None

    user = following()
    if user is not None and type(child(owner, user)) is NORMS[rank]:
        nodes.append(user)
        norm = str(user.target)
    user = following()
    if user is not None and user not in taken and _is_addition(user, nodes[-1]):
        nodes.append(user)
        addition = user
    user = following()
    activation, in_place = activation_of(owner, user)
    if user is not None and activation:
        nodes.append(user)
    if len(nodes) == 1:
        return None
    adds_in_place = addition is not None and addition.target is operator.iadd
    chain = ConvChain(
        layer=type(child(owner, node)),
        norm=type(owner.get_submodule(norm) if norm else None),
        activation=activation or "none",
        in_place=(adds_in_place, in_place),
    )
    return Found(
        nodes=tuple(nodes), chain=chain, layer=str(node.target), norm=norm, addition=addition
    )


def _after_linear(owner: nn.Module, node: fx.Node, order: dict[fx.Node, int]) -> Found | None:
    following = only_user(node)
    activation, in_place = activation_of(owner, following)
    if following is None or not activation or not may_wait([node], following, order):
        return None
    product = None if in_place else _gated(following)
    if product is not None:
        return _both_products(owner, node, following, product, order)
    chain = LinearChain(
        layer=type(child(owner, node)),
        norm=type(None),
        activation=activation,
        in_place=(False, in_place),
    )
    return Found(nodes=(node, following), chain=chain, layer=str(node.target))


def _both_products(
    owner: nn.Module, node: fx.Node, following: fx.Node, product: fx.Node, order: dict[fx.Node, int]
) -> Found | None:
    """A linear layer, its activation, and the product with another layer's of the same input."""
    (other,) = [one for one in product.args if one is not following]
    assert isinstance(other, fx.Node)
    kinds = [type(child(owner, one)) for one in (node, other)]
    if any(getattr(kind, PLAIN_CLASS, kind) is not nn.Linear for kind in kinds):
        return None
    nodes = sorted((node, following, other, product), key=order.__getitem__)
    is_alone = only_user(other) is product and other.args == node.args
    if not is_alone or not may_wait(nodes, product, order):
        return None
    return Found(
        nodes=tuple(nodes),
        chain=GatedLinear(activation=activation_of(owner, following)[0]),
        layer=str(node.target),
        norm=str(other.target),
    )


def _is_addition(node: fx.Node, own: fx.Node) -> bool:
    """Whether a node adds something to `own`, and overwrites nothing else."""
    if node.op != "call_function" or node.target not in _ADDITIONS or node.kwargs:
        return False
    if len(node.args) != 2 or not all(isinstance(one, fx.Node) for one in node.args):
        return False
    one, two = node.args
    return one is not two and (one is own or node.target is not operator.iadd)
