"""How operators are registered: for autograd, autocast, torch.compile, modes, and without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.torch_ops.casting import CASTS
from tilewise.torch_ops.fallback import PLAIN, forward_level, has_tangent

_is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see every call."""
_tracing: Callable[[], Any] = torch._C._get_tracing_state
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
transform: Callable[[], Any] = torch._C._functorch.maybe_current_level
"""The innermost transform of torch.func, or None."""


def is_seen() -> bool:
    """Whether calls are recorded, transformed, traced or differentiated forward."""
    is_changed = transform() is not None or forward_level() >= 0
    return is_changed or modes() > 0 or _tracing() is not None


def is_watched() -> bool:
    """Whether calls are cast, recorded, transformed, traced or differentiated forward."""
    return _is_autocast() or is_seen()


LIBRARY: Any = torch.library.Library("tilewise", "DEF")  # type: ignore[no-untyped-call]


def define(
    schema: str,
    run: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    pytorch: Callable[..., Tensor] | None = None,
    quick: tuple[Callable[..., Tensor], Callable[..., Any]] | None = None,
) -> Callable[..., Tensor]:
    """An operator on CPU and CUDA tensors, which autocast casts for where it has gradients.

    `pytorch` is the same by PyTorch's own, which alone differentiate forward. `quick` are `run` and
    `backward` for plain tensors that nobody watches.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    op = getattr(torch.ops.tilewise, name)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, device)
        if backward:
            LIBRARY.impl(name, _autocast(op, device.lower()), f"Autocast{device}")
    full = f"tilewise::{name}"
    torch.library.register_fake(full, fake, lib=LIBRARY)
    if not (save and backward and pytorch):
        unwatched: Callable[..., Tensor] = op.default
        return unwatched
    torch.library.register_autograd(full, backward, setup_context=save, lib=LIBRARY)
    return _front(name, save, pytorch, *(quick or (run, backward)))


def _front(
    name: str,
    save: Callable[..., None],
    pytorch: Callable[..., Tensor],
    run: Callable[..., Tensor],
    backward: Callable[..., Any],
) -> Callable[..., Tensor]:
    """The operator, but past PyTorch's dispatcher where nobody is watching: half the time."""
    op = getattr(torch.ops.tilewise, name).default

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = run(*inputs)
        save(ctx, inputs, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"tilewise_{name}", (torch.autograd.Function,), parts)

    def call(*args: Any) -> Tensor:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and has_tangent(*tensors):
            return pytorch(*args)
        if is_compiling or is_watched() or any(type(t) not in PLAIN for t in tensors):
            return op(*args)  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return function.apply(*args)  # type: ignore[no-any-return]
        return run(*args)

    call.apply = function.apply  # type: ignore[attr-defined]  # for who has asked all that
    return call


def _autocast(op: Any, device: str) -> Callable[..., Tensor]:
    """Floating-point tensors in autocast's type, as PyTorch's own products take them."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        is_meant = value.device.type == device and value.dtype != torch.float64
        if not is_meant or value.dtype.itemsize == 1 or value.dtype == dtype:
            return value
        return CASTS.get(value, dtype)

    def call(*args: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        ready = [cast(value, dtype) for value in args]
        with torch.autocast(device, enabled=False):
            result: Tensor = op.default(*ready)
            return result

    return call
