"""Runs Triton and Gluon kernels: compiled once, launched with little Python in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.engines.contract import Build, Engine, Plan
from tilewise.engines.triton_build import build_all, compile_ahead, launch_module
from tilewise.engines.triton_launch import BoundKernel, live_target
from tilewise.errors import ExecutionError, TensorError
from tilewise.ops.launch import Launch


class TritonEngine(Engine):
    """Builds anywhere, for any GPU; plans where there is one."""

    name = "triton"
    takes_epilogue = True

    def why_unavailable(self) -> str | None:
        for package in ("torch", "triton"):
            if find_spec(package) is None:
                return f"{package} is not installed"
        import torch

        return None if torch.cuda.is_available() else "there is no GPU here"

    def why_no_build(self) -> str | None:
        return None if find_spec("triton") else "triton is not installed"

    def build(
        self,
        kernels: Sequence[Kernel],
        arch: Arch,
        *,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        return build_all(kernels, arch, max_workers, on_done)

    def compile_ahead(
        self,
        pairs: Iterable[tuple[Kernel, Problem]],
        arch: Arch,
        *,
        max_workers: int | None = None,
    ) -> list[str]:
        """Compiles what plans for these pairs will need, in parallel; the failures, one a line."""
        sources = [
            launch_module(kernel.op).launch(kernel, problem, arch).source
            for kernel, problem in pairs
        ]
        target = live_target(arch) if self.why_unavailable() is None else None
        return compile_ahead(sources, arch, max_workers, target)

    def plan(
        self, kernel: Kernel, problem: Problem, arch: Arch, *, epilogue: Any = None
    ) -> TritonPlan:
        """The kernel bound to a problem; `epilogue` is the op's own, where it has one."""
        reason = self.why_unavailable()
        if reason:
            raise ExecutionError(f"{kernel.name} cannot run: {reason}")
        return TritonPlan(kernel, problem, arch, epilogue)


class TritonPlan(Plan):
    """A kernel bound to a problem; strides are looked at on every call, and remembered."""

    reads_addresses = True

    def __init__(self, kernel: Kernel, problem: Problem, arch: Arch, epilogue: Any = None) -> None:
        self.kernel = kernel
        self.problem = problem
        self.epilogue = epilogue
        self._arch = arch
        self._module = launch_module(kernel.op)
        self.workspace_bytes = self._launch().workspace_bytes
        self._calls: dict[Any, BoundKernel] = {}

    def prepare(self, operands: Sequence[Any], out: Any) -> None:
        self._call(operands, out)

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        key = _layout(operands, out)
        if key in self._calls:
            return None
        try:
            self._specialised(key)
        except TensorError as error:
            return str(error)
        return None

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        self._call(operands, out).start(_addresses(operands, out), workspace)

    def launcher(self, operands: Sequence[Any], out: Any) -> Callable[..., None]:
        return self._call(operands, out).launcher()

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        """A launch with everything fixed, on the stream that is current at each call."""
        call, addresses = self._call(operands, out), _addresses(operands, out)
        if call.needs_scratch:
            return lambda: call.start(addresses, workspace)
        return call.fixed(addresses)

    def _call(self, operands: Sequence[Any], out: Any) -> BoundKernel:
        key = _layout(operands, out)
        call = self._calls.get(key)
        if call is None:
            import torch

            with torch.cuda.device(out.get_device()):
                name = self.kernel.name
                call = BoundKernel(self._specialised(key), self._arch, name, self.epilogue)
            self._calls[key] = call
        return call

    def _specialised(self, layout: Any) -> Launch:
        *strides, is_aligned, _ = layout
        ours = self._module.strides_of(self.problem, strides)
        return self._launch(strides=ours, is_aligned=is_aligned)

    def _launch(self, **layout: Any) -> Launch:
        made: Launch = self._module.launch(
            self.kernel, self.problem, self._arch, epilogue=self.epilogue, **layout
        )
        return made


def _layout(operands: Sequence[Any], out: Any) -> Any:
    """What a specialisation depends on: strides, alignment to 16 bytes, and the device."""
    a, b = operands[0], operands[1]
    is_aligned = not (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15
    return a.stride(), b.stride(), out.stride(), is_aligned, out.get_device()


def _addresses(operands: Sequence[Any], out: Any) -> list[int]:
    """Of A, B and C, then of what the epilogue reads."""
    a, b, *more = operands
    return [a.data_ptr(), b.data_ptr(), out.data_ptr(), *[t.data_ptr() for t in more]]
