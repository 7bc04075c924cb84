"""Kernels that need aligned sizes or strides serve other tensors through copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import Storage, empty, view
from tilewise.dispatch.reshaping import ReshapedPlan, reshaped_for
from tilewise.engines import Engine, Plan
from tilewise.ops.contract import Op, get_op

WIDE_BYTES = 16
COPY_US = 5.0
"""What a copy or a fill costs on a GPU besides moving the bytes: another launch."""


def aligned(op: Op, kernel: Kernel, problem: Problem) -> Problem:
    """What `kernel` has to compute to serve `problem`: itself, or a larger one."""
    alignment = kernel.alignment(problem)
    if not alignment or op.padded is None:
        return problem
    return op.padded(problem, alignment)


class Copies:
    """What copies for padding cost the kernels of a pool, problem by problem."""

    def __init__(self, op: Op, kernels: Sequence[Kernel], arch: Arch) -> None:
        self._op, self._kernels, self._arch = op, kernels, arch
        self._known: dict[str, tuple[list[Kernel], list[int]]] = {}

    def us(self, problem: Problem) -> CopyCosts:
        """Microseconds of each kernel, worked out as they are asked for."""
        examples, which = self._alike(problem)

        def cost(kernel: Kernel) -> float:
            return copy_us(problem, aligned(self._op, kernel, problem), self._arch)

        return CopyCosts(examples, which, cost)

    def _alike(self, problem: Problem) -> tuple[list[Kernel], list[int]]:
        """A kernel of each alignment, and which of these every kernel is like."""
        layout = str(getattr(problem, "layout", ""))
        found = self._known.get(layout)
        if found is None:
            places: dict[tuple[int, ...], int] = {}
            examples: list[Kernel] = []
            which: list[int] = []
            for kernel in self._kernels:
                place = places.setdefault(kernel.alignment(problem), len(examples))
                if place == len(examples):
                    examples.append(kernel)
                which.append(place)
            found = self._known[layout] = (examples, which)
        return found


class CopyCosts:
    """What one problem's copies cost; kernels of the same alignment are worked out together."""

    def __init__(
        self, examples: list[Kernel], which: list[int], cost: Callable[[Kernel], float]
    ) -> None:
        self._examples, self._which, self._cost = examples, which, cost
        self._known: list[float | None] = [None] * len(examples)
        self._spared: Sequence[bool] = ()

    def spare(self, which: Sequence[bool]) -> None:
        """Kernels that need no copies after all."""
        self._spared = which

    def __getitem__(self, place: int) -> float:
        if self._spared and self._spared[place]:
            return 0.0
        example = self._which[place]
        known = self._known[example]
        return self._of(example) if known is None else known

    @property
    def are_none(self) -> bool:
        """Whether kernels are all alike, and need no copies; where they differ, nobody looked."""
        return len(self._examples) == 1 and not self._of(0)

    def any(self) -> bool:
        """Whether some kernel needs copies."""
        return any(map(self._of, range(len(self._examples))))

    def _of(self, example: int) -> float:
        known = self._known[example]
        if known is None:
            known = self._known[example] = self._cost(self._examples[example])
        return known


def copy_us(problem: Problem, larger: Problem, arch: Arch) -> float:
    """What moving the operands and the result costs; nothing where sizes fit."""
    if larger is problem or larger == problem:
        return 0.0
    op = get_op(problem.op)
    moved = outgrown(op, problem, larger)
    sizes = [_tensor_bytes(op, p) for p in (problem, larger)]
    # Operands are cleared and filled, the result is moved.
    calls = sum(1 if at == len(op.operands) else 2 for at in moved)
    return calls_us(calls, sum(of[at] for of in sizes for at in moved), arch)


def calls_us(calls: int, moved_bytes: int, arch: Arch) -> float:
    """What so many copies and fills cost that read and write so many bytes."""
    launches = calls if arch.kind == "gpu" else 0
    return launches * COPY_US + 2 * moved_bytes / (arch.memory_gb_s * 1e3)


def outgrown(op: Op, problem: Problem, larger: Problem) -> frozenset[int]:
    """Which of the operands and, last, the result of a problem cannot serve a larger one.

    A tensor of the same shape can where its rows are packed. Where any distance may lie between
    them it is copied like the others, which sets the distance right.
    """
    sides = zip(op.shapes(problem), op.shapes(larger), op.storage(larger), strict=True)
    return frozenset(
        at
        for at, (given, wanted, storage) in enumerate(sides)
        if given != wanted or storage.dense == 1
    )


def _dtypes(op: Op, problem: Problem) -> list[str]:
    """Of the operands and, last, the result as they are stored."""
    stored = "fp32" if problem.dtype == "tf32" else problem.dtype
    return [stored] * len(op.operands) + [problem.out_dtype]


def _tensor_bytes(op: Op, problem: Problem) -> list[int]:
    sides = zip(op.shapes(problem), _dtypes(op, problem), strict=True)
    return [prod(shape) * dtype(kind).bytes for shape, kind in sides]


def plan_for(
    op: Op, engine: Engine, kernel: Kernel, problem: Problem, arch: Arch, epilogue: Any = None
) -> Plan:
    """A plan for `problem`, padded where the kernel needs it; it fuses `epilogue` if it can."""
    other = reshaped_for(op, kernel, problem, arch)
    larger = aligned(op, kernel, problem) if other is None else other
    fused = {"epilogue": epilogue} if epilogue is not None and engine.takes_epilogue else {}
    plan = engine.plan(kernel, larger, arch, **fused)
    if other is not None:
        return ReshapedPlan(op, plan, problem)
    return plan if larger == problem else PaddedPlan(op, plan, problem)


class PaddedPlan(Plan):
    """A plan of a larger problem that serves a smaller one."""

    def __init__(self, op: Op, inner: Plan, problem: Problem) -> None:
        self.kernel = inner.kernel
        self.problem = problem
        self.epilogue = inner.epilogue
        self._inner = inner
        self._shapes = op.shapes(inner.problem)
        self._storage = op.storage(inner.problem)
        self._dtypes = _dtypes(op, problem)
        self._moved = outgrown(op, problem, inner.problem)
        sizes = _tensor_bytes(op, inner.problem)
        self.workspace_bytes = inner.workspace_bytes + sum(sizes[at] for at in self._moved)

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        """Copies always fit; tensors that the kernel sees where they are must do so, too."""
        if len(self._moved) == len(self._shapes):
            return None
        tensors = (*operands[: len(self._shapes) - 1], out)
        if irregular(tensors) <= self._moved:
            return None
        return f"{self.kernel.name} reaches tensors that begin at multiples of {WIDE_BYTES} bytes"

    def sources(self, operands: Sequence[Any], out: Any) -> Sequence[Any]:
        count = len(self._shapes) - 1
        seen = [
            self._copy(at, out) if at in self._moved else tensor
            for at, tensor in enumerate((*operands[:count], out))
        ]
        return self._inner.sources(seen[:count], seen[count])

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        """Copies in, computes and copies out; copies are its own, `workspace` is the kernel's."""
        count = len(self._shapes) - 1
        inputs, more = list(operands[:count]), operands[count:]
        for at in sorted(self._moved - {count}):
            inputs[at] = self._copy(at, out)
            inputs[at][...] = 0
            inputs[at][_corner(operands[at].shape)] = operands[at]
        if count not in self._moved:
            self._inner.execute([*inputs, *more], out, workspace)
            return
        result = self._copy(count, out)
        # An epilogue reads vectors along the result's sides; the longer side is enough for each.
        longest = max(self._shapes[-1])
        grown = [_grown(vector, longest) for vector in more]
        self._inner.execute([*inputs, *grown], result, workspace)
        out[...] = result[_corner(out.shape)]

    def _copy(self, at: int, sample: Any) -> Any:
        """Memory for one of the larger problem's tensors."""
        return empty(sample, self._shapes[at], self._dtypes[at], self._storage[at])


class CopyingPlan(Plan):
    """A plan whose kernel cannot take some tensors where they are: they are copied before."""

    def __init__(self, op: Op, inner: Plan, tensors: Sequence[Any]) -> None:
        self.kernel = inner.kernel
        self.problem = inner.problem
        self.epilogue = inner.epilogue
        self._inner = inner
        self._storage = op.storage(inner.problem)
        self.workspace_bytes = inner.workspace_bytes + copied_bytes(tensors)

    def ready(self, operands: Sequence[Any], out: Any) -> tuple[list[Any], Any]:
        """The tensors that the kernel sees; values of operands are in them."""
        tensors = (*operands[: len(self._storage) - 1], out)
        copied = irregular(tensors)
        *inputs, result = [
            empty(given, tuple(given.shape), view(given).dtype, storage) if at in copied else given
            for at, (given, storage) in enumerate(zip(tensors, self._storage, strict=True))
        ]
        for made, given in zip(inputs, operands, strict=False):
            if made is not given:
                made[...] = given
        return [*inputs, *operands[len(inputs) :]], result

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        return self._inner.why_unfit(*self.ready(operands, out))

    def sources(self, operands: Sequence[Any], out: Any) -> Sequence[Any]:
        return self._inner.sources(*self.ready(operands, out))

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        inputs, result = self.ready(operands, out)
        self._inner.execute(inputs, result, workspace)
        if result is not out:
            out[...] = result


def irregular(tensors: Sequence[Any]) -> frozenset[int]:
    """Which of the operands and, last, the result lie where wide copies cannot reach.

    They want addresses, and the distances between an operand's rows, in multiples of 16 bytes,
    and every row by itself; results are stored more freely.
    """
    found = set()
    for at, tensor in enumerate(tensors):
        seen = view(tensor)
        size = dtype(seen.dtype).bytes
        sides = zip(seen.shape, seen.strides, strict=True) if at < len(tensors) - 1 else ()
        pitches = [stride * size for extent, stride in sides if extent > 1 and stride != 1]
        if seen.address % WIDE_BYTES or any(p % WIDE_BYTES or not p for p in pitches):
            found.add(at)
    return frozenset(found)


def copied_bytes(tensors: Sequence[Any]) -> int:
    """How much of the operands and, last, the result has to be copied to be regular."""
    views = [view(tensors[at]) for at in irregular(tensors)]
    return sum(prod(seen.shape) * dtype(seen.dtype).bytes for seen in views)


def _grown(vector: Any, length: int) -> Any:
    """A vector with zeros behind it."""
    made = empty(vector, (length,), view(vector).dtype, Storage((0,), dense=1))
    made[...] = 0
    made[: vector.shape[0]] = vector
    return made


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
