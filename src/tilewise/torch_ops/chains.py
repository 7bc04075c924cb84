"""Layers that follow each other: found in the forward passes of modules, and served as one.

A module's own `forward` is traced by torch.fx with all its children as they are, so that nothing
but the order of their calls is looked at. Where a convolution is followed by a BatchNorm, an
addition or an activation, or a linear layer by an activation, the module gets a class of its own
whose `forward` calls a `Chain` in their place; where such a convolution ends a container whose
result is added to something, a `Tail`. Modules that cannot be traced stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from tilewise.torch_ops.finding import Link, find_chains
from tilewise.torch_ops.fused import has_hooks
from tilewise.torch_ops.tails import FORWARD
from tilewise.torch_ops.tracing import looks_at_inputs, traced

READY = "_tilewise_ready"
_SCALARS = (bool, int, float, str, type(None))
_is_traced = torch.compiler.is_dynamo_compiling


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
