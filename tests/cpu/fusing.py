"""A stand-in for GPU engines: CPU convolutions that fuse epilogues, and write it down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.dispatch import _dispatcher, default_dispatcher
from tilewise.dispatch.remembered import CALLS
from tilewise.engines import Plan, get_engine
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.ops.conv.epilogue import BIAS, RESIDUAL, SUMS, Epilogue
from tilewise.torch_ops.products import ACTIVATE


class FusedPlan(Plan):
    """A CPU kernel's plan that does to the result what `epilogue` says."""

    def __init__(self, inner: Plan, epilogue: Epilogue, seen: list[Epilogue]) -> None:
        self.kernel, self.problem, self.workspace_bytes = inner.kernel, inner.problem, 0
        self.epilogue, self._inner, self._seen = epilogue, inner, seen

    def sources(self, operands: Sequence[Any], out: Any) -> Sequence[Any]:
        return [(self.problem.op, self.epilogue)]

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        first, second, *more = operands
        self._inner.execute((first, second), out)
        given = dict(zip(self.epilogue.tensors, more, strict=True))
        result = out.double()
        if BIAS in given:
            assert given[BIAS].dtype == out.dtype and given[BIAS].is_contiguous()
            result += given[BIAS].reshape(-1, *[1] * (out.dim() - 2))
        if RESIDUAL in given:
            assert given[RESIDUAL].stride() == out.stride()
            result += given[RESIDUAL]
        out.copy_(ACTIVATE[self.epilogue.activation](result))
        if SUMS in given:
            axes = [0, *range(2, out.dim())]
            given[SUMS][0] = out.double().sum(axes)
            given[SUMS][1] = out.double().square().sum(axes)
        self._seen.append(self.epilogue)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Epilogue]]:
    """Lets CPU kernels serve all convolutions, and fuse; gives the epilogues of calls made."""
    seen: list[Epilogue] = []
    engine = get_engine("cpu")
    make = engine.plan

    def plan(kernel: Kernel, problem: Problem, arch: Arch, *, epilogue: Any = None) -> Plan:
        inner = make(kernel, problem, arch)
        return FusedPlan(inner, epilogue, seen) if isinstance(epilogue, Epilogue) else inner

    monkeypatch.setattr(CpuEngine, "takes_epilogue", True)
    monkeypatch.setattr(engine, "plan", plan)
    _dispatcher.cache_clear()  # which remembers plans, and is left with our priorities
    for op in ("conv_fwd", "conv_bwd_data", "conv_bwd_weight"):
        registry = default_dispatcher(op, detect("cpu")).registry
        own = [kernel for kernel in registry.kernels if kernel.engine == "cpu"]
        registry.declare(own, priority="high")
    CALLS.forget()
    yield seen
    _dispatcher.cache_clear()
    CALLS.forget()
