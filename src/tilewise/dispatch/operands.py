"""Tensors against a problem: checked, copied only where their layout does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewise.core.problem import Problem
from tilewise.core.tensors import (
    TensorView,
    empty,
    is_strided,
    is_torch,
    require_memory,
    stored_copy,
    view,
)
from tilewise.errors import TensorError
from tilewise.ops.contract import Op


@dataclass(frozen=True, slots=True)
class ReadyCall:
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


def prepare(
    op: Op, problem: Problem, tensors: Sequence[Any], out: Any = None, *, is_fresh: bool = False
) -> ReadyCall:
    """Tensors that fit `problem`; raises TensorError where they cannot.

    An `out` that is fresh was made for this call, so that nothing of it needs to be checked.
    """
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
        if is_fresh:
            target, of = _fold(op, "out", out, view(out), shapes[-1])
        else:
            target, of = _check_out(op, out, problem, shapes[-1], tensors)
        if storages[-1].holds(of):
            return ReadyCall(tuple(ready), target, out, tuple(copied))
        copied.append("out")
    made = empty(tensors[0], shapes[-1], problem.out_dtype, storages[-1])
    return ReadyCall(tuple(ready), made, made if out is None else out, tuple(copied))


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
        raise TensorError(
            f"{name} and {op.operands[0]} come from two libraries; convert one of them"
        )
    if of.device != first.device:
        raise TensorError(
            f"{name} is on {of.device} and {op.operands[0]} on {first.device}; "
            "move them to one device"
        )


def _check_out(
    op: Op, out: Any, problem: Problem, shape: tuple[int, ...], tensors: Sequence[Any]
) -> tuple[Any, TensorView]:
    _check_library(out, tensors[0])
    check_memory(out, dict(zip(op.operands, tensors, strict=True)))
    target, seen = _fold(op, "out", out, view(out), shape)
    _check("out", seen, problem.out_dtype)
    first = view(tensors[0]).device
    if seen.device != first:
        raise TensorError(f"out is on {seen.device}; the operands are on {first}")
    return target, seen


def _check_library(out: Any, sample: Any) -> None:
    if not is_torch(out):
        view(out)  # refuses masks, and what is no array at all
    if is_torch(out) != is_torch(sample):
        raise TensorError("out and the operands come from two libraries; convert one of them")


def check_kind(out: Any, result: Any) -> None:
    """Raises where `out` has not the library, type, shape and device of `result`."""
    _check_library(out, result)
    wanted, given = (
        (t.dtype, tuple(t.shape), str(t.device) if is_torch(t) else "cpu") for t in (result, out)
    )
    if wanted != given:
        raise TensorError(
            "out is {} of shape {} on {}; it must be {} of shape {} on {}".format(*given, *wanted)
        )


def check_memory(out: Any, operands: Mapping[str, Any]) -> None:
    """Raises where writing `out` would reach further than its elements, each by itself."""
    if is_torch(out):
        if out.requires_grad or out.is_neg() or out.is_conj():
            raise TensorError(
                "out requires a gradient or is lazily negated or conjugated; pass a plain one"
            )
        if out.is_inference() and not _is_inference_mode():
            raise TensorError(
                "out was made in inference mode, and is written outside of it; pass a clone of it"
            )
        require_memory(out)
    elif not out.flags.writeable:
        raise TensorError("out is read-only; pass a writable array")
    if _overlaps_itself(out):
        raise TensorError("out has elements that share memory; pass a tensor with its own")
    for name, operand in operands.items():
        if operand is not None and _share_memory(out, operand):
            raise TensorError(f"out shares memory with {name}; pass a tensor of its own")


def _is_inference_mode() -> bool:
    import torch

    return torch.is_inference_mode_enabled()


def _itemsize(tensor: Any) -> int:
    size: int = tensor.element_size() if is_torch(tensor) else tensor.itemsize
    return size


def _strides(tensor: Any) -> tuple[int, ...]:
    """Distances between elements along each axis, in bytes."""
    if is_torch(tensor):
        return tuple(stride * tensor.element_size() for stride in tensor.stride())
    return tuple(tensor.strides)


def _span(tensor: Any) -> tuple[int, int]:
    """The first byte that a tensor touches, and one past the last."""
    size = _itemsize(tensor)
    at = tensor.data_ptr() if is_torch(tensor) else tensor.ctypes.data
    if 0 in tensor.shape:
        return at, at
    reach = [(n - 1) * s for n, s in zip(tensor.shape, _strides(tensor), strict=True)]
    return at + sum(min(0, r) for r in reach), at + sum(max(0, r) for r in reach) + size


def _spans(tensor: Any) -> bool:
    """Whether a PyTorch tensor has one address: meta tensors have none, sparse ones several."""
    return not tensor.is_meta and is_strided(tensor)


def _share_memory(a: Any, b: Any) -> bool:
    """Whether the spans of two tensors overlap; interleaved views count as sharing."""
    if is_torch(a) and is_torch(b) and (a.device != b.device or not _spans(a) or not _spans(b)):
        return False
    (a_low, a_high), (b_low, b_high) = _span(a), _span(b)
    return a_low < b_high and b_low < a_high


def _overlaps_itself(tensor: Any) -> bool:
    """Whether two indices reach one element: sorted by stride, each must clear the last."""
    reach = _itemsize(tensor)
    sides = zip(tensor.shape, _strides(tensor), strict=True)
    for stride, size in sorted((abs(s), n) for n, s in sides if n > 1):
        if stride < reach:
            return 0 not in tensor.shape
        reach += stride * (size - 1)
    return False
