"""Engines turn kernels into callables. They are imported on first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tilewise.engines.contract import Build, Engine, Plan, Resources
from tilewise.errors import InputError
from tilewise.ops.contract import Op

ENGINES = {
    "cpu": ("tilewise.engines.cpu", "CpuEngine"),
    "triton": ("tilewise.engines.gpu.engine", "TritonEngine"),
    "cuda": ("tilewise.engines.gpu.engine", "CudaEngine"),
    "vendor": ("tilewise.engines.vendor", "VendorEngine"),
}

__all__ = [
    "ENGINES",
    "Build",
    "Engine",
    "Plan",
    "Resources",
    "engines_for",
    "get_engine",
    "is_foreign",
]


def is_foreign(engine: str) -> bool:
    """Whether kernels of this engine are only described and ranked here, not built."""
    return engine not in ENGINES


def engines_for(kind: str, op: Op) -> tuple[str, ...]:
    """The engines that run kernels of `op` on a kind of device."""
    own = {kernel.engine for kernel in op.kernel_types}
    return tuple(n for n in ENGINES if n in own and kind in get_engine(n).kinds)


@cache
def get_engine(name: str) -> Engine:
    """The engine called `name`; one instance serves the process."""
    if is_foreign(name):
        raise InputError(
            f"{name} kernels are built by their own library; engines here: {', '.join(ENGINES)}"
        )
    module, kind = ENGINES[name]
    engine: Engine = getattr(import_module(module), kind)()
    return engine
