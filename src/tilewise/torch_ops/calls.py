"""Plain tensors: from one look-up straight to a launch. The first call of a kind decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tilewise.core.problem import Problem
from tilewise.core.tensors import view
from tilewise.dispatch import Dispatcher, default_dispatcher, live_arch
from tilewise.dispatch.operands import ReadyCall, prepare
from tilewise.dispatch.remembered import CALLS
from tilewise.engines import Plan
from tilewise.errors import ArchError, TensorError
from tilewise.notices import warn_once
from tilewise.ops.contract import get_op
from tilewise.torch_ops.collecting import COLLECTOR


def allocator(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Makes one result after the other, with as little in the way as PyTorch allows.

    PyTorch's compiler has an entry of its own for that, which allocates on the current device and
    takes a third of the time of `torch.empty`.
    """
    usual = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is None:
        return usual
    if device.type == "cpu":
        return partial(quick, tuple(shape), tuple(strides), dtype)
    index, current = device.index, torch._C._cuda_getDevice

    def allocate() -> Tensor:
        return quick(shape, strides, dtype) if current() == index else usual()

    shape, strides = tuple(shape), tuple(strides)
    return allocate


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call of one kind: the problem behind it, and how its tensors become operands."""

    problem: Problem
    allocate: Callable[[], Tensor]
    """The result as the caller sees it, or its sums in fp32 where `finish` rounds them."""
    pytorch: Callable[..., Tensor] | None
    """The same by PyTorch, on the caller's tensors; None where PyTorch has nothing."""
    deterministic: bool = False
    operands: Callable[..., Sequence[Tensor]] = lambda *tensors: tensors
    """The caller's tensors as the problem's operands."""
    seen: Callable[[Tensor], Tensor] = lambda out: out
    """The result as the problem's."""
    epilogue: Any = None
    saved_bytes: int = 0
    """What need not be read or written where the epilogue is fused."""
    vectors: Callable[..., Sequence[Tensor]] = lambda *tensors: ()
    """Which of the caller's tensors the epilogue reads."""
    finish: Callable[..., Tensor] | None = None
    """`finish(out, *tensors)` gives the result, with what the epilogue would have done to it."""


def first(key: Any, work: Work, tensors: Sequence[Tensor]) -> Tensor:
    """Chooses, runs, and remembers the way for the next call under `key`."""
    if is_capturing(tensors[0]):
        new = "a CUDA graph is being captured, and some call in it was never made before"
        if work.pytorch is None:
            raise TensorError(f"{new}; run the model once before capturing it")
        warn_once(f"{new}: PyTorch's kernel goes into the graph. Run the model once before")
        return work.pytorch(*tensors)
    dispatcher = _dispatcher(work, tensors[0])
    generation = CALLS.generation  # the first dispatcher of a process makes what is known stale
    if dispatcher is None:
        assert work.pytorch is not None
        CALLS.keep(key, work.pytorch, generation)
        return work.pytorch(*tensors)
    options: dict[str, Any] = {"deterministic": work.deterministic, "epilogue": work.epilogue}
    options["saved_bytes"] = work.saved_bytes
    plan, choice = dispatcher.plan(work.problem, **options)
    if choice.kernel.engine == "vendor" and work.pytorch is not None:
        CALLS.keep(key, work.pytorch, generation)
        return work.pytorch(*tensors)
    out = work.allocate()
    op, given = dispatcher.registry.op, work.operands(*tensors)
    call = prepare(op, work.problem, given, work.seen(out), is_fresh=True)
    if COLLECTOR.is_open and work.pytorch is not None:
        COLLECTOR.add(plan.sources(call.operands, call.out))
        return work.pytorch(*tensors)
    vectors = work.vectors(*tensors)
    plan, choice = dispatcher.execute(work.problem, call, vectors=vectors, **options)
    call.finish()
    if choice.kernel.engine == "vendor" and work.pytorch is not None:  # the chosen one failed
        CALLS.keep(key, work.pytorch, generation)
        return work.pytorch(*tensors)
    CALLS.keep(key, _ready(work, plan, call, tensors), generation)
    if plan.epilogue is None and work.finish is not None:
        return work.finish(out, *tensors)
    return out


def _dispatcher(work: Work, tensor: Tensor) -> Dispatcher | None:
    """Whose kernels serve on the tensor's device; None where that is for PyTorch alone to do."""
    try:
        return default_dispatcher(work.problem.op, live_arch(tensor))
    except ArchError as error:
        if work.pytorch is None:
            raise
        warn_once(f"left to PyTorch: {error}")
        return None


def _ready(
    work: Work, plan: Plan, call: ReadyCall, tensors: Sequence[Tensor]
) -> Callable[..., Tensor]:
    """The same call again, on tensors stored just like these."""
    allocate, operands, seen = work.allocate, work.operands, work.seen
    given = operands(*tensors)
    if call.copied or not all(map(_is_same, given, call.operands)):
        return partial(_again, work, plan)
    is_fused = plan.epilogue is not None
    vectors = work.vectors if is_fused else lambda *tensors: ()
    finish = None if is_fused else work.finish
    read = (*call.operands, *vectors(*tensors))
    launch = plan.launcher(read, call.out)
    is_all = len(read) == len(tensors) and all(map(_is_at, tensors, given))
    if plan.reads_addresses and not finish and is_all:
        return _straight(allocate, launch, len(tensors))

    def in_shape(*tensors: Tensor) -> Tensor:
        out = allocate()
        launch(seen(out), *operands(*tensors), *vectors(*tensors))
        return out if finish is None else finish(out, *tensors)

    return in_shape


def _straight(
    allocate: Callable[[], Tensor], launch: Callable[..., None], count: int
) -> Callable[..., Tensor]:
    """Nothing but the result's memory and a launch on `count` tensors."""

    def pair(a: Tensor, b: Tensor) -> Tensor:
        out = allocate()
        launch(out, a, b)
        return out

    def many(*tensors: Tensor) -> Tensor:
        out = allocate()
        launch(out, *tensors)
        return out

    return pair if count == 2 else many


def into(work: Work, tensors: Sequence[Tensor], out: Any) -> Callable[..., Tensor] | None:
    """Computes into the caller's own tensor, which is checked first.

    Gives `again(*tensors, out)` for tensors stored like these, or None where some were copied.
    """
    dispatcher, problem = _dispatcher(work, tensors[0]), work.problem
    op = get_op(problem.op)
    if dispatcher is None:
        assert work.pytorch is not None
        prepare(op, problem, tensors, out)  # raises where `out` does not fit
        work.pytorch(*tensors, out=out)
        return None
    if problem.is_empty:
        dispatcher.run(problem, *tensors, out=out)
        return None
    call = prepare(op, problem, tensors, out)
    plan, choice = dispatcher.execute(problem, call, deterministic=work.deterministic)
    call.finish()
    if call.copied or call.out is not out or not all(map(_is_same, tensors, call.operands)):
        return None
    launch = plan.launcher(call.operands, out)
    if choice.kernel.engine == "vendor" and work.pytorch is not None:
        launch = partial(_pytorch_into, work.pytorch)
    (a_bytes, b_bytes), out_bytes = map(_span_bytes, tensors), _span_bytes(out)

    def again(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        at = out.data_ptr()
        if -a_bytes < a.data_ptr() - at < out_bytes or -b_bytes < b.data_ptr() - at < out_bytes:
            prepare(op, problem, (a, b), out)  # raises: they share memory
        launch(out, a, b)
        increment_version(out)
        return out

    return again


def _pytorch_into(pytorch: Callable[..., Tensor], out: Tensor, *tensors: Tensor) -> None:
    pytorch(*tensors, out=out)


def _span_bytes(tensor: Tensor) -> int:
    """From a tensor's first element to behind its last."""
    return view(tensor).extent[1] * tensor.element_size()


def _is_at(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors start at the same element; a copy does not."""
    return a.data_ptr() == b.data_ptr()


def _is_same(a: Tensor, b: Tensor) -> bool:
    return _is_at(a, b) and a.shape == b.shape


def _again(work: Work, plan: Plan, *tensors: Tensor) -> Tensor:
    """The chosen plan on other tensors, which are checked and copied as need be."""
    out = work.allocate()
    op = get_op(work.problem.op)
    call = prepare(op, work.problem, work.operands(*tensors), work.seen(out), is_fresh=True)
    more = work.vectors(*tensors) if plan.epilogue is not None else ()
    plan.execute((*call.operands, *more), call.out)
    call.finish()
    if plan.epilogue is None and work.finish is not None:
        return work.finish(out, *tensors)
    return out


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be compiled or loaded."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
