"""Tensors against a problem: checked, copied only where their layout does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.core.dtypes import dtype
from tilewise.core.problem import Problem
from tilewise.core.tensors import TensorView, empty, is_torch, stored_copy, view
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
        elif is_torch(self.result):
            from torch.autograd.graph import increment_version

            increment_version(self.result)  # autograd must know what a kernel has overwritten
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
    seen: list[TensorView] = []
    copied: list[str] = []
    for name, given, shape, storage in zip(op.operands, tensors, shapes, storages, strict=False):
        tensor = _plain(given)
        of = view(tensor)
        tensor, of = _fold(op, name, tensor, of, shape)
        _check(name, of, problem.dtype)
        seen.append(of)
        _check_company(op, name, of, tensor, seen[0], tensors[0])
        if not storage.holds(of):
            tensor = stored_copy(tensor, storage)
            copied.append(name)
        ready.append(tensor)
    if out is not None:
        target, of = _check_out(op, out, problem, shapes[-1], seen)
        if storages[-1].holds(of):
            return Call(tuple(ready), target, out, tuple(copied))
        copied.append("out")
    made = empty(tensors[0], shapes[-1], problem.out_dtype, storages[-1])
    return Call(tuple(ready), made, made if out is None else out, tuple(copied))


def _plain(tensor: Any) -> Any:
    """A PyTorch tensor without autograd's and lazy negation's marks; arrays as they are."""
    return tensor.detach().resolve_neg() if is_torch(tensor) else tensor


def _fold(
    op: Op, name: str, tensor: Any, of: TensorView, shape: tuple[int, ...]
) -> tuple[Any, TensorView]:
    """`tensor` without the dimensions of one that a smaller problem does not count."""
    if of.shape == shape:
        return tensor, of
    at, extra = op.unit_axis, len(of.shape) - len(shape)
    if extra > 0 and of.shape == (*shape[:at], *(1,) * extra, *shape[at:]):
        keep = [axis for axis in range(len(of.shape)) if not at <= axis < at + extra]
        folded = tensor.reshape(shape)
        return folded, replace(of, shape=shape, strides=tuple(of.strides[axis] for axis in keep))
    raise TensorError(f"{name} has shape {of.shape}; the problem needs {shape}")


def _check(name: str, seen: TensorView, wanted: str) -> None:
    stored = "fp32" if wanted == "tf32" else wanted
    if seen.dtype != stored:
        raise TensorError(f"{name} is {seen.dtype}; the problem says {stored}: convert one of them")


def _check_company(
    op: Op, name: str, of: TensorView, tensor: Any, first: TensorView, sample: Any
) -> None:
    if is_torch(tensor) != is_torch(sample):
        raise TensorError(f"{name} and {op.operands[0]} are of two libraries; convert one of them")
    if of.device != first.device:
        raise TensorError(
            f"{name} is on {of.device} and {op.operands[0]} on {first.device}; "
            "move them to one device"
        )


def _check_out(
    op: Op, out: Any, problem: Problem, shape: tuple[int, ...], operands: Sequence[TensorView]
) -> tuple[Any, TensorView]:
    if is_torch(out) and (out.requires_grad or out.is_neg()):
        raise TensorError("out requires a gradient or is lazily negated; pass a plain tensor")
    target, seen = _fold(op, "out", out, view(out), shape)
    _check("out", seen, problem.out_dtype)
    if seen.device != operands[0].device:
        raise TensorError(f"out is on {seen.device}; the operands are on {operands[0].device}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise TensorError("out is read-only; pass a writable array")
    if _overlaps_itself(seen):
        raise TensorError("out has elements that share memory; pass a tensor with its own")
    for name, operand in zip(op.operands, operands, strict=True):
        if _share_memory(seen, operand):
            raise TensorError(f"out shares memory with {name}; pass a tensor of its own")
    return target, seen


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
