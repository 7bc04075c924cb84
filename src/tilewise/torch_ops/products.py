"""Matrix products of plain tensors on one device: nothing here sees gradients or modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.core.tensors import torch_dtype
from tilewise.dispatch.remembered import CALLS
from tilewise.dispatch.shipped import has_product, product_of_any
from tilewise.errors import TensorError
from tilewise.ops.arguments import ACTIVATIONS
from tilewise.ops.gemm.arguments import Epilogue
from tilewise.ops.gemm.infer import infer
from tilewise.torch_ops.calls import Work, allocator, first, into
from tilewise.torch_ops.fallback import leave, torch_matmul, why_no_kernels
from tilewise.torch_ops.memory import alignment
from tilewise.torch_ops.registering import is_deterministic

NATIVE = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What PyTorch multiplies as it is."""
HALVES = frozenset({torch.float16, torch.bfloat16})
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "silu": partial(functional.silu, inplace=True),
}
"""Of results that nobody has seen yet; PyTorch has no gelu in place."""


def matmul_key(a: Tensor, b: Tensor, deterministic: bool = False) -> Any:
    """All that decides a product's call; raises RuntimeError for tensors without memory."""
    kind = a.dtype
    return (
        *(a.shape, b.shape, a.stride(), b.stride(), kind, b.dtype, a.device, b.device),
        alignment(a, b),
        deterministic or is_deterministic(),
        kind is torch.float32 and rounds_to_tf32(),
    )


def matmul(a: Tensor, b: Tensor, deterministic: bool = False) -> Tensor:
    """[M, K] by [K, N], or the same in a batch."""
    try:
        key = matmul_key(a, b, deterministic)
    except RuntimeError:
        return leave(_why(a, b), torch_matmul, a, b)
    call: Callable[..., Tensor] | None = CALLS.get(key)
    return _first_matmul(key, a, b) if call is None else call(a, b)


def matmul_into(
    a: Tensor, b: Tensor, out: Any, deterministic: bool
) -> Callable[..., Tensor] | None:
    """Multiplies into `out`; gives the way for calls like this one where there is a quick one."""
    return into(_product(matmul_key(a, b, deterministic), a, b), (a, b), out)


def _first_matmul(key: Any, a: Tensor, b: Tensor) -> Tensor:
    why = why_no_kernels(a, b)
    if why:
        return leave(why, torch_matmul, a, b)
    if not has_product(a, b):
        result: Tensor = product_of_any(a, b, partial(matmul, deterministic=key[-2]))
        return result
    work = _product(key, a, b)
    return work.allocate().zero_() if work.problem.is_empty else first(key, work, (a, b))


def _product(key: Any, a: Tensor, b: Tensor) -> Work:
    """What is behind a call of two matrices or batches."""
    *_, deterministic, is_tf32 = key
    problem = infer(a, b)
    if is_tf32 and a.is_cuda:
        problem = replace(problem, dtype="tf32")
    shape = (*a.shape[:-1], b.shape[-1])
    return Work(
        problem=problem,
        allocate=_allocate(shape, torch_dtype(problem.out_dtype, a.device), a),
        pytorch=torch.matmul if a.dtype in NATIVE else None,
        deterministic=deterministic,
    )


def linear_key(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Any:
    """All that decides a layer's call; raises RuntimeError for tensors without memory."""
    kind = x.dtype
    extra = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    return (
        *(x.shape, weight.shape, x.stride(), weight.stride(), kind, weight.dtype),
        *(x.device, weight.device),
        alignment(x, weight) if bias is None else alignment(x, weight, bias),
        *(extra, activation, is_deterministic()),
        kind is torch.float32 and rounds_to_tf32(),
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """x Wᵀ + b, activated; any leading dimensions."""
    try:
        key = linear_key(x, weight, bias, activation)
    except RuntimeError:
        return leave(_why(x, weight), torch_linear, activation, x, weight, bias)
    call: Callable[..., Tensor] | None = CALLS.get(key)
    if call is None:
        return _first_linear(key, x, weight, bias)
    return call(x, weight) if bias is None else call(x, weight, bias)


def _first_linear(key: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    *_, activation, deterministic, is_tf32 = key
    check_activation(activation)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    pytorch = partial(torch_linear, activation)
    why = why_no_kernels(*tensors)
    if why is None and (weight.dim() != 2 or x.dim() == 0 or x.dtype not in NATIVE):
        why = f"a linear layer of {x.dtype} with weights of {weight.dim()} dimensions"
    if why:
        return leave(why, pytorch, *tensors)
    check_linear(x, weight, bias)
    if 0 in x.shape or 0 in weight.shape:
        return pytorch(*tensors)
    n, k = weight.shape
    rows = x.numel() // k

    def operands(x: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return x.reshape(rows, k), weight.t()

    is_plain = bias is None and activation == "none"
    # CPU kernels fuse nothing: their sums stay fp32 until the bias is added, and round once.
    kind = torch.float32 if not is_plain and x.device.type == "cpu" else x.dtype
    wide = "fp32" if kind != x.dtype else ""
    problem = infer(*operands(x, weight), out_dtype=wide)
    if is_tf32 and x.is_cuda:
        problem = replace(problem, dtype="tf32")
    work = Work(
        problem=problem,
        allocate=_allocate((*x.shape[:-1], n), kind, x),
        pytorch=pytorch,
        deterministic=deterministic,
        operands=operands,
        seen=lambda out: out.view(rows, n),
        epilogue=None if is_plain else Epilogue(bias=bias is not None, activation=activation),
        # PyTorch's routine adds a bias itself; an activation is a pass of its own.
        saved_bytes=2 * rows * n * x.element_size() if activation != "none" else 0,
        # Kernels read a bias without gaps.
        vectors=lambda *tensors: [vector.contiguous() for vector in tensors[2:]],
        finish=None if is_plain else partial(_finish_linear, activation),
    )
    return first(key, work, tensors)


def torch_linear(activation: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's own, which rounds before it adds a bias unless x is a matrix."""
    if bias is None or x.dim() == 2 or x.dtype not in HALVES or not x.dim() or not x.numel():
        return ACTIVATE[activation](functional.linear(x, weight, bias))
    rows = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return ACTIVATE[activation](rows.reshape(*x.shape[:-1], rows.shape[-1]))


def _finish_linear(
    activation: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if bias is not None:
        out += bias
    out = IN_PLACE.get(activation, ACTIVATE[activation])(out)
    return out.to(x.dtype)


def check_activation(activation: str) -> None:
    """Raises where there is no such activation."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise TensorError(f"activation is {activation!r}; use one of {', '.join(ACTIVATIONS)}")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises where shapes, dtypes or devices do not go together."""
    if weight.shape[1] != x.shape[-1]:
        raise TensorError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; the last size of x "
            "must be the last of weight"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise TensorError(f"bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},)")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TensorError(f"{name} is {tensor.dtype} and x is {x.dtype}; convert one of them")
        if tensor is not None and tensor.device != x.device:
            raise TensorError(
                f"{name} is on {tensor.device} and x on {x.device}; move them to one device"
            )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Callable[[], Tensor]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(1, size))
    return allocator(shape, strides[: len(shape)], dtype, like.device)


def _why(*tensors: Tensor) -> str:
    return why_no_kernels(*tensors) or "tensors without memory of their own"


def rounds_to_tf32() -> bool:
    """Whether PyTorch may round fp32 operands on GPUs."""
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32)
