"""Products of fp8 tensors with scales, as `torch._scaled_mm` takes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.core.tensors import require_memory
from tilewise.dispatch.remembered import CALLS
from tilewise.errors import TensorError
from tilewise.ops.gemm.arguments import Epilogue
from tilewise.ops.gemm.infer import infer
from tilewise.ops.gemm.vendor import scaled_operands
from tilewise.torch_ops.calls import Work, first
from tilewise.torch_ops.fallback import FP8, leave
from tilewise.torch_ops.memory import alignment
from tilewise.torch_ops.registering import is_deterministic

OUT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(a b) scaled by one factor per operand, or by one per row of a and column of b."""
    require_memory(a, b, scale_a, scale_b, *() if bias is None else (bias,))
    is_rows = scale_a.numel() > 1 or scale_b.numel() > 1
    why = _why_no_kernels(a, b, out_dtype)
    if not why:
        _check(a, b, bias, out_dtype)
    left = _factors("scale_a", scale_a, a, a.shape[0], is_rows)
    right = _factors("scale_b", scale_b, a, b.shape[1], is_rows)
    if why:
        pytorch = partial(torch._scaled_mm, bias=bias, out_dtype=out_dtype)
        return leave(why, pytorch, *scaled_operands(a, b), *_scales(left, right, is_rows))
    tensors = (a, b, left, right) if bias is None else (a, b, bias.contiguous(), left, right)
    if 0 in (*a.shape, *b.shape):
        return _scale(a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32), out_dtype, *tensors)
    key = (
        *("scaled", a.shape, b.shape, a.stride(), b.stride(), a.dtype, a.device),
        *(alignment(*tensors), is_deterministic(), is_rows, bias is not None),
        out_dtype,
    )
    call: Callable[..., Tensor] | None = CALLS.get(key)
    if call is None:
        result = (_first_sums if a.device.type == "cpu" else _first)(key, tensors)
    else:
        result = call(*tensors)
    # CPU kernels scale nothing: their sums stay fp32 until they are scaled here.
    return _scale(result, out_dtype, *tensors) if a.device.type == "cpu" else result


def _why_no_kernels(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> str | None:
    """Why a product is PyTorch's, or None: two kinds of fp8 in one, or an fp8 result."""
    known = a.dtype in FP8 and b.dtype in FP8 and (out_dtype in OUT_DTYPES or out_dtype in FP8)
    if a.dim() != 2 or b.dim() != 2 or not known:
        return None  # nobody's
    if a.dtype != b.dtype:
        return f"scaled products of {a.dtype} and {b.dtype}"
    return f"scaled products of results in {out_dtype}" if out_dtype in FP8 else None


def _check(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_DTYPES:
        raise TensorError(f"out_dtype is {out_dtype}; use {', '.join(map(str, OUT_DTYPES))}")
    if a.dim() != 2 or b.dim() != 2:
        raise TensorError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; pass matrices")
    if a.dtype not in FP8 or b.dtype not in FP8:
        raise TensorError(
            f"a is {a.dtype} and b {b.dtype}; pass matrices of float8_e4m3fn or float8_e5m2"
        )
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or bias.dtype != out_dtype):
        raise TensorError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; it must be {out_dtype} of shape "
            f"({b.shape[1]},)"
        )
    for name, tensor in (("b", b), ("bias", bias)):
        if tensor is not None and tensor.device != a.device:
            raise TensorError(f"{name} is on {tensor.device}; a is on {a.device}")


def _factors(name: str, scale: Tensor, a: Tensor, length: int, is_rows: bool) -> Tensor:
    """A scale as a vector without gaps, of one factor or of one for each of `length`."""
    if scale.dtype != torch.float32 or scale.device != a.device:
        raise TensorError(f"{name} is {scale.dtype} on {scale.device}; pass float32 on {a.device}")
    if scale.numel() not in (1, length):
        raise TensorError(
            f"{name} has shape {tuple(scale.shape)}; pass one factor or {length} of them"
        )
    flat = scale.reshape(-1)
    if is_rows:
        return flat.expand(length).contiguous()
    return flat if flat.numel() else flat.new_ones(1)  # no rows to scale


def _first_sums(key: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    a, b = tensors[:2]
    *_, deterministic, _, _, _ = key
    work = Work(
        problem=infer(a, b, out_dtype="fp32"),
        allocate=partial(torch.empty, (a.shape[0], b.shape[1]), dtype=torch.float32),
        pytorch=None,
        deterministic=deterministic,
        operands=lambda a, b, *rest: (a, b),
    )
    return first(key, work, tensors)


def _first(key: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    a, b = tensors[:2]
    *_, deterministic, is_rows, has_bias, out_dtype = key
    work = Work(
        problem=infer(a, b, out_dtype=OUT_DTYPES[out_dtype]),
        allocate=partial(torch.empty, (a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device),
        pytorch=partial(_by_pytorch, out_dtype, is_rows),
        deterministic=deterministic,
        operands=lambda a, b, *rest: (a, b),
        epilogue=Epilogue(bias=has_bias, scaling="row" if is_rows else "tensor"),
        vectors=lambda a, b, *rest: rest,
    )
    return first(key, work, tensors)


def _scale(sums: Tensor, out_dtype: torch.dtype, a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
    """fp32 sums scaled, biased and rounded."""
    *bias, left, right = rest
    scaled = sums.mul_(left[:, None]).mul_(right)
    return (scaled + bias[0] if bias else scaled).to(out_dtype)


def _scales(left: Tensor, right: Tensor, is_rows: bool) -> tuple[Tensor, Tensor]:
    """Factors as PyTorch takes them."""
    return (left[:, None], right[None, :]) if is_rows else (left[0], right[0])


def _by_pytorch(
    out_dtype: torch.dtype, is_rows: bool, a: Tensor, b: Tensor, *rest: Tensor
) -> Tensor:
    """PyTorch's scaled product where it has one, else fp32 products."""
    *bias, left, right = rest
    is_stored = a.stride(1) == 1 and b.stride(0) == 1
    has_routine = is_stored and not (a.shape[1] % 16 or b.shape[1] % 16)
    if has_routine and FP8[a.dtype] == "fp8" and out_dtype == torch.bfloat16:
        result: Tensor = torch._scaled_mm(
            *scaled_operands(a, b),
            *_scales(left, right, is_rows),
            bias=bias[0] if bias else None,
            out_dtype=out_dtype,
            use_fast_accum=True,
        )
        return result
    return _scale(a.float() @ b.float(), out_dtype, a, b, *rest)
