"""Runs the vendor's routine where a tilewise kernel would run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.identity import canonical_json
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import with_sources
from tilewise.core.problem import Problem
from tilewise.core.tensors import is_torch
from tilewise.engines.contract import Build, Engine, Plan, digest_of, versions
from tilewise.engines.device import detect, why_no_gpu
from tilewise.errors import ExecutionError
from tilewise.ops.contract import Op, get_op
from tilewise.ops.fields import figures
from tilewise.ops.vendor import Tactic, VendorKernel

REMEMBERED = 65536


class VendorEngine(Engine):
    """PyTorch or NumPy; there is nothing to build."""

    name = "vendor"
    kinds = ("cpu", "gpu")

    def __init__(self) -> None:
        self._answers: dict[Problem, Tactic] = {}

    def toolchain(self, op: Op, family: str = "") -> str:
        return with_sources(versions("numpy", "torch"), digest_of([op.folder / "vendor.py"]))

    def tactic(self, problem: Problem, arch: Arch) -> Tactic:
        """Asked once a problem: what a library says of one does not change."""
        if not _is_here(arch):
            return {}
        found = self._answers.get(problem)
        if found is None:
            found = get_op(problem.op).tactic(problem, arch)
            if found:
                if len(self._answers) >= REMEMBERED:
                    self._answers.clear()
                self._answers[problem] = found
        return found

    def build_one(self, kernel: Kernel) -> Build:
        assert isinstance(kernel, VendorKernel)
        if not self._has(kernel):
            return Build(kernel=kernel, status="compile_error", message="PyTorch is not installed")
        return super().build_one(kernel)

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> VendorPlan:
        assert isinstance(kernel, VendorKernel)
        if not self._has(kernel):
            raise ExecutionError(f"{kernel.name} needs PyTorch, which is not installed")
        return VendorPlan(self, kernel, problem, arch)

    @staticmethod
    def _has(kernel: VendorKernel) -> bool:
        return kernel.library != "torch" or find_spec("torch") is not None


@lru_cache(maxsize=64)
def _is_here(arch: Arch) -> bool:
    """Whether an architecture has the figures of the GPU in this machine."""
    if arch.kind != "gpu" or why_no_gpu() is not None:
        return False
    live = detect("gpu")
    return live.name == arch.name and figures(live) == figures(arch)


class VendorPlan(Plan):
    """A vendor routine bound to one problem."""

    kernel: VendorKernel
    workspace_bytes = 0

    def __init__(
        self, engine: VendorEngine, kernel: VendorKernel, problem: Problem, arch: Arch
    ) -> None:
        self._engine = engine
        self.kernel = kernel
        self.problem = problem
        self._arch = arch
        module = get_op(kernel.op).module("vendor")
        self._bind = getattr(module, f"bind_{kernel.library}")

    @property
    def tactic(self) -> str:  # type: ignore[override]  # asked for when somebody wants to know
        found = self._engine.tactic(self.problem, self._arch)
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
        wants_torch = self.kernel.library == "torch"
        if wants_torch == is_torch(tensor):
            return tensor
        if wants_torch:
            import torch

            return torch.from_numpy(tensor)
        return tensor.detach().numpy()
