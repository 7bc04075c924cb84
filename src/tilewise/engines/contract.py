"""What an engine promises: kernels are built, then bound to problems as plans, then executed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel needs; read from the compiler's output, before any launch."""

    registers: int = 0
    spills: int = 0
    smem_bytes: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What became of one kernel: a failure is a fact about that kernel, not the end."""

    kernel: Kernel
    status: str
    """`ok`, `compile_error` or `over_limit`."""
    message: str = ""
    seconds: float = 0.0
    was_cached: bool = False
    resources: Resources = Resources()


class Plan(ABC):
    """A compiled kernel bound to one problem."""

    kernel: Kernel
    problem: Problem
    workspace_bytes: int
    """Scratch memory that `execute` needs, known before any launch."""

    @abstractmethod
    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        """Computes into `out`; all arrays are the engine's native kind, in the problem's layout.

        Without a `workspace` of `workspace_bytes` the plan takes one of its own.
        """

    def prepare(self, operands: Sequence[Any], out: Any) -> None:  # noqa: B027  # optional
        """Compiles and loads whatever the first call with such tensors would; launches nothing."""

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        """A call with everything fixed, for timing and for repeating with little overhead."""
        return lambda: self.execute(operands, out, workspace)


class Engine(ABC):
    """Turns kernels into callables."""

    name: str

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """Why this engine cannot run here, or None."""

    @abstractmethod
    def build(
        self,
        kernels: Sequence[Kernel],
        arch: Arch,
        *,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        """Compiles in parallel; cached kernels cost nothing. Results are in the order given."""

    @abstractmethod
    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> Plan:
        """The kernel bound to a problem, built first where it is not."""
