"""The vendor's GEMM: cuBLAS or MKL through PyTorch, OpenBLAS through NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewise.forks import make_lock
from tilewise.ops.gemm.problem import GemmProblem

_PRECISION = make_lock()


def bind_numpy(problem: GemmProblem, operands: Sequence[Any], out: Any) -> Callable[[], Any]:
    """`np.matmul` into `out`; narrow types are widened first, as NumPy would otherwise overflow."""
    a, b = operands
    if problem.dtype in ("fp32", "tf32"):
        return lambda: np.matmul(a, b, out=out)
    wide = np.int32 if problem.dtype == "int8" else np.float32

    def call() -> Any:
        out[...] = np.matmul(a.astype(wide), b.astype(wide)).astype(out.dtype)
        return out

    return call


def bind_torch(problem: GemmProblem, operands: Sequence[Any], out: Any) -> Callable[[], Any]:
    """`torch.matmul` into `out`; types it has no product for are widened first."""
    import torch

    a, b = operands
    if problem.dtype in ("fp32", "fp16", "bf16") and problem.out_dtype == problem.dtype:
        return lambda: torch.matmul(a, b, out=out)
    on_gpu = a.device.type == "cuda"
    if problem.dtype == "tf32" and on_gpu:
        return lambda: _matmul_tf32(a, b, out)
    if problem.dtype == "fp8" and on_gpu and scaled_mm_fits(problem):
        one, own = torch.ones((), device=a.device), {"out": out} if _lies_well(out) else {}
        return lambda: torch._scaled_mm(
            *scaled_operands(a, b), one, one, out_dtype=out.dtype, use_fast_accum=True, **own
        )
    wide = torch.float32 if problem.dtype != "int8" or on_gpu else torch.int32
    if problem.dtype == "int8" and on_gpu and problem.batch == 1 and _int_mm_fits(problem):
        return lambda: out.copy_(torch._int_mm(a, b))
    if problem.dtype == "int8" and on_gpu:
        wide = torch.float64  # CUDA has no integer matmul; float64 holds every int32 exactly
    return lambda: out.copy_(torch.matmul(a.to(wide), b.to(wide)))


def scaled_mm_fits(problem: GemmProblem) -> bool:
    p = problem
    return p.batch == 1 and p.layout == "rcr" and p.n % 16 == 0 and p.k % 16 == 0


def scaled_operands(a: Any, b: Any) -> tuple[Any, Any]:
    """A and B where cuBLAS can read them: rows of A and columns of B at multiples of 16 bytes."""
    left, right = (t if _lies_well(t) else t.contiguous().clone() for t in (a, b.t()))
    return left, right.t()


def _lies_well(rows: Any) -> bool:
    """Whether a matrix begins at, and has its rows at, multiples of 16 bytes."""
    pitch = rows.stride(0) * rows.element_size()
    return pitch > 0 and not (rows.data_ptr() | pitch) & 15


def _int_mm_fits(problem: GemmProblem) -> bool:
    return problem.m > 16 and problem.k % 8 == 0 and problem.n % 8 == 0


def _matmul_tf32(a: Any, b: Any, out: Any) -> Any:
    """PyTorch takes the precision from one setting of the process, which is put back after."""
    import torch

    settings = torch.backends.cuda.matmul
    is_new = hasattr(torch._C, "_get_fp32_precision_getter")
    name, value = ("fp32_precision", "tf32") if is_new else ("allow_tf32", True)
    with _PRECISION:
        before = getattr(settings, name)
        if before == value:
            return torch.matmul(a, b, out=out)
        if is_new and before == getattr(torch.backends, "fp32_precision", ""):
            before = "none"  # what is inherited must go on following its source
        setattr(settings, name, value)
        try:
            return torch.matmul(a, b, out=out)
        finally:
            setattr(settings, name, before)
