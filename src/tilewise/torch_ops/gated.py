"""An activated tensor times another, as gated MLPs have them: one pass forward and one backward.

Both products and what is between them are one kernel where they are asked for `always`: it has not
been measured against the vendor's two products yet.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.arch import Arch
from tilewise.core.tensors import view
from tilewise.dispatch.remembered import CALLS
from tilewise.ops.launch import Launch
from tilewise.torch_ops.calls import allocator, is_capturing
from tilewise.torch_ops.convolutions import dense_strides
from tilewise.torch_ops.fallback import PLAIN
from tilewise.torch_ops.fused import has_global_hooks, has_hooks
from tilewise.torch_ops.launching import Launchers, why_no_kernels
from tilewise.torch_ops.layers import ALWAYS, NAMES, is_worth, needs_gradient
from tilewise.torch_ops.pass_launch import Gate, GateProducts
from tilewise.torch_ops.products import ACTIVATE, NATIVE, rounds_to_tf32
from tilewise.torch_ops.registering import is_seen, is_watched
from tilewise.torch_ops.trained import ALIGNMENT, stored

MOST = 64
"""Kinds of tensors that are kept of one place in a model."""
_is_grad_enabled = torch.is_grad_enabled


class Gated:
    """What is activated and what it is multiplied with, as a rewritten forward pass gives them."""

    __name__ = "gated"

    def __init__(self, *, activation: str) -> None:
        self.activation = activation
        self._runs: dict[Any, Callable[[Tensor, Tensor], Tensor] | None] = {}

    def __call__(self, layer: None, norm: None, g: Any, u: Any) -> Tensor:
        if _are_strided(g, u) and not is_seen():
            key = (
                *(g.shape, g.stride(), u.stride(), g.dtype, u.dtype, g.device, u.device),
                _is_grad_enabled() and (g.requires_grad or u.requires_grad),
                CALLS.generation,
            )
            try:
                run = self._runs[key]
            except KeyError:
                run = self._decide(key, g, u)
            if run is not None and u.shape == g.shape and not _is_apart(g, u):
                return run(g, u)
        product: Tensor = ACTIVATE[self.activation](g) * u
        return product

    def _decide(self, key: Any, g: Tensor, u: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
        if is_capturing(g):  # nothing may be compiled now
            return None
        if len(self._runs) >= MOST:
            self._runs.clear()
        run = None
        if why_not_one_pass(g, u) is None:
            passes = GatePass(g, u, self.activation)
            run = passes.trained if needs_gradient(g, u) else passes.forward
        self._runs[key] = run
        return run


def _are_strided(*tensors: Any) -> bool:
    """Whether all are plain tensors whose elements lie at strides; anything may be multiplied."""
    return all(type(t) in PLAIN and t.layout is torch.strided for t in tensors)


def _is_apart(g: Tensor, u: Tensor) -> bool:
    """Whether two tensors are where kernels cannot read them."""
    return bool((g.data_ptr() | u.data_ptr()) % ALIGNMENT) or g.is_neg() or u.is_neg()


def why_not_one_pass(g: Tensor, u: Tensor) -> str | None:
    """Why PyTorch multiplies, or None."""
    if g.shape != u.shape or g.dtype is not u.dtype or g.device != u.device:
        return "the tensors differ in size, type or device"
    if g.dtype not in NATIVE or not g.numel() or not g.dim():
        return f"{g.dtype} tensors of shape {tuple(g.shape)}"
    if _row(g) is None or _row(u) is None:
        return "elements of a row lie apart"
    why = why_no_kernels(g.device)
    if why is not None:
        return why
    # PyTorch reads or writes each 5 times forward and 9 times backward, we 3 and 5 times.
    wants, saved = needs_gradient(g, u), g.numel() * g.element_size()
    if not is_worth(saved * (6 if wants else 2), g.device, with_gradients=wants):
        return "it gains less than a call of tilewise costs"
    return None


def _row(tensor: Tensor) -> int | None:
    """How far rows of the last dimension are from each other; None where no number says it."""
    *sizes, width = tensor.shape
    *strides, last = tensor.stride()
    if last != 1 and width > 1:
        return None
    row = expected = None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        row = stride if row is None else row
        if expected is not None and stride != expected:
            return None
        expected = stride * size
    row = width if row is None else row
    is_aligned = row == width or not row * tensor.element_size() % ALIGNMENT
    return row if row >= width and is_aligned else None


class GatedLinear:
    """Two layers' products, one activated, multiplied: in one kernel, or layer by layer."""

    __name__ = "gated linear"

    def __init__(self, *, activation: str) -> None:
        self.activation, self._apart = activation, Gated(activation=activation)
        self._launchers: dict[Any, Callable[..., Tensor] | None] = {}

    def __call__(self, gate: Any, up: Any, x: Tensor) -> Tensor:
        if gate.__dict__.get(ALWAYS) and up.__dict__.get(ALWAYS) and _are_plain(gate, up, x):
            sizes = (x.shape, x.dtype, gate.weight.shape, x.device)
            key = (*sizes, rounds_to_tf32(), CALLS.generation)
            try:
                run = self._launchers[key]
            except KeyError:
                run = self._decide(key, gate, x)
            if run is not None:
                return run(x, gate.weight, up.weight)
        return self._apart(None, None, gate(x), up(x))

    def _decide(self, key: Any, gate: Any, x: Tensor) -> Callable[..., Tensor] | None:
        if is_capturing(x):  # nothing may be compiled now
            return None
        if len(self._launchers) >= MOST:
            self._launchers.clear()
        self._launchers[key] = (
            None if why_no_kernels(x.device) else _one_kernel(gate, x, self.activation)
        )
        return self._launchers[key]


def _are_plain(gate: Any, up: Any, x: Tensor) -> bool:
    """Whether one kernel may read these as they are, and nobody wants to see each layer."""
    one, two = gate.weight, up.weight
    tensors = (x, one, two)
    if not all(type(t) in PLAIN and t.is_contiguous() and not t.is_neg() for t in tensors):
        return False
    if not (x.dtype is one.dtype is two.dtype and x.dtype in NATIVE and x.numel() and one.numel()):
        return False
    if one.shape != two.shape or x.shape[-1] != one.shape[1] or x.device != one.device:
        return False
    if one.device != two.device or gate.bias is not None or up.bias is not None:
        return False
    if any(t.data_ptr() % ALIGNMENT for t in tensors) or is_watched() or needs_gradient(*tensors):
        return False
    return not (has_hooks(gate) or has_hooks(up) or has_global_hooks())


def _one_kernel(gate: Any, x: Tensor, activation: str) -> Callable[..., Tensor]:
    """Both products of a layer's size, by our kernel."""
    n, k = gate.weight.shape
    kind = NAMES[x.dtype]
    products = GateProducts(
        m=prod(x.shape[:-1]),
        n=n,
        k=k,
        dtype="tf32" if kind == "fp32" and rounds_to_tf32() else kind,
        activation=activation,
    )
    shape = (*x.shape[:-1], n)
    allocate = allocator(shape, dense_strides(shape, "nchw"), x.dtype, x.device)
    launchers = Launchers(x, "gated MLP")

    def make(arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        return products.forward(arch), products.forward_order

    def run(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        y = allocate()
        launchers.get("forward", make)(y, x, gate, up)
        return y

    return run


class GatePass:
    """Our kernels for tensors of one size, forward and backward."""

    def __init__(self, g: Tensor, u: Tensor, activation: str) -> None:
        width, rows = g.shape[-1], (_row(g), _row(u))
        assert rows[0] is not None and rows[1] is not None
        self._gate = Gate(
            rows=prod(g.shape[:-1]),
            width=width,
            dtype=view(g.detach()).dtype,
            activation=activation,
            g_row=rows[0],
            u_row=rows[1],
        )
        self._result = dense_strides(g.shape, "nchw")
        self._allocate = allocator(g.shape, self._result, g.dtype, g.device)
        self._launchers = Launchers(g.detach(), "gated activation")

    def forward(self, g: Tensor, u: Tensor) -> Tensor:
        y = self._allocate()
        self._launchers.get("forward", self._forward)(y, g, u)
        return y

    def trained(self, g: Tensor, u: Tensor) -> Tensor:
        """The same for autograd."""
        result: Tensor = _Gated.apply(g, u, self)  # type: ignore[no-untyped-call]
        return result

    def backward(self, dy: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        dg, du = self._allocate(), self._allocate()
        launch = self._launchers.get("backward", self._backward)
        launch(dg, du, stored(dy, self._result), g, u)
        return dg, du

    def _forward(self, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        return self._gate.forward(arch), self._gate.forward_order

    def _backward(self, arch: Arch) -> tuple[Launch, tuple[int, ...]]:
        return self._gate.backward(arch), self._gate.backward_order


class _Gated(torch.autograd.Function):
    """A gated activation as one node, which keeps both factors and not what was activated."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, passes: GatePass) -> Tensor:
        ctx.passes = passes
        ctx.save_for_backward(g, u)
        return passes.forward(g, u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *ctx.passes.backward(dy, *ctx.saved_tensors), None
