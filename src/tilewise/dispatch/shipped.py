"""Calls on the shipped pools: what the functional API and its gradients are made of."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from tilewise.core.problem import Problem
from tilewise.core.tensors import is_torch
from tilewise.dispatch import default_dispatcher, live_arch
from tilewise.dispatch.operands import prepare
from tilewise.dispatch.remembered import CALLS
from tilewise.errors import TensorError
from tilewise.ops.conv.infer import LayerSettings, fixed, named
from tilewise.ops.conv.infer import infer as infer_conv
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.infer import infer


def run_matmul(
    a: Any, b: Any, *, out: Any = None, deterministic: bool = False, out_dtype: str = ""
) -> Any:
    """`a @ b` by the kernel that suits it; a batch of one stays a batch."""
    dispatcher = default_dispatcher("gemm", live_arch(a))
    problem = infer(a, b, out_dtype=out_dtype)
    result = dispatcher.run(problem, a, b, out=out, deterministic=deterministic).out
    if out is not None or len(result.shape) == len(a.shape):
        return result
    return result.reshape((1, *result.shape))


def multiply_arrays(a: Any, b: Any, out: Any, deterministic: bool) -> Any:
    """`run_matmul` of NumPy arrays; the way is remembered for arrays stored alike."""
    key = (*_stored(a), *_stored(b), None if out is None else _stored(out), deterministic)
    call = CALLS.get(key)
    if call is not None:
        return call(out, a, b)
    result = _first(key, infer(a, b), a, b, out, deterministic)
    return run_matmul(a, b, out=out, deterministic=deterministic) if result is None else result


def convolve_arrays(
    rank: int, x: Any, w: Any, layer: LayerSettings, out: Any, deterministic: bool
) -> Any:
    """`run_conv` of NumPy arrays, forward; likewise."""
    settled = fixed(*layer)
    key: Any = (rank, *_stored(x), *_stored(w), None if out is None else _stored(out))
    key = (*key, settled, deterministic)
    call = None if settled is None else CALLS.get(key)
    if call is not None:
        return call(out, x, w)
    if x.ndim != rank + 2:
        raise TensorError(f"x has shape {x.shape}; conv{rank}d takes {rank + 2} dimensions")
    problem = infer_conv(x, w, **named(*layer))
    result = None if settled is None else _first(key, problem, x, w, out, deterministic)
    if result is None:
        return run_conv(problem, x, w, out=out, deterministic=deterministic)
    return result


def _stored(array: Any) -> tuple[Any, ...]:
    """All that decides a call but where the array lies."""
    flags = array.flags
    return array.shape, array.strides, array.dtype, flags.aligned, flags.writeable


def _first(key: Any, problem: Problem, a: Any, b: Any, out: Any, deterministic: bool) -> Any:
    """Runs and remembers a call whose arrays are served where they lie; None where they are not."""
    dispatcher = default_dispatcher(problem.op, live_arch(a))
    generation = CALLS.generation  # the first dispatcher of a process makes what is known stale
    op = dispatcher.registry.op
    ready = prepare(op, problem, (a, b), out)
    is_there = ready.operands[0] is a and ready.operands[1] is b and ready.out is ready.result
    if problem.is_empty or ready.copied or not is_there:
        return None
    plan, _ = dispatcher.execute(problem, ready, deterministic=deterministic)
    launch, axes = plan.launcher((a, b), ready.out), op.storage(problem)[-1].axes
    stored, kind = tuple(ready.out.shape[axis] for axis in axes), ready.out.dtype
    back = tuple(axes.index(axis) for axis in range(len(axes)))

    def made(_: Any, a: Any, b: Any) -> Any:
        result = np.empty(stored, kind).transpose(back)
        launch(result, a, b)
        return result

    def into(out: Any, a: Any, b: Any) -> Any:
        if np.may_share_memory(out, a) or np.may_share_memory(out, b):
            prepare(op, problem, (a, b), out)  # raises
        launch(out, a, b)
        return out

    CALLS.keep(key, made if out is None else into, generation)
    return ready.finish()


def run_conv(
    problem: ConvProblem, first: Any, second: Any, *, out: Any = None, deterministic: bool = False
) -> Any:
    """One direction of a convolution; the result has as many dimensions as the operands."""
    dispatcher = default_dispatcher(problem.op, live_arch(first))
    result = dispatcher.run(problem, first, second, out=out, deterministic=deterministic).out
    missing = len(first.shape) - len(result.shape)
    if out is not None or not missing:
        return result
    return result.reshape((*result.shape[:2], *(1,) * missing, *result.shape[2:]))


def has_product(a: Any, b: Any) -> bool:
    """Whether both are matrices, or batches of them of one size."""
    return bool(a.ndim == b.ndim == 2 or (a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]))


def product_of_any(a: Any, b: Any, product: Callable[[Any, Any], Any]) -> Any:
    """`a @ b` as NumPy and PyTorch mean it for any dimensions, by products of matrices."""
    if not a.ndim or not b.ndim:
        raise TensorError(f"a has {a.ndim} dimensions and b {b.ndim}; scalars are multiplied by *")
    x, y = a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    (m, k), n = x.shape[-2:], y.shape[-1]
    if y.shape[-2] != k:
        raise TensorError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; the {k} columns of a must be "
            f"as many as the {y.shape[-2]} rows of b"
        )
    if y.ndim == 2:  # all rows below each other
        result = product(x.reshape(prod(x.shape[:-1]), k), y).reshape((*x.shape[:-1], n))
    else:
        batch = _common(tuple(x.shape[:-2]), tuple(y.shape[:-2]))
        left = _spread(x, (*batch, m, k)).reshape((prod(batch), m, k))
        right = _spread(y, (*batch, k, n)).reshape((prod(batch), k, n))
        result = product(left, right).reshape((*batch, m, n))
    if a.ndim == 1:
        result = result[..., 0, :]
    return result[..., 0] if b.ndim == 1 else result


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The batch that both spread to."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    batch = []
    for one, other in pairs:
        if one != other and 1 not in (one, other):
            raise TensorError(f"a has batch {a} and b {b}; sizes must be equal or one")
        batch.append(other if one == 1 else one)
    return tuple(batch)


def _spread(tensor: Any, shape: tuple[int, ...]) -> Any:
    return tensor.expand(shape) if is_torch(tensor) else np.broadcast_to(tensor, shape)
