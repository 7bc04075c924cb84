"""An engine whose GPU kernels poison the context, hang, exhaust memory and lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.engines.contract import Engine, Plan
from tilewise.ops.contract import Op

EXPECTED = {
    "fine": "ok",
    "poison": "launch_error",
    "hang": "timeout",
    "exhaust": "out_of_memory",
    "zeros": "wrong_result",
    "overrun": "wrong_result",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSabotageKernel(Kernel):
    engine: ClassVar[str] = "gpu_sabotage"

    deed: str = trait("", tuple(EXPECTED))
    serial: int = trait("s", (0,), default=0)

    @property
    def op(self) -> str:
        return "gemm"


class GpuSabotagePlan(Plan):
    workspace_bytes = 0

    def __init__(self, kernel: GpuSabotageKernel, problem: Any) -> None:
        self.kernel: GpuSabotageKernel = kernel
        self.problem = problem

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        import torch

        deed = self.kernel.deed
        torch.matmul(*operands, out=out)
        if deed == "poison":  # a device-side assertion: the context answers nothing after it
            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum()
        elif deed == "hang":
            torch.cuda._sleep(1 << 50)
        elif deed == "exhaust":
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        elif deed == "zeros":
            out.zero_()
        elif deed == "overrun":
            torch.as_strided(out, (out.numel() + 4,), (1,), out.storage_offset()).fill_(1)


class GpuSabotageEngine(Engine):
    name = "gpu_sabotage"
    kinds = ("gpu",)
    kernel_types = (GpuSabotageKernel,)

    def toolchain(self, op: Op, family: str = "") -> str:
        return "sabotage 1"

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> GpuSabotagePlan:
        assert isinstance(kernel, GpuSabotageKernel)
        return GpuSabotagePlan(kernel, problem)
