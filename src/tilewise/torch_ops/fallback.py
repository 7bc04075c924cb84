"""What tilewise leaves to PyTorch, and why; each reason is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.core.tensors import is_native
from tilewise.errors import TensorError
from tilewise.notices import warn_once

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types whose memory is what it seems; other subclasses may store something else."""
FP8 = {
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), "fp8"),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), "bf8"),
}
"""Each device has one of either kind."""
RESULTS = {torch.int8: torch.int32, **dict.fromkeys(FP8, torch.bfloat16)}
"""Results of a type other than the operands'."""
OPERANDS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.int8, *FP8})
DEVICES = ("cpu", "cuda")
_REAL_FAULTS: tuple[type[Exception], ...] = (
    torch.OutOfMemoryError,
    *([torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else []),
)


def forward_level() -> int:
    """How many levels of forward-mode differentiation are open, less one."""
    return forward_ad._current_level


def has_tangent(*tensors: Any) -> bool:
    """Whether forward mode differentiates with respect to one of these."""
    unpack: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
    return forward_level() >= 0 and any(
        unpack(tensor).tangent is not None for tensor in tensors if isinstance(tensor, torch.Tensor)
    )


def torch_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """PyTorch's product, of the type that tilewise's has."""
    wide = RESULTS.get(a.dtype)
    if wide is not None and a.dtype == b.dtype:
        a, b = a.to(wide), b.to(wide)
    return torch.matmul(a, b, out=out)


def why_untraced(*tensors: torch.Tensor) -> str | None:
    """Why a call that is being traced is PyTorch's, or None; simple enough to be traced itself.

    Transforms of torch.func differentiate PyTorch's operators, and none made in Python.
    """
    if torch._C._are_functorch_transforms_active():
        return "tensors under a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "tensors under forward-mode differentiation"
    for tensor in tensors:
        if tensor.layout != torch.strided:
            return f"{tensor.layout} tensors"
        if tensor.dtype not in OPERANDS:
            return f"operands of {tensor.dtype}"
        if tensor.device.type not in DEVICES:
            return f"tensors on {tensor.device.type}"
    return None


def tell_traced(reason: str) -> None:
    """Tells once why a call goes to PyTorch, while it is traced instead of whenever it runs."""
    warn_once(f"left to PyTorch: {reason}")


tell_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced


def why_no_kernels(*tensors: torch.Tensor) -> str | None:
    """Why tilewise has no kernels for such tensors, or None; raises where they are apart."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return f"{'nested' if tensor.is_nested else tensor.layout} tensors"
        if tensor.dtype not in OPERANDS:
            return f"operands of {tensor.dtype}"
        if tensor.device.type not in DEVICES:
            return f"tensors on {tensor.device.type}"
        if not is_native(FP8.get(tensor.dtype, ""), tensor):
            return f"operands of {tensor.dtype} on {tensor.device}"
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise TensorError(
                f"tensors are on {tensors[0].device} and {tensor.device}; move them to one device"
            )
    return None


def why_not_plain(*tensors: torch.Tensor) -> str | None:
    """Why tensors are neither plain nor stand-ins for plain ones, or None."""
    for tensor in tensors:
        if type(tensor) not in PLAIN and not _is_stand_in(tensor):
            return f"tensors of type {type(tensor).__name__}"
    return None


def _is_stand_in(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor)


def leave(
    reason: str, function: Callable[..., torch.Tensor], *args: Any, **settings: Any
) -> torch.Tensor:
    """PyTorch's result; where PyTorch refuses too, that is the caller's mistake."""
    warn_once(f"left to PyTorch: {reason}")
    try:
        return function(*args, **settings)
    except _REAL_FAULTS:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise TensorError(f"tilewise does not take {reason}, and PyTorch says: {error}") from error
