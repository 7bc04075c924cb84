"""Kernels that need aligned sizes serve others through zero-filled copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import empty
from tilewise.engines import Engine, Plan
from tilewise.ops.contract import Op


def aligned(op: Op, kernel: Kernel, problem: Problem) -> Problem:
    """What `kernel` has to compute to serve `problem`: itself, or a larger one."""
    alignment = kernel.alignment(problem)
    if not alignment or op.padded is None:
        return problem
    return op.padded(problem, alignment)


def copy_us(problem: Problem, larger: Problem, arch: Arch) -> float:
    """What moving the operands and the result costs; nothing where sizes fit."""
    if larger == problem:
        return 0.0
    return 2 * (problem.bytes + larger.bytes) / (arch.memory_gb_s * 1e3)


def plan_for(op: Op, engine: Engine, kernel: Kernel, problem: Problem, arch: Arch) -> Plan:
    """A plan for `problem`, padded where the kernel needs it."""
    larger = aligned(op, kernel, problem)
    plan = engine.plan(kernel, larger, arch)
    return plan if larger == problem else PaddedPlan(op, plan, problem)


class PaddedPlan(Plan):
    """A plan of a larger problem that serves a smaller one."""

    def __init__(self, op: Op, inner: Plan, problem: Problem) -> None:
        self.kernel = inner.kernel
        self.problem = problem
        self._inner = inner
        self._shapes = op.shapes(inner.problem)
        self._storage = op.storage(inner.problem)
        self.workspace_bytes = inner.workspace_bytes + sum(
            _elements(shape) * dtype(kind).bytes
            for shape, kind in zip(self._shapes, self._dtypes(), strict=True)
        )

    def _dtypes(self) -> list[str]:
        stored = "fp32" if self.problem.dtype == "tf32" else self.problem.dtype
        return [stored] * (len(self._shapes) - 1) + [self.problem.out_dtype]

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        """Copies in, computes and copies out; copies are its own, `workspace` is the kernel's."""
        *inputs, result = [
            empty(out, shape, kind, storage)
            for shape, kind, storage in zip(
                self._shapes, self._dtypes(), self._storage, strict=True
            )
        ]
        for made, given in zip(inputs, operands, strict=True):
            made[...] = 0
            made[_corner(given.shape)] = given
        self._inner.execute(inputs, result, workspace)
        out[...] = result[_corner(out.shape)]


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
