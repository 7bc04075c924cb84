"""One line for an existing model: its linear and convolution layers compute with tilewise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.core.tensors import view
from tilewise.dispatch.remembered import CALLS
from tilewise.errors import InputError, ProblemError
from tilewise.ops.conv.infer import fixed, layout_of, settings
from tilewise.torch_ops import convolve, linear, operators
from tilewise.torch_ops.aligned import aligned
from tilewise.torch_ops.calls import is_capturing
from tilewise.torch_ops.casting import CASTS
from tilewise.torch_ops.chains import fuse as fuse_chains
from tilewise.torch_ops.chains import unfuse
from tilewise.torch_ops.convolutions import Layer, convolution
from tilewise.torch_ops.fallback import PLAIN
from tilewise.torch_ops.layers import (
    ALWAYS,
    PLAIN_CLASS,
    SERVED,
    Asked,
    Served,
    by_pytorch,
    decide,
    needs_gradient,
)
from tilewise.torch_ops.products import NATIVE
from tilewise.torch_ops.registering import is_seen, transform

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_is_traced = torch.compiler.is_dynamo_compiling
_is_autocast = torch._C._is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled
_apply: Callable[..., Tensor] = operators.convolution.apply  # type: ignore[attr-defined]
MOST = 256
"""Decisions that a layer keeps; inputs of ever new shapes cost a decision each."""

_PLAIN = {*PLAIN, type(None)}
_Key = tuple[Any, ...]


def _key(x: Tensor) -> _Key:
    """All that decides who serves; quick, as it is asked before every call."""
    if _is_autocast():
        kind = x.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    else:
        cast = None
    wants_x, grad = x.requires_grad, _is_grad_enabled()
    return (x.shape, x.stride(), x.dtype, x.device, wants_x, grad, cast, CALLS.generation)


def _served(layer: Any, x: Tensor, key: _Key) -> Served:
    """Decides who serves from now on."""
    held: dict[_Key, Served] = layer.__dict__[SERVED]
    is_plain = type(x) in PLAIN and type(layer.weight) in PLAIN and transform() is None
    if not is_plain or is_capturing(x):
        return by_pytorch("tensors of another kind than PyTorch's plain ones")
    asked = _asked(layer, x, cast=key[-2])
    found = decide(asked) if asked is not None else by_pytorch("shapes that do not go together")
    if layer.__dict__.get(ALWAYS) and asked is not None:
        found = Served(is_ours=True, why="asked for always")
    if len(held) >= MOST:
        held.clear()
    # The generation grows where the first dispatcher of a process is made, by deciding itself.
    held[(*key[:-1], CALLS.generation)] = found
    return found


def _asked(layer: Any, x: Tensor, cast: torch.dtype | None) -> Asked | None:
    weight, is_conv = layer.weight, not isinstance(layer, nn.Linear)
    rank = len(layer.stride) if is_conv else 0
    if x.dim() != (rank + 2 if is_conv else x.dim()) or not x.dim() or 0 in x.shape:
        return None
    kinds = {x.dtype, weight.dtype}
    if x.layout is not torch.strided or x.device != weight.device:
        return None
    if len(kinds) > 1 and (cast is None or kinds - NATIVE):  # autocast makes them alike
        return None
    grad = _is_grad_enabled()
    common: dict[str, Any] = {
        "x": tuple(x.shape),
        "w": tuple(weight.shape),
        "dtype": cast or x.dtype,
        "device": x.device,
        "wants_x": grad and x.requires_grad,
        "wants_w": grad and weight.requires_grad,
    }
    if not is_conv:
        return Asked(kind="linear", **common) if x.shape[-1] == weight.shape[1] else None
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        sides = layer._reversed_padding_repeated_twice[::-1]
        sizes = zip(x.shape[2:], sides[::2], sides[1::2], strict=True)
        common["x"] = (*x.shape[:2], *(n + low + high for n, low, high in sizes))
        padding = 0
    given = (layer.stride, padding, layer.dilation, layer.groups)
    common["has_bias"] = layer.bias is not None
    return Asked(kind="conv", layout=layout_of(view(x)), settings=given, **common)


class Linear(nn.Linear):
    """`nn.Linear` by tilewise where it is expected to be faster."""

    _tilewise_plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # PyTorch's name
        if not _is_traced() and isinstance(input, Tensor):
            key = _key(input)
            served = self.__dict__[SERVED].get(key) or _served(self, input, key)
            if served.is_ours:
                return linear(input, self.weight, self.bias)
        return functional.linear(input, self.weight, self.bias)


def _convolve(layer: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
    """A layer's convolution where it is ours; edges other than zeros are padded first."""
    if _is_traced() or not isinstance(x, Tensor):
        return None
    key = _key(x)
    served = layer.__dict__[SERVED].get(key) or _served(layer, x, key)
    if not served.is_ours:
        return None
    if layer.padding_mode == "zeros":
        settled = fixed(layer.stride, layer.padding, layer.dilation, layer.groups)
        sizes = None if settled is None else _sizes(w.shape, *settled)
        is_plain = type(x) in PLAIN and type(w) in PLAIN and type(bias) in _PLAIN
        if sizes is not None and is_plain and x.dtype in NATIVE and not is_seen():
            return _straight(key[6], x, w, bias, sizes)
    padding, rank = layer.padding, len(layer.stride)
    if layer.padding_mode != "zeros":
        twice = layer._reversed_padding_repeated_twice
        x, padding = nn.functional.pad(x, twice, mode=layer.padding_mode), (0,) * rank
    given = (layer.stride, padding, layer.dilation, layer.groups)
    return convolve(rank, x, w, bias, *given, deterministic=False)


@cache
def _sizes(w: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    """A layer's settings, one for each dimension; None where kernels take no such padding."""
    try:
        return *settings(w, len(w) - 2, stride, padding, dilation), groups
    except ProblemError:
        return None


def _straight(
    cast: torch.dtype | None, x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer
) -> Tensor:
    """What `convolve` comes to, once a layer has decided: its key has asked all the rest."""
    if cast is not None:
        x = x if x.dtype is cast else x.to(cast)
        w = w if w.dtype is cast else CASTS.get(w, cast)
        bias = bias if bias is None or bias.dtype is cast else CASTS.get(bias, cast)
    if _is_grad_enabled() and needs_gradient(x, w, bias):
        result: Tensor = _apply(x, w, bias, None, "none", *layer, False)
        return result
    bias = bias if bias is None else bias.resolve_neg()
    return convolution(x.resolve_neg(), w.resolve_neg(), bias, layer)


class Conv1d(nn.Conv1d):
    """`nn.Conv1d` by tilewise where it is expected to be faster."""

    _tilewise_plain_class = nn.Conv1d

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ours = _convolve(self, x, weight, bias)
        return super()._conv_forward(x, weight, bias) if ours is None else ours


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` by tilewise where it is expected to be faster."""

    _tilewise_plain_class = nn.Conv2d

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ours = _convolve(self, x, weight, bias)
        return super()._conv_forward(x, weight, bias) if ours is None else ours


class Conv3d(nn.Conv3d):
    """`nn.Conv3d` by tilewise where it is expected to be faster."""

    _tilewise_plain_class = nn.Conv3d

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ours = _convolve(self, x, weight, bias)
        return super()._conv_forward(x, weight, bias) if ours is None else ours


OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}
"""PyTorch's layers and what they become; subclasses of users stay what they are."""


def patch(model: AnyModule, *, always: bool = False, fuse: bool = False) -> AnyModule:
    """Makes the linear and convolution layers of `model` use tilewise, and returns the model.

    Each layer decides once for every shape it sees: where PyTorch's routine is expected to be as
    fast, the call stays PyTorch's own. `layers(model)` shows what was decided; with `always`
    tilewise serves whatever it can. Parameters, buffers, hooks and names stay as they are, so
    optimizers and checkpoints do too.

    With `fuse`, neighbouring layers are served as one: BatchNorm, additions and activations after
    convolutions, activations after linear layers. They are found by tracing the forward pass of
    each of the model's modules; branches that depend on anything but the inputs and the module's
    own settings are fixed at that time. Modules that cannot be traced stay as they are.
    """
    for module in _modules(model):
        other = OURS.get(type(module))
        if other is not None:
            module.__class__ = other
        if PLAIN_CLASS in type(module).__dict__:
            module.__dict__[SERVED] = {}
            module.__dict__[ALWAYS] = always
        if not fuse:
            unfuse(module)
    if fuse:
        fuse_chains(list(model.modules()))
    return model


def unpatch(model: AnyModule) -> AnyModule:
    """Undoes `patch`."""
    for module in _modules(model):
        unfuse(module)
        other = type(module).__dict__.get(PLAIN_CLASS)
        if other is not None:
            module.__class__ = other
            for name in (SERVED, ALWAYS):
                module.__dict__.pop(name, None)
    return model


def _modules(model: Any) -> Iterator[nn.Module]:
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is not a model; pass a torch.nn.Module")
    return model.modules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLayer:
    """One layer at one shape."""

    layer: str
    kind: str
    input: tuple[int, ...]
    dtype: str
    with_gradients: bool
    served: Served


class Layers(tuple[ShownLayer, ...]):
    """What serves each layer of a patched model; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "no layer was served yet: patch the model, and run it once"
        return aligned(("layer", "input", "served by", "gain us", "why"), map(_cells, self))


def _cells(row: ShownLayer) -> tuple[str, ...]:
    shape = (
        "x".join(map(str, row.input))
        + f" {row.dtype}{' + gradients' if row.with_gradients else ''}"
    )
    gain = f"{row.served.gain_us:.1f}" if row.served.gain_us else ""
    by = "tilewise" if row.served.is_ours else "PyTorch"
    return (f"{row.layer} ({row.kind})", shape, by, gain, row.served.why)


def _latest(held: dict[_Key, Served]) -> dict[_Key, Served]:
    """One decision for each kind of input: whatever grew stale was decided again."""
    return {key[:-1]: served for key, served in held.items()}


def layers(model: nn.Module) -> Layers:
    """A table of what serves each layer of a patched model, for every shape it has seen."""
    return Layers(
        ShownLayer(
            layer=name,
            kind=type(module).__name__,
            input=tuple(key[0]),
            dtype=str(key[6] or key[2]).removeprefix("torch."),
            with_gradients=bool(key[5]),
            served=served,
        )
        for name, module in (_modules(model), model.named_modules())[1]
        for key, served in _latest(module.__dict__.get(SERVED, {})).items()
    )
