"""Runs the vendor's routine where a tilewise kernel would run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.identity import canonical_json
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import is_torch
from tilewise.engines.contract import Build, Engine, Plan
from tilewise.engines.cublas import tactic_of
from tilewise.errors import ExecutionError
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import VendorKernel


class VendorEngine(Engine):
    """PyTorch or NumPy; there is nothing to build."""

    name = "vendor"

    def build_one(self, kernel: Kernel) -> Build:
        if not self._has(kernel):
            return Build(kernel=kernel, status="compile_error", message="PyTorch is not installed")
        return super().build_one(kernel)

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> VendorPlan:
        assert isinstance(kernel, VendorKernel)
        if not self._has(kernel):
            raise ExecutionError(f"{kernel.name} needs PyTorch, which is not installed")
        return VendorPlan(kernel, problem, arch)

    @staticmethod
    def _has(kernel: Kernel) -> bool:
        return kernel.library != "torch" or find_spec("torch") is not None  # type: ignore[attr-defined]


class VendorPlan(Plan):
    """A vendor routine bound to one problem."""

    workspace_bytes = 0

    def __init__(self, kernel: VendorKernel, problem: Problem, arch: Arch | None = None) -> None:
        self.kernel = kernel
        self.problem = problem
        self._arch = arch
        module = get_op(kernel.op).module("vendor")
        self._bind = getattr(module, f"bind_{kernel.library}")

    @property
    def tactic(self) -> str:  # type: ignore[override]  # asked for when somebody wants to know
        found = tactic_of(self.problem, self._arch) if self._arch else {}
        return canonical_json(found) if found else ""

    def prepare(self, operands: Sequence[Any], out: Any) -> None:
        self.bind(operands, out)  # imports the library, which takes PyTorch seconds

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        try:
            result = self.bind(operands, out)()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ExecutionError(f"{self.kernel.name} failed: {error}") from error
        target = self._native(out)
        if result is not target:
            target[...] = result

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        """The routine alone: where it gives a tensor of its own, `out` is not written."""
        call: Callable[[], Any] = self._bind(
            self.problem, [self._native(t) for t in operands], self._native(out)
        )
        return call

    def _native(self, tensor: Any) -> Any:
        """The same memory as the library's own kind of tensor."""
        wants_torch = self.kernel.library == "torch"  # type: ignore[attr-defined]
        if wants_torch == is_torch(tensor):
            return tensor
        if wants_torch:
            import torch

            return torch.from_numpy(tensor)
        return tensor.detach().numpy()
