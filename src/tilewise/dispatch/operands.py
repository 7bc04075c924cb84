"""Tensors against a problem: checked, copied only where their layout does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.core.dtypes import dtype
from tilewise.core.problem import Problem
from tilewise.core.tensors import Storage, TensorView, empty, is_torch, stored_copy, view
from tilewise.errors import TensorError
from tilewise.ops.contract import Op


@dataclass(frozen=True, slots=True)
class Call:
    """Tensors ready for a plan, and where its result has to go."""

    operands: tuple[Any, ...]
    out: Any
    """What the plan writes."""
    result: Any
    """What the caller gets: `out`, a reshaped view of it, or the caller's own tensor."""
    copied: tuple[str, ...]
    """Names of tensors whose layout did not fit."""

    def finish(self) -> Any:
        """The result, moved into the caller's tensor where the plan could not write there."""
        if "out" in self.copied:
            self.result[...] = self.out.reshape(self.result.shape)
        return self.result


def prepare(op: Op, problem: Problem, tensors: Sequence[Any], out: Any = None) -> Call:
    """Tensors that fit `problem`; raises TensorError where they cannot."""
    if len(tensors) != len(op.operands):
        raise TensorError(
            f"{op.name} takes {len(op.operands)} tensors ({', '.join(op.operands)}); "
            f"{len(tensors)} were given"
        )
    shapes, storages = op.shapes(problem), op.storage(problem)
    ready: list[Any] = []
    copied: list[str] = []
    for name, tensor, shape, storage in zip(op.operands, tensors, shapes, storages, strict=False):
        fitted = _squeeze(name, tensor, shape)
        seen = view(fitted)
        _check(name, seen, problem.dtype)
        if seen.device != view(tensors[0]).device:
            raise TensorError(
                f"{name} is on {seen.device} and {op.operands[0]} on {view(tensors[0]).device}; "
                "move them to one device"
            )
        if not storage.holds(seen):
            fitted = stored_copy(fitted, storage)
            copied.append(name)
        ready.append(fitted)
    if out is None:
        made = empty(tensors[0], shapes[-1], problem.out_dtype, storages[-1])
        return Call(tuple(ready), made, made, tuple(copied))
    target = _check_out(op, out, problem, shapes[-1], tensors)
    if storages[-1].holds(view(target)):
        return Call(tuple(ready), target, out, tuple(copied))
    made = empty(tensors[0], shapes[-1], problem.out_dtype, storages[-1])
    return Call(tuple(ready), made, out, (*copied, "out"))


def _squeeze(name: str, tensor: Any, shape: tuple[int, ...]) -> Any:
    """`tensor` without dimensions of one that the problem does not count."""
    given = tuple(view(tensor).shape)
    if given == shape:
        return tensor
    if [n for n in given if n != 1] == [n for n in shape if n != 1] and len(given) >= len(shape):
        return tensor.reshape(shape)
    raise TensorError(f"{name} has shape {given}; the problem needs {shape}")


def _check(name: str, seen: TensorView, wanted: str) -> None:
    stored = "fp32" if wanted == "tf32" else wanted
    if seen.dtype != stored:
        raise TensorError(f"{name} is {seen.dtype}; the problem says {stored}: convert one of them")


def _check_out(
    op: Op, out: Any, problem: Problem, shape: tuple[int, ...], tensors: Sequence[Any]
) -> Any:
    target = _squeeze("out", out, shape)
    seen = view(target)
    _check("out", seen, problem.out_dtype)
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise TensorError("out is read-only; pass a writable array")
    if _overlaps_itself(seen):
        raise TensorError("out has elements that share memory; pass a tensor with its own")
    for name, tensor in zip(op.operands, tensors, strict=False):
        if _share_memory(seen, view(tensor)):
            raise TensorError(f"out shares memory with {name}; pass a tensor of its own")
    if is_torch(out) and out.requires_grad:
        raise TensorError("out requires a gradient; pass a tensor that does not")
    return target


def _span(seen: TensorView) -> tuple[int, int]:
    low, high = seen.extent
    size = dtype(seen.dtype).bytes
    return seen.address + low * size, seen.address + high * size


def _share_memory(a: TensorView, b: TensorView) -> bool:
    """Whether the spans of two tensors overlap; interleaved views count as sharing."""
    (a_low, a_high), (b_low, b_high) = _span(a), _span(b)
    return a.device == b.device and a_low < b_high and b_low < a_high


def _overlaps_itself(seen: TensorView) -> bool:
    """Whether two indices reach one element: sorted by stride, each must clear the last."""
    reach = 0
    dims = sorted((abs(s), n) for n, s in zip(seen.shape, seen.strides, strict=True) if n > 1)
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def fits(storage: Storage, tensor: Any) -> bool:
    """Whether `tensor` needs no copy."""
    return storage.holds(view(tensor))
