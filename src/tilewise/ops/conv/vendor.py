"""The vendor's convolution: cuDNN or oneDNN through PyTorch, OpenBLAS through NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewise.ops.conv.infer import misses_input
from tilewise.ops.conv.problem import ConvProblem

Array = np.ndarray[Any, np.dtype[Any]]
_PRECISION = threading.Lock()


def bind_torch(problem: ConvProblem, operands: Sequence[Any], out: Any) -> Callable[[], Any]:
    """PyTorch's convolution or one of its gradients; the result is PyTorch's own tensor."""
    import torch

    first, second = operands
    rank = first.dim() - 2
    wide = None
    if problem.dtype in ("fp8", "bf8", "int8"):
        wide = torch.float32 if problem.dtype != "int8" else torch.float64
    dims, taps = "dhw"[3 - rank :], "zyx"[3 - rank :]
    stride, pad, dilation = (
        [getattr(problem, f"{what}_{dim}") for dim in dims]
        for what in ("stride", "pad", "dilation")
    )
    if problem.dtype == "bf16" and first.device.type == "cpu":
        sizes, filters = ([getattr(problem, dim) for dim in names] for names in (dims, taps))
        wide = torch.float32 if misses_input(sizes, filters, stride, pad, dilation) else None
    convolution = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    zeros = [0] * rank

    def call() -> Any:
        a, b = (first, second) if wide is None else (first.to(wide), second.to(wide))
        if problem.direction == "fwd":
            return convolution(a, b, None, stride, pad, dilation, False, zeros, problem.g)
        is_data = problem.direction == "bwd_data"
        dy, x, w = (a, out.to(a.dtype), b) if is_data else (b, a, out.to(a.dtype))
        gradients = backward(
            *(dy, x, w, None, stride, pad, dilation, False, zeros, problem.g),
            [is_data, not is_data, False],
        )
        return gradients[0 if is_data else 1]

    if problem.dtype == "tf32" and first.device.type == "cuda":
        return lambda: _in_tf32(call)
    return call


def _in_tf32(call: Callable[[], Any]) -> Any:
    """PyTorch takes the precision from one setting of the process, which is put back after."""
    import torch

    with _PRECISION:
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = True
        try:
            return call()
        finally:
            torch.backends.cudnn.allow_tf32 = before


def bind_numpy(problem: ConvProblem, operands: Sequence[Any], out: Any) -> Callable[[], Any]:
    """Convolution as one matrix product per filter tap, so that no column matrix is stored."""
    wide = np.float64 if problem.dtype == "int8" else np.float32
    x, y = operands
    return lambda: _by_taps(problem, x, y, wide).reshape(out.shape).astype(out.dtype)


def _by_taps(p: ConvProblem, first: Array, second: Array, wide: Any) -> Array:
    c, k = p.c // p.g, p.k // p.g
    sizes = {"x": (p.n, p.g, c, p.d, p.h, p.w), "w": (p.g, k, c, p.z, p.y, p.x)}
    sizes["y"] = (p.n, p.g, k, p.out_d, p.out_h, p.out_w)
    roles = {"fwd": "xw", "bwd_data": "yw", "bwd_weight": "xy"}[p.direction]
    held = {
        role: np.ascontiguousarray(t, wide).reshape(sizes[role])
        for role, t in zip(roles, (first, second), strict=True)
    }
    pads = (p.pad_d, p.pad_h, p.pad_w)
    padded = [*sizes["x"][:3], *(s + 2 * q for s, q in zip((p.d, p.h, p.w), pads, strict=True))]
    spans = zip(pads, (p.d, p.h, p.w), strict=True)
    inside: Any = (..., *(slice(q, q + s) for q, s in spans))
    x = np.zeros(padded, wide)
    if "x" in held:
        x[inside] = held["x"]
    w = held.get("w", np.zeros(sizes["w"], wide))
    y = held.get("y", np.zeros(sizes["y"], wide))
    for at in np.ndindex(p.z, p.y, p.x):
        window = x[_window(p, at)]
        tap: Any = (..., *at)
        if p.direction == "fwd":
            y += np.einsum("gkc,ngcdhw->ngkdhw", w[tap], window, optimize=True)
        elif p.direction == "bwd_data":
            window += np.einsum("gkc,ngkdhw->ngcdhw", w[tap], y, optimize=True)
        else:
            w[tap] = np.einsum("ngkdhw,ngcdhw->gkc", y, window, optimize=True)
    results: dict[str, Array] = {"fwd": y, "bwd_data": x[inside], "bwd_weight": w}
    return results[p.direction]


def _window(p: ConvProblem, at: tuple[int, ...]) -> Any:
    """The padded input positions that one filter tap reads."""
    starts = (at[0] * p.dilation_d, at[1] * p.dilation_h, at[2] * p.dilation_w)
    strides = (p.stride_d, p.stride_h, p.stride_w)
    counts = (p.out_d, p.out_h, p.out_w)
    spans = (
        slice(a, a + (n - 1) * s + 1, s) for a, s, n in zip(starts, strides, counts, strict=True)
    )
    return (..., *spans)
