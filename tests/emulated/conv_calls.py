"""Convolutions as emulated kernels see them: channels-last tensors, and what must come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from emulation import Edits, run

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.launch import launch
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.reference import reference
from tilewise.ops.conv.strides import Strides, default_strides

Array = np.ndarray[Any, Any]
ARCH = load_arch("sm_90", "H200")
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22, "tf32": 2.0**-10}


def narrow(values: Array, dtype: str) -> Array:
    """As memory holds them; bf16 as its bits."""
    if dtype == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == "fp16" else np.float32)


def widen(stored: Array, dtype: str) -> Array:
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def channels_last(logical: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(logical, 1, -1))


def poisoned(shape: tuple[int, ...], dtype: str) -> Array:
    return channels_last(narrow(np.full(shape, np.nan), dtype))


def check(
    kernel: Kernel,
    problem: ConvProblem,
    epilogue: Epilogue | None = None,
    *,
    seed: int = 0,
    edits: Edits = (),
    units: int = 2,
    is_small: bool = False,
    gaps: tuple[int, int, int] = (0, 0, 0),
) -> None:
    """Runs the kernel in the emulation and compares with float64.

    Blocks that walk have `units` multiprocessors: several tiles each, although problems are tiny;
    all kernels have where the device `is_small`. Images (or filters) of the operands and of the
    result lie `gaps` elements further apart than they must.
    """
    reason = get_op(problem.op).why_unusable(kernel, problem, ARCH)
    assert reason is None, reason
    rng = np.random.default_rng(7)
    *operands, out_shape = shapes(problem)
    stored = "fp32" if problem.dtype == "tf32" else problem.dtype
    # Small whole numbers are exact in every type, and so are most of their sums in fp32.
    given = [rng.integers(-3, 4, shape).astype(np.float64) for shape in operands]
    tensors = [channels_last(narrow(a, stored)) for a in given]
    tensors.append(poisoned(out_shape, problem.out_dtype))
    expected = reference(problem, *given)
    e = epilogue or Epilogue()
    channels = (1, out_shape[1], *(1,) * (len(out_shape) - 2))
    extras = {
        "bias": rng.integers(-3, 4, out_shape[1]).astype(np.float64),
        "residual": rng.integers(-3, 4, out_shape).astype(np.float64),
    }
    tensors += [narrow(extras["bias"], problem.out_dtype)]
    tensors += [channels_last(narrow(extras["residual"], problem.out_dtype))]
    tensors += [np.full((2, out_shape[1]), np.nan, np.float32)]
    if e.bias:
        expected = expected + extras["bias"].reshape(channels)
    if e.residual:
        expected = expected + extras["residual"]
    expected = activated(expected, e.activation)
    walks = is_small or getattr(kernel, "persistent", False)
    arch = replace(ARCH, compute_units=units) if walks else ARCH
    laid = {0: gaps[0], 1: gaps[1], 2: gaps[2], 4: gaps[2]}
    for at, gap in laid.items():
        tensors[at] = apart(tensors[at], gap)
    made = launch(kernel, problem, arch, strides=_strides(problem, gaps), epilogue=e)
    after = run(made, tensors, seed=seed, edits=edits)
    result = together(after[2], channels_last(expected).shape, gaps[2])
    compare(problem, widen(result, problem.out_dtype), channels_last(expected))
    if e.sums:
        rounded = widen(result, problem.out_dtype).reshape(-1, out_shape[1])
        both = np.stack([rounded.sum(0), (rounded**2).sum(0)])
        np.testing.assert_allclose(after[5], both, rtol=1e-4, atol=1e-5 * np.abs(both).max())


def _strides(problem: ConvProblem, gaps: tuple[int, int, int]) -> tuple[Strides, Strides, Strides]:
    """Packed images (or filters), further apart by `gaps`."""
    pairs = zip(default_strides(problem), gaps, strict=True)
    a, b, c = ((dense[0] and dense[0] + gap, *dense[1:]) for dense, gap in pairs)
    return a, b, c


def apart(tensor: Array, gap: int) -> Array:
    """Its images with `gap` elements that nobody may touch between one and the next."""
    if not gap or len(tensor) < 2:
        return tensor
    filled = np.full((len(tensor), tensor[0].size + gap), _gap_of(tensor), tensor.dtype)
    filled[:, :-gap] = tensor.reshape(len(tensor), -1)
    return filled.reshape(-1)[:-gap]


def together(laid: Array, shape: tuple[int, ...], gap: int) -> Array:
    """What `apart` laid out; raises where a gap was touched."""
    if laid.shape == shape:
        return laid
    filled = np.append(laid, np.full(gap, _gap_of(laid), laid.dtype)).reshape(shape[0], -1)
    bits = filled[:, -gap:].view(f"u{laid.dtype.itemsize}")
    assert (bits == np.array(_gap_of(laid), laid.dtype).view(bits.dtype)).all(), "a gap was written"
    return filled[:, :-gap].reshape(shape)


def _gap_of(tensor: Array) -> float:
    """A NaN: of 16 bits that are kept as a number, that of bf16."""
    return 0x7FFF if tensor.dtype == np.uint16 else np.nan


def activated(x: Array, name: str) -> Array:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        from math import erf

        return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    return x


def compare(problem: ConvProblem, got: Array, expected: Array) -> None:
    error = ROUNDING[problem.out_dtype] * (np.abs(expected) + 1e-30) + 1e-4 * (
        np.abs(expected).max() if problem.out_dtype == "fp32" else 0
    )
    wrong = ~(np.abs(got - expected) <= error + 1e-6)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} are wrong, first {at}: {got[at]} for {expected[at]}"
        )
