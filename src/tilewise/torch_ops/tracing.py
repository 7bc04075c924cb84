"""Forward passes of modules as graphs, where a graph is all there is to them.

A module's own `forward` is traced by torch.fx with all its children as calls. What a graph does not
show is looked for: a pass that keeps what it computes, switches gradients or autocast along the
way, or is not the same twice stays as it is.
"""

from __future__ import annotations

import gc
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakSet

import torch
from torch import fx, nn

_DEVICES = ("cpu", "cuda")
_HOLD = (dict, list, set, OrderedDict)


class _Value(fx.Proxy):
    """What a traced pass computes with; overwriting it is written down, which fx leaves out."""


def _overwriting(target: Any) -> Callable[[_Value, Any], Any]:
    def call(self: _Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Value, f"__i{_name}__", _overwriting(getattr(operator, f"i{_name}")))


class _UnlikeError(Exception):
    """A pass that is not the same wherever it is called."""


class _Alone(fx.Tracer):
    """Traces one module's own forward; its children are calls."""

    proxy_buffer_attributes = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.traced_func_name = name
        self._around, self._values = _surroundings(), WeakSet[_Value]()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        value = _Value(node, self)
        if node.op != "get_attr":  # fx keeps those itself
            self._values.add(value)
        return value

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _surroundings() != self._around:
            raise _UnlikeError("autocast or gradients are switched along the way")
        return super().create_node(*args, **kwargs)

    def trace_alone(self, module: nn.Module) -> fx.Graph:
        """The graph of a pass that keeps nothing of what it computes."""
        graph = self.trace(module)
        for generation in (1, 2):  # unpacking leaves frames that hold themselves
            if len(self._values):
                gc.collect(generation)
        if len(self._values):
            raise _UnlikeError("something that was computed is kept")
        return graph


def _surroundings() -> tuple[Any, ...]:
    """What a pass may switch for a part of itself, which no graph shows."""
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled(device) for device in _DEVICES),
        *(torch.get_autocast_dtype(device) for device in _DEVICES),
    )


def traced(module: nn.Module, name: str) -> fx.Graph | None:
    """The graph of a module's pass, the same with gradients and under autocast, or None."""
    before, graph, again = _state(module), None, None
    try:
        with torch.enable_grad():
            graph = _Alone(name).trace_alone(module)
        with torch.no_grad(), _other_autocast():
            again = _Alone(name).trace_alone(module)
    except Exception:  # whatever a forward pass does with tensors that are none
        graph = None
    return None if _changed(module, before) or str(graph) != str(again) else graph


@contextmanager
def _other_autocast() -> Iterator[None]:
    """Autocast where there is none, and none where there is one."""
    before = [torch.is_autocast_enabled(device) for device in _DEVICES]
    for device, was in zip(_DEVICES, before, strict=True):
        torch.set_autocast_enabled(device, not was)
    try:
        yield
    finally:
        for device, was in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device, was)


def looks_at_inputs(forward: Any) -> bool:
    """Whether a forward pass may ask what it was given, which tracing would answer for good."""
    given = list(inspect.signature(forward).parameters.values())[1:]
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = getattr(getattr(forward, "__code__", None), "co_names", ("isinstance",))
    return bool(
        any(one.kind is not plain or one.default is not one.empty for one in given)
        or {"isinstance", "is_tensor"} & set(names)
    )


def _state(owner: nn.Module) -> dict[str, Any]:
    """What a module holds, one level down."""
    return {name: copy(v) if type(v) in _HOLD else v for name, v in owner.__dict__.items()}


def _changed(owner: nn.Module, before: dict[str, Any]) -> bool:
    """Whether a module holds anything else than before; what was put there is taken back."""
    found = False
    for name in set(owner.__dict__) - set(before):
        del owner.__dict__[name]
        found = True
    for name, was in before.items():
        now: Any = owner.__dict__.get(name)
        if type(was) in _HOLD and type(now) is type(was):
            if _entries(now) != _entries(was):
                now.clear()
                (now.extend if isinstance(now, list) else now.update)(was)
                found = True
        elif now is not was:
            owner.__dict__[name] = was
            found = True
    return found


def _entries(held: Any) -> Any:
    """Which objects a collection holds."""
    if isinstance(held, dict):
        return [(key, id(value)) for key, value in held.items()]
    return [*map(id, held)] if isinstance(held, list) else held
