"""Chains of layers served as one: a convolution or linear layer with what follows it.

Without gradients a BatchNorm is folded into the filter, and the rest becomes the kernel's epilogue,
or one pass over the result where PyTorch's routine serves. In training a chain is one node of
autograd: the convolution, whose kernel may give the sums that the statistics need, then one pass;
backward a reduction, one pass and the convolution's gradients. Everything else, and whatever needs
to see each layer by itself, is done layer by layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import module as modules

from tilewise.core.tensors import view
from tilewise.dispatch.remembered import CALLS
from tilewise.errors import ProblemError
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.infer import fixed, layout_of, settings
from tilewise.torch_ops import convolutions, linear
from tilewise.torch_ops.activated import Activated
from tilewise.torch_ops.calls import is_capturing
from tilewise.torch_ops.convolutions import Layer, dense_strides, result_shape
from tilewise.torch_ops.fallback import PLAIN
from tilewise.torch_ops.folding import Fold
from tilewise.torch_ops.launching import why_no_kernels
from tilewise.torch_ops.layers import (
    ALWAYS,
    SERVED,
    Asked,
    Served,
    decide,
    is_worth,
    needs_gradient,
)
from tilewise.torch_ops.norm_launch import Norm
from tilewise.torch_ops.norms import TritonNorm, norm_of, normaliser
from tilewise.torch_ops.products import ACTIVATE, IN_PLACE, NATIVE
from tilewise.torch_ops.registering import is_seen
from tilewise.torch_ops.trained import ALIGNMENT, CONVOLVE, Trained, stored

Run = Callable[[Any, Any, Tensor, Tensor | None], Tensor]
"""Serves a chain: layer, norm or None, input, residual or None."""
MOST = 256
"""Ways that a chain keeps; inputs of ever new shapes cost a decision each."""
_is_autocast = torch._C._is_any_autocast_enabled
has_global_hooks: Callable[[], bool] = modules._has_any_global_hook


class Chain(ABC):
    """A layer and what follows it; the modules are given with every call."""

    __name__ = "chain"

    def __init__(
        self, *, layer: type, norm: type, activation: str, in_place: tuple[bool, bool]
    ) -> None:
        self.activation, self._layer, self._norm = activation, layer, norm
        self._adds_in_place, self._activates_in_place = in_place
        self._runs: dict[Any, Run | None] = {}

    def __call__(self, layer: Any, norm: Any, x: Any, *added: Any) -> Tensor:
        residual = added[0] if added else None
        if (
            type(x) in PLAIN
            and (not added or type(residual) in PLAIN)
            and not x.is_neg()
            and self.is_of(layer, norm)
            and not is_seen()
            and not _has_hooks(layer, norm)
        ):
            try:
                key = _key(layer, norm, x, residual)
                run = self._runs[key]
            except KeyError:
                run = self._decide(key, layer, norm, x, residual)
            except (TypeError, RuntimeError):  # settings of no integers, tensors without strides
                run = None
            if run is not None:
                return run(layer, norm, x, residual)
        return self.apart(layer, norm, x, *added)

    def is_of(self, layer: Any, norm: Any) -> bool:
        """Whether these are layers of the kind that the chain was found with."""
        return type(layer) is self._layer and type(norm) is self._norm

    def apart(self, layer: Any, norm: Any, x: Any, *added: Any) -> Tensor:
        """Layer by layer, as the model has it."""
        return self.finished(layer(x) if norm is None else norm(layer(x)), *added)

    def finished(self, result: Tensor, *added: Any) -> Tensor:
        """What follows the layers, as the model has it; anything may be added, and None fails."""
        for residual in added:
            result = result.add_(residual) if self._adds_in_place else result + residual
        name = self.activation
        return (IN_PLACE if self._activates_in_place else ACTIVATE).get(name, ACTIVATE[name])(
            result
        )

    def _decide(
        self, key: Any, layer: Any, norm: Any, x: Tensor, residual: Tensor | None
    ) -> Run | None:
        if is_capturing(x):  # nothing may be compiled now
            return None
        run, served = self.find(layer, norm, x, residual, key[6])
        if len(self._runs) >= MOST:
            self._runs.clear()
        # The generation grows where the first dispatcher of a process is made, by deciding itself.
        key = (*key[:-1], CALLS.generation)
        self._runs[key] = run
        if run is not None and served is not None and SERVED in layer.__dict__:
            layer.__dict__[SERVED][key] = served
        return run

    @abstractmethod
    def find(
        self, layer: Any, norm: Any, x: Tensor, residual: Tensor | None, cast: torch.dtype | None
    ) -> tuple[Run | None, Served | None]:
        """What serves the chain as one, and who its first layer; None where nothing does."""


class LinearChain(Chain):
    """A linear layer and an activation: one kernel at inference, in training one pass each way."""

    def find(
        self, layer: Any, norm: Any, x: Tensor, residual: Tensor | None, cast: torch.dtype | None
    ) -> tuple[Run | None, Served | None]:
        weight, kind = layer.weight, cast or x.dtype
        if type(weight) not in PLAIN or not x.numel() or not _is_bias(layer, kind, cast):
            return None, None
        if (weight.dtype != kind and cast is None) or x.shape[-1] != weight.shape[1]:
            return None, None
        size = kind.itemsize * weight.shape[0] * prod(x.shape[:-1])
        asked = Asked(
            kind="linear",
            x=tuple(x.shape),
            w=tuple(weight.shape),
            dtype=kind,
            device=x.device,
        )
        if needs_gradient(x, weight, layer.bias):
            return self._in_training(layer, x, asked, size)
        asked = replace(asked, saved_bytes=2 * size, is_chain=True)
        served = _served(layer, asked, self.activation)
        name = self.activation

        def run(layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Tensor:
            return linear(x, layer.weight, layer.bias, name)

        return (run, served) if served.is_ours else (None, None)

    def _in_training(
        self, layer: Any, x: Tensor, asked: Asked, size: int
    ) -> tuple[Run | None, Served | None]:
        """One pass backward gives the bias's gradient, too; without it nothing is gained."""
        bias, kind = layer.bias, asked.dtype
        if bias is None or bias.is_neg() or not bias.requires_grad:
            return None, None
        if not {kind, bias.dtype} <= NATIVE or not bias.is_contiguous():
            return None, None
        if why_no_kernels(x.device) is not None:
            return None, None
        if not (layer.__dict__.get(ALWAYS) or is_worth(size, x.device, with_gradients=True)):
            return None, None
        wants_w = layer.weight.requires_grad
        asked = replace(asked, wants_x=x.requires_grad, wants_w=wants_w)
        served = _served(layer, asked, f"bias, {self.activation}")
        multiply = linear if served.is_ours else functional.linear
        return Activated(x, layer, kind, self.activation, multiply), served


class ConvChain(Chain):
    """A convolution, perhaps a BatchNorm, perhaps a residual, perhaps an activation."""

    def __init__(self, **links: Any) -> None:
        super().__init__(**links)
        self._folds: dict[Any, Fold] = {}

    def find(
        self, layer: Any, norm: Any, x: Tensor, residual: Tensor | None, cast: torch.dtype | None
    ) -> tuple[Run | None, Served | None]:
        call = _call_of(layer, x, residual, cast)
        if call is None:
            return None, None
        parameters = () if norm is None else (norm.weight, norm.bias)
        wants = needs_gradient(x, layer.weight, layer.bias, residual, *parameters)
        if norm is not None and (norm.training or norm.running_mean is None):
            return self._in_training(layer, norm, call, wants)
        is_apart = wants or (norm is not None and not _fits(norm, call))
        return (None, None) if is_apart else self._folded(layer, norm, call)

    def _folded(self, layer: Any, norm: Any, call: Given) -> tuple[Run | None, Served | None]:
        size = prod(call.shape) * call.x.element_size()
        name, rank, kind, sizes = self.activation, call.rank, call.x.dtype, call.sizes
        after = Epilogue(
            bias=norm is not None or layer.bias is not None,
            residual=call.residual is not None,
            activation=name,
        )
        asked = replace(call.asked, saved_bytes=2 * size, epilogue=after)
        links = (*(() if norm is None else ("BatchNorm",)), *self._links(call))
        served = _served(layer, asked, ", ".join(links))
        fold = self._folds.setdefault((call.x.device, kind, call.layout), Fold(kind, call.layout))
        convolve = convolutions.convolution if served.is_ours else CONVOLVE[rank - 1]
        layered = (sizes,) if served.is_ours else sizes

        def fused(layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Tensor:
            w, bias, _ = fold.get(layer, norm)
            x = x if x.dtype is kind else x.to(kind)
            return convolutions.convolution(x, w, bias, sizes, residual=residual, activation=name)

        def in_one_pass(layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Tensor:
            w, _, stats = fold.get(layer, norm)
            z = convolve(x if x.dtype is kind else x.to(kind), w, None, *layered)
            return passes.apply(stored(z, strides), stats, residual)

        def by_pytorch(layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Tensor:
            w, bias, _ = fold.get(layer, norm)
            z = CONVOLVE[rank - 1](x if x.dtype is kind else x.to(kind), w, bias, *sizes)
            if residual is not None:
                z += residual
            return IN_PLACE.get(name, ACTIVATE[name])(z)

        is_apart = call.why_not_packed() is not None
        if served.is_ours:
            w = fold.get(layer, norm)[0]
            if is_apart or convolutions.is_fused(call.x, w, sizes, after):
                return fused, served
        elif is_apart:
            return by_pytorch, served
        strides = dense_strides(call.shape, call.layout)
        passes = TritonNorm(self._applied(call), call.shape, strides, call.x)
        return in_one_pass, served

    def _applied(self, call: Given) -> Norm:
        """The one pass over a result of PyTorch's."""
        return Norm(
            pixels=prod(call.shape) // call.shape[1],
            channels=call.shape[1],
            dtype=view(call.x).dtype,
            has_residual=call.residual is not None,
            activation=self.activation,
        )

    def _in_training(
        self, layer: Any, norm: Any, call: Given, wants: bool
    ) -> tuple[Run | None, Served | None]:
        is_lost = call.residual is not None and self.activation not in ("none", "relu")
        if is_lost or layer.bias is not None or not _is_normal(norm, call):
            return None, None
        if call.why_not_packed() is not None and not layer.__dict__.get(ALWAYS):
            return None, None
        size = prod(call.shape) * call.x.element_size()  # read once more for its statistics
        asked = replace(call.asked, saved_bytes=size, epilogue=Epilogue(sums=True))
        if wants:
            wants_w = layer.weight.requires_grad
            asked = replace(asked, wants_x=call.x.requires_grad, wants_w=wants_w)
        served = _served(layer, asked, ", ".join(("BatchNorm", *self._links(call))))
        w = layer.weight.detach().to(call.x.dtype)
        gives_sums = served.is_ours and convolutions.is_fused(
            call.x, w, call.sizes, Epilogue(sums=True)
        )
        strides = dense_strides(call.shape, call.layout)
        own = norm_of(
            *(norm, call.x, call.shape),
            activation=self.activation,
            has_residual=call.residual is not None,
            has_sums=gives_sums,
        )
        bound = normaliser(own, call.shape, strides, call.x)
        chain = Trained(call.x, call.sizes, bound, strides, is_ours=served.is_ours)
        return chain, served

    def _links(self, call: Given) -> tuple[str, ...]:
        added = () if call.residual is None else ("addition",)
        return (*added, *(() if self.activation == "none" else (self.activation,)))


class Given:
    """A call of a convolution's chain, in the type it is computed in."""

    def __init__(self, layer: Any, x: Tensor, residual: Tensor | None, sizes: Layer) -> None:
        self.x, self.residual, self.sizes = x, residual, sizes
        self.rank, self.layout = x.dim() - 2, layout_of(view(x))
        self.shape: tuple[int, ...] = result_shape(x.shape, layer.weight.shape, sizes)
        self.asked = Asked(
            kind="conv",
            x=tuple(x.shape),
            w=tuple(layer.weight.shape),
            dtype=x.dtype,
            device=x.device,
            layout=self.layout,
            settings=sizes,
            is_chain=True,
        )

    def why_not_packed(self) -> str | None:
        """Why our passes over results cannot serve, or None."""
        if self.layout != "nhwc":
            return "channels are not innermost"
        residual, strides = self.residual, dense_strides(self.shape, self.layout)
        if residual is not None and (
            residual.stride() != strides or residual.data_ptr() % ALIGNMENT
        ):
            return "the residual is stored in another way than the result"
        return why_no_kernels(self.x.device)


def _call_of(
    layer: Any, x: Tensor, residual: Tensor | None, cast: torch.dtype | None
) -> Given | None:
    """The call as chains take it, or None."""
    weight, kind = layer.weight, cast or x.dtype
    rank = weight.dim() - 2
    if type(weight) not in PLAIN or weight.is_neg() or kind not in NATIVE:
        return None
    if not is_served(layer) or not _is_bias(layer, kind, cast):
        return None
    if x.dim() != rank + 2 or not x.numel():
        return None
    if weight.device != x.device or (cast is None and weight.dtype != kind):
        return None
    if x.layout is not torch.strided or x.shape[1] != weight.shape[1] * layer.groups:
        return None
    sizes = settings(tuple(weight.shape), rank, layer.stride, layer.padding, layer.dilation)
    call = Given(layer, x.detach().to(kind), residual, (*sizes, layer.groups))
    if min(call.shape) < 1:
        return None
    if residual is not None:
        is_alike = residual.dtype == kind and residual.device == x.device
        is_plain = type(residual) in PLAIN and not residual.is_neg()
        if not is_plain or tuple(residual.shape) != call.shape or not is_alike:
            return None
    return call


def is_served(layer: Any) -> bool:
    """Whether a convolution is one that epilogues are for: zeros at the edges, even padding."""
    rank = layer.weight.dim() - 2
    try:
        settings(tuple(layer.weight.shape), rank, layer.stride, layer.padding, layer.dilation)
    except ProblemError:
        return False
    return bool(layer.padding_mode == "zeros")


def _is_bias(layer: Any, kind: torch.dtype, cast: torch.dtype | None) -> bool:
    """Whether a layer's bias, if any, goes with its weight and what it computes in."""
    bias, weight = layer.bias, layer.weight
    if bias is None:
        return True
    is_plain = type(bias) in PLAIN and bias.device == weight.device
    return is_plain and bias.shape == weight.shape[:1] and (bias.dtype == kind or cast is not None)


def _fits(norm: Any, call: Given) -> bool:
    """Whether a BatchNorm is for the layer's result; PyTorch says what is wrong with others."""
    return all(
        type(t) in PLAIN
        and t.shape == call.shape[1:2]
        and t.device == call.x.device
        and t.dtype in NATIVE
        and not t.is_neg()
        for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        if t is not None
    )


def _is_normal(norm: Any, call: Given) -> bool:
    """Whether a BatchNorm in training is one whose statistics we keep as PyTorch does."""
    if not _fits(norm, call) or prod(call.shape) == call.shape[1]:
        return False
    if norm.training and norm.track_running_stats and norm.momentum is None:
        return False  # a mean over all batches ever seen
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    given = [tensor for tensor in tensors if tensor is not None]
    if (norm.weight is None) != (norm.bias is None):
        return False
    return all(t.is_contiguous() for t in given) and len({t.dtype for t in given[:2]}) < 2


def _served(layer: Any, asked: Asked, links: str) -> Served:
    """Who serves the first layer of a chain."""
    if layer.__dict__.get(ALWAYS):
        found = Served(is_ours=True, why="asked for always")
    else:
        found = decide(asked)
    return replace(found, why=f"{found.why}; with {links}" if links else found.why)


def _key(layer: Any, norm: Any, x: Tensor, residual: Tensor | None) -> Any:
    """All that decides what serves; quick, as it is asked before every call."""
    cast = None
    if _is_autocast():
        kind = x.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        *(x.shape, x.stride(), x.dtype, x.device, x.requires_grad, torch.is_grad_enabled(), cast),
        *(_sign(layer.weight), _sign(layer.bias), _settings(layer)),
        None if norm is None else _norm_key(norm),
        None if residual is None else _residual_key(residual),
        CALLS.generation,
    )


def _sign(tensor: Tensor | None) -> Any:
    """What of a parameter decides."""
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_neg()


def _settings(layer: Any) -> Any:
    """A convolution's own, which its owner may change."""
    own = layer.__dict__
    if "stride" not in own:
        return None
    found = fixed(own["stride"], own["padding"], own["dilation"], own["groups"])
    if found is None:
        raise TypeError("settings that are no plain integers")  # PyTorch says what is wrong
    return *found, own["padding_mode"]


def _norm_key(norm: Any) -> Any:
    return (
        *(norm.training, norm.eps, norm.momentum, norm.track_running_stats),
        *map(_sign, (norm.weight, norm.bias, norm.running_mean, norm.running_var)),
    )


def _residual_key(residual: Tensor) -> Any:
    """Its address counts too: kernels are compiled for one that is a multiple of 16 bytes."""
    is_aligned = type(residual) in PLAIN and residual.data_ptr() % 16 == 0
    own = (residual.shape, residual.stride(), residual.dtype, residual.device)
    return *own, residual.requires_grad, residual.is_neg(), is_aligned


def has_hooks(layer: Any) -> bool:
    """Whether somebody wants to see a layer's own input, result or gradients."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def _has_hooks(layer: Any, norm: Any) -> bool:
    return has_hooks(layer) or (norm is not None and has_hooks(norm)) or has_global_hooks()
