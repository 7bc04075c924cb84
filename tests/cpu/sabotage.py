"""An engine whose kernels go wrong in every way a kernel can, loaded by real workers."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.engines.contract import Build, Engine, Plan
from tilewise.errors import BuildError, ExecutionError
from tilewise.ops.contract import Op

EXPECTED = {
    "fine": "ok",
    "babble": "ok",
    "trap": "ok",
    "snare": "ok",
    "leak": "ok",
    "thirsty": "ok",
    "fickle": "ok",
    "spoil": "ok",
    "spin": "timeout",
    "sleep": "timeout",
    "segfault": "crash",
    "abort": "crash",
    "heap": "crash",
    "quit": "crash",
    "hog": "out_of_memory",
    "exhausted": "out_of_memory",
    "refuse": "launch_error",
    "wrong": "wrong_result",
    "nothing": "wrong_result",
    "zeros": "wrong_result",
    "overrun": "wrong_result",
    "unbuildable": "compile_error",
    "oversized": "over_limit",
    "compiler_crash": "compile_error",
}
"""What each deed must be recorded as."""

STRIKES = ("vanish", "struck", "struck_build")
"""Somebody outside kills: the worker each time, the worker once, the builder once."""


def strike() -> None:
    """Dies as by somebody else's hand, the first time."""
    try:
        Path(os.environ["SABOTAGE_MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SabotageKernel(Kernel):
    engine: ClassVar[str] = "sabotage"

    deed: str = trait("", (*EXPECTED, *STRIKES))
    serial: int = trait("s", (0,), default=0)

    def __post_init__(self) -> None:
        self.check_choices()

    @property
    def op(self) -> str:
        return "gemm"


class SabotagePlan(Plan):
    workspace_bytes = 0
    in_use: ClassVar[WeakSet[SabotagePlan]] = WeakSet()

    def __init__(self, kernel: SabotageKernel, problem: Any) -> None:
        self.kernel: SabotageKernel = kernel
        self.problem = problem
        self.in_use.add(self)
        self._run = ctypes.CDLL(os.environ["SABOTAGE_LIBRARY"]).run
        self._run.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3)

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        if self.kernel.deed == "exhausted":
            raise MemoryError("no memory for 1 TiB")
        if self.kernel.deed == "struck":
            strike()
        if self.kernel.deed == "thirsty":
            bytearray(64 << 20)
        a, b = operands
        p = self.problem
        addresses = (a.ctypes.data, b.ctypes.data, out.ctypes.data)
        deed = "wrong" if self._is_worn() else self.kernel.deed
        status = self._run(deed.encode(), *addresses, p.m, p.n, p.k)
        if status:
            raise ExecutionError(f"{self.kernel.name} reported status {status}")

    def _is_worn(self) -> bool:
        """`fickle` goes wrong among leaders, and ever after; a first pass may be tried twice."""
        if self.kernel.deed != "fickle":
            return False
        mark = Path(os.environ["SABOTAGE_MARK"])
        if len(self.in_use) > 1:  # leaders alone are planned several at once
            mark.touch()
        return mark.exists()


class SabotageEngine(Engine):
    name = "sabotage"
    kinds = ("cpu",)
    kernel_types = (SabotageKernel,)

    def toolchain(self, op: Op, family: str = "") -> str:
        return "sabotage 1"

    def build_one(self, kernel: Kernel) -> Build:
        assert isinstance(kernel, SabotageKernel)
        if kernel.deed == "compiler_crash":
            os.abort()
        if kernel.deed == "struck_build":
            strike()
        status = EXPECTED.get(kernel.deed, "ok")
        status = status if status in ("compile_error", "over_limit") else "ok"
        message = "" if status == "ok" else "it was sabotaged"
        return Build(kernel=kernel, status=status, message=message, seconds=0.01)

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> SabotagePlan:
        assert isinstance(kernel, SabotageKernel)
        if EXPECTED.get(kernel.deed) in ("compile_error", "over_limit"):
            raise BuildError(f"{kernel.name} does not compile")
        return SabotagePlan(kernel, problem)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    return None
