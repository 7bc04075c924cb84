"""Kernels serve a problem whose tensors can be read as those of a simpler one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import Storage, is_torch, view
from tilewise.engines import Plan
from tilewise.errors import TensorError
from tilewise.ops.contract import Op
from tilewise.ops.vendor import VendorKernel


def simpler(op: Op, problem: Problem) -> Problem:
    """The same work on the same memory in its simplest shapes; often the problem itself."""
    if op.reshaped is None:
        return problem
    other = _reshaped(op.reshaped, problem)
    return problem if other == problem else other


@lru_cache(maxsize=1024)
def _reshaped(reshape: Callable[[Problem], Problem], problem: Problem) -> Problem:
    """Worked out once, though a selection asks for every kernel that it looks at."""
    return reshape(problem)


def reshaped_for(op: Op, kernel: Kernel, problem: Problem, arch: Arch) -> Problem | None:
    """The simpler problem where there is one that a kernel serves as it lies, or None.

    Vendors take calls as they are.
    """
    other = simpler(op, problem)
    if other is problem or isinstance(kernel, VendorKernel):
        return None
    return other if op.why_unusable(kernel, other, arch) is None else None


def differing(problem: Problem, other: Problem) -> str:
    """The sizes of a problem that are not those of another."""
    sizes, others = problem.to_dict(), other.to_dict()
    return " ".join(f"{key}={size}" for key, size in sizes.items() if others[key] != size)


class ReshapedPlan(Plan):
    """A plan of a simpler problem that serves another on the same memory."""

    def __init__(self, op: Op, inner: Plan, problem: Problem) -> None:
        self.kernel = inner.kernel
        self.problem = problem
        self.epilogue = inner.epilogue
        self.workspace_bytes = inner.workspace_bytes
        self._inner = inner
        self._count = len(op.operands)
        self._given = op.storage(problem)
        self._seen = list(zip(op.shapes(inner.problem), op.storage(inner.problem), strict=True))

    @property
    def reads_addresses(self) -> bool:  # type: ignore[override]  # as the plan behind it
        return self._inner.reads_addresses

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        try:
            return self._inner.why_unfit(*self._reshaped(operands, out))
        except TensorError as error:
            return str(error)

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        self._inner.execute(*self._reshaped(operands, out), workspace)

    def launcher(self, operands: Sequence[Any], out: Any) -> Callable[..., None]:
        if self.reads_addresses and is_torch(out):
            return self._inner.launcher(*self._reshaped(operands, out))
        return super().launcher(operands, out)

    def prepare(self, operands: Sequence[Any], out: Any) -> None:
        self._inner.prepare(*self._reshaped(operands, out))

    def sources(self, operands: Sequence[Any], out: Any) -> Sequence[Any]:
        return self._inner.sources(*self._reshaped(operands, out))

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        return self._inner.bind(*self._reshaped(operands, out), workspace)

    def _reshaped(self, operands: Sequence[Any], out: Any) -> tuple[list[Any], Any]:
        """The call's tensors in the simpler shapes; what an epilogue reads stays as it is."""
        tensors = (*operands[: self._count], out)
        *inputs, result = [
            reshaped_view(tensor, given, shape, storage)
            for tensor, given, (shape, storage) in zip(
                tensors, self._given, self._seen, strict=True
            )
        ]
        return [*inputs, *operands[self._count :]], result


def reshaped_view(tensor: Any, given: Storage, shape: tuple[int, ...], storage: Storage) -> Any:
    """The memory of a tensor in another shape; only the outermost axis may have gaps.

    Raises TensorError where the other shape would run across them.
    """
    seen = view(tensor)
    outer, size = given.axes[0], seen.shape[given.axes[0]]
    packed = prod(seen.shape) // size
    step = seen.strides[outer] if size > 1 else packed
    strides, inner = [0] * len(shape), 1
    for axis in reversed(storage.axes):
        strides[axis] = inner
        inner *= shape[axis]
    first = storage.axes[0]
    if shape[first] == size:
        strides[first] = step
    elif step != packed:
        raise TensorError(
            f"rows lie {step} elements apart; they are read as one of {packed}: pass them packed"
        )
    if is_torch(tensor):
        return tensor.as_strided(shape, strides)
    apart = [stride * tensor.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(tensor, shape, apart)
