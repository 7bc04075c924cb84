"""Layers that follow each other: found in the forward passes of modules, and served as one.

A module's own `forward` is traced by torch.fx with all its children as they are, so that nothing
but the order of their calls is looked at. Where a convolution is followed by a BatchNorm, an
addition or an activation, or a linear layer by an activation, the module gets a class of its own
whose `forward` calls a `Chain` in their place; where such a convolution ends a container whose
result is added to something, a `Tail`. Modules that cannot be traced stay as they are.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from tilewise.torch_ops.fused import Chain, ConvChain, LinearChain, has_hooks, is_served
from tilewise.torch_ops.gated import Gated, GatedLinear
from tilewise.torch_ops.layers import THEIRS
from tilewise.torch_ops.tails import FORWARD, Tail, is_container, last_layers
from tilewise.torch_ops.tracing import looks_at_inputs, traced
from tilewise.torch_ops.weighed import Weighed

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
"""By the rank of the convolution before; subclasses, synchronised ones among them, stay."""
RANKS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
READY = "_tilewise_ready"
_MODULES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((functional.relu, torch.relu, torch.relu_), "relu"),
    functional.silu: "silu",
    functional.gelu: "gelu",
}
_METHODS = {"relu": "relu", "relu_": "relu"}
_NEW = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, torch.add)
"""Functions whose results lie in memory of their own."""
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_SCALARS = (bool, int, float, str, type(None))
_MEMORY = "tilewise memory"
"""Where a node keeps one that stands for all whose results may lie in the same memory."""
_is_traced = torch.compiler.is_dynamo_compiling


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
    _mark_memory(owner, graph)
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node in taken:
            continue
        layer = _module(owner, node)
        kind = getattr(type(layer), THEIRS, type(layer))
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
    container = _module(owner, node)
    layer, norm = last_layers(container)
    rank = RANKS.get(getattr(type(layer), THEIRS, type(layer)), 0)
    if not rank or not is_served(layer) or type(norm) not in (NORMS[rank], type(None)):
        return None
    nodes = _up_to_addition(owner, node, taken)
    if not nodes:
        return None
    addition = nodes[-1]
    user = _only_user(addition)
    activation, in_place = _activation(owner, user)
    if user is not None and activation:
        nodes.append(user)
    if not _may_wait(nodes[:-1], nodes[-1], order):
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
    drops = [user for user in (_only_user(node),) if user is not None and _drops(owner, user)]
    nodes = _up_to_addition(owner, drops[-1] if drops else node, taken)
    nodes = [node, *nodes] if drops and nodes else nodes
    if not nodes or not _may_wait(nodes[:-1], nodes[-1], order):
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
    user = _only_user(node) if node is not None else None
    if user is None or not _is_product(user) or user.kwargs or len(user.args) != 2:
        return None
    others = [one for one in user.args if one is not node]
    is_result = [isinstance(one, fx.Node) and one.op != "get_attr" for one in others]
    return user if is_result == [True] else None


def _after_gate(owner: nn.Module, node: fx.Node, order: dict[fx.Node, int]) -> Found | None:
    """An activation, and the product of what it gives with something else."""
    activation, in_place = _activation(owner, node)
    product = _gated(node) if activation and not in_place else None
    if product is None or not _may_wait([node], product, order):
        return None
    return Found(nodes=(node, product), chain=Gated(activation=activation), addition=product)


def _parameter(owner: nn.Module, node: fx.Node) -> Any:
    """The module's own parameter that a node is, or None."""
    return owner._parameters.get(str(node.target)) if node.op == "get_attr" else None


def _up_to_addition(owner: nn.Module, node: fx.Node, taken: set[fx.Node]) -> list[fx.Node]:
    """A node and those after it that change nothing, up to an addition; empty without one."""
    nodes = [node]
    user = _only_user(node)
    while user is not None and _changes_nothing(owner, user):
        nodes.append(user)
        user = _only_user(user)
    if user is None or user in taken or not _is_addition(user, nodes[-1]):
        return []
    return [*nodes, user]


def _changes_nothing(owner: nn.Module, node: fx.Node) -> bool:
    """Whether a child gives what it is given, as dropped branches do when nothing is trained."""
    module = _module(owner, node)
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
    module = _module(owner, node)
    if module is None or "." in str(node.target) or has_hooks(module):
        return None
    if type(module) in _MODULES or module._modules or looks_at_inputs(type(module).forward):
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
        user = _only_user(nodes[-1])
        return user if user is not None and _may_wait(nodes, user, order) else None

    user = following()
    if user is not None and type(_module(owner, user)) is NORMS[rank]:
        nodes.append(user)
        norm = str(user.target)
    user = following()
    if user is not None and user not in taken and _is_addition(user, nodes[-1]):
        nodes.append(user)
        addition = user
    user = following()
    activation, in_place = _activation(owner, user)
    if user is not None and activation:
        nodes.append(user)
    if len(nodes) == 1:
        return None
    adds_in_place = addition is not None and addition.target is operator.iadd
    chain = ConvChain(
        layer=type(_module(owner, node)),
        norm=type(owner.get_submodule(norm) if norm else None),
        activation=activation or "none",
        in_place=(adds_in_place, in_place),
    )
    return Found(
        nodes=tuple(nodes), chain=chain, layer=str(node.target), norm=norm, addition=addition
    )


def _after_linear(owner: nn.Module, node: fx.Node, order: dict[fx.Node, int]) -> Found | None:
    following = _only_user(node)
    activation, in_place = _activation(owner, following)
    if following is None or not activation or not _may_wait([node], following, order):
        return None
    product = None if in_place else _gated(following)
    if product is not None:
        return _both_products(owner, node, following, product, order)
    chain = LinearChain(
        layer=type(_module(owner, node)),
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
    kinds = [type(_module(owner, one)) for one in (node, other)]
    if any(getattr(kind, THEIRS, kind) is not nn.Linear for kind in kinds):
        return None
    nodes = sorted((node, following, other, product), key=order.__getitem__)
    is_alone = _only_user(other) is product and other.args == node.args
    if not is_alone or not _may_wait(nodes, product, order):
        return None
    return Found(
        nodes=tuple(nodes),
        chain=GatedLinear(activation=_activation(owner, following)[0]),
        layer=str(node.target),
        norm=str(other.target),
    )


def _module(owner: nn.Module, node: fx.Node) -> nn.Module | None:
    """The child that a node calls with one tensor, or None."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return owner.get_submodule(str(node.target))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_addition(node: fx.Node, own: fx.Node) -> bool:
    """Whether a node adds something to `own`, and overwrites nothing else."""
    if node.op != "call_function" or node.target not in _ADDITIONS or node.kwargs:
        return False
    if len(node.args) != 2 or not all(isinstance(one, fx.Node) for one in node.args):
        return False
    one, two = node.args
    return one is not two and (one is own or node.target is not operator.iadd)


def _may_wait(nodes: Sequence[fx.Node], last: fx.Node, order: dict[fx.Node, int]) -> bool:
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


def _mark_memory(owner: nn.Module, graph: fx.Graph) -> None:
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
    if any(_activation(owner, node)[:1]):
        return not _activation(owner, node)[1]
    module = _module(owner, node)
    kind = getattr(type(module), THEIRS, type(module))
    return kind in (*RANKS, *NORMS.values(), nn.Linear) and not has_hooks(module)


def _activation(owner: nn.Module, node: fx.Node | None) -> tuple[str, bool]:
    """The activation that a node is, and whether it overwrites; the name is empty for none."""
    if node is None:
        return "", False
    module = _module(owner, node)
    if module is not None and ("." in str(node.target) or has_hooks(module)):
        return "", False  # `_sign` tells of a module's own children when they change
    if type(module) in _MODULES and getattr(module, "approximate", "none") == "none":
        return _MODULES[type(module)], bool(getattr(module, "inplace", False))
    is_plain = len(node.args) == 1 and node.kwargs.get("approximate", "none") == "none"
    if not is_plain or set(node.kwargs) - {"inplace", "approximate"}:
        return "", False
    in_place = node.kwargs.get("inplace", False) is True
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target], in_place or node.target is torch.relu_
    if node.op == "call_method" and node.target in _METHODS:
        return _METHODS[str(node.target)], node.target == "relu_"
    return "", False


def rewrite(owner: nn.Module) -> tuple[Callable[..., Any], tuple[Link, ...]] | None:
    """The module's forward pass with its chains served as one, or None where there are none."""
    name = FORWARD if hasattr(type(owner), FORWARD) else "forward"
    if looks_at_inputs(getattr(type(owner), name)):
        return None
    graph = traced(owner, name)
    if graph is None:
        return None
    found = list(find_chains(owner, graph))
    for at, one in enumerate(found):
        one.chain.__name__ = f"chain_{at}"
        with graph.inserting_before(one.nodes[-1]):
            layer = graph.get_attr(one.layer) if one.layer else None
            norm = graph.get_attr(one.norm) if one.norm else None
            new = graph.call_function(one.chain, (layer, norm, one.x, *one.residual))
        one.nodes[-1].replace_all_uses_with(new)
        for node in reversed(one.nodes):
            graph.erase_node(node)
    if not found:
        return None
    made: Any = type(fx.GraphModule(owner, graph)).forward
    return made, tuple(one.chain for one in found)


def _sign(module: Any) -> tuple[Any, ...]:
    """What a rewritten pass depends on of a module: its mode, its children, who watches them."""
    own = module.__dict__
    return (
        module.training,
        *map(own.get, own[READY].names),
        *[
            (
                type(child),
                child.training,
                has_hooks(child),
                getattr(child, "inplace", 0),
                getattr(child, "approximate", 0),
            )
            for child in module._modules.values()
        ],
    )


class Ready:
    """Rewritten forward passes of a module, by `_sign`; made anew for a copy of it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.passes: dict[Any, Callable[..., Any]] = {}
        self.names = names
        """Numbers and words of the module that its pass may read: a graph holds their values."""

    def __reduce__(self) -> Any:
        return Ready, (self.names,)


def _settings(module: nn.Module) -> tuple[str, ...]:
    """Which of a fused module's numbers and words its own forward pass may read."""
    kind, asked = type(module), [FORWARD]
    for name in asked:  # methods that it calls are looked at, too
        method: Any = getattr(kind, name, None)
        code = getattr(inspect.unwrap(method), "__code__", None)
        asked += [one for one in getattr(code, "co_names", ()) if one not in asked]
    held = vars(module)
    found = [one for one in asked if one in held or hasattr(kind, one)]
    return tuple(
        one
        for one in found
        if type(held.get(one, getattr(kind, one, None))) in _SCALARS and one != "training"
    )


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the module's own: left alone for compilers, which fuse by themselves."""
    if not _is_traced():
        passes = self.__dict__[READY].passes
        sign = _sign(self)
        run = passes.get(sign)
        if run is None:
            made = rewrite(self)
            run = passes[sign] = made[0] if made else getattr(type(self), FORWARD)
        return run(self, *args, **kwargs)
    return getattr(type(self), FORWARD)(self, *args, **kwargs)


def _reduce(self: Any, protocol: Any) -> Any:
    """A class made here cannot be found by its name: it is made again from the one before."""
    _, _, *rest = super(type(self), self).__reduce_ex__(protocol)
    return _remade, (type(self).__bases__[0],), *rest


def _remade(before: type[nn.Module]) -> nn.Module:
    kind = fused_class(before)
    return kind.__new__(kind)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fused_class(before: type[nn.Module]) -> type[nn.Module]:
    """A subclass, of the same name, whose forward pass is rewritten."""
    if before not in _classes:
        _classes[before] = _made_class(before)
    return _classes[before]


def _made_class(before: type[nn.Module]) -> type[nn.Module]:
    parts = {
        "forward": _forward,
        FORWARD: before.forward,
        "__reduce_ex__": _reduce,
        "__module__": before.__module__,
        "__qualname__": before.__qualname__,
    }
    return type(before.__name__, (before,), parts)


def is_fused(module: nn.Module) -> bool:
    """Whether the module's forward pass is rewritten."""
    return FORWARD in type(module).__dict__


def fuse(modules: Sequence[nn.Module]) -> None:
    """Rewrites the forward passes of those modules that have chains."""
    for module in modules:
        if not is_fused(module):
            if not (_is_ours_to_change(module) and _has_chains(module)):
                continue
            module.__class__ = fused_class(type(module))
        module.__dict__[READY] = Ready(_settings(module))


def _has_chains(module: nn.Module) -> bool:
    """Whether the module has some in training or out of it."""
    family = [module, *module.children()]
    before = [one.training for one in family]
    try:
        for mode in (True, False):
            for one in family:
                one.training = mode
            if rewrite(module) is not None:
                return True
        return False
    finally:
        for one, was in zip(family, before, strict=True):
            one.training = was


def unfuse(module: nn.Module) -> None:
    """Undoes `fuse` of one module."""
    if is_fused(module):
        module.__class__ = type(module).__bases__[0]
        module.__dict__.pop(READY, None)


def _is_ours_to_change(module: nn.Module) -> bool:
    is_other = isinstance(module, torch.jit.ScriptModule | fx.GraphModule)
    return bool(module._modules) and not is_other and "forward" not in module.__dict__
