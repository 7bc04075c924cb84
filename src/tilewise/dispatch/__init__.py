"""Registries and dispatchers: declare, build, select and run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.core.tensors import view
from tilewise.dispatch.dispatcher import Dispatcher, Result
from tilewise.dispatch.registry import Priority, Registry
from tilewise.engines.device import detect, resolve_arch
from tilewise.errors import InputError, TensorError
from tilewise.ops.configs import load_pool
from tilewise.ops.vendor import LIBRARIES, VendorKernel
from tilewise.selection.choice import Choice
from tilewise.settings import Settings, settings

__all__ = ["Dispatcher", "Priority", "Registry", "Result", "default_dispatcher", "run", "select"]


def default_registry(op: str, arch: Arch) -> Registry:
    """The shipped pool of an op on an architecture; installed vendors are among the candidates."""
    registry = Registry(op, arch, name="shipped")
    registry.declare(load_pool(registry.op, arch))
    for library in LIBRARIES:
        vendor = VendorKernel(op_name=op, library=library)
        if find_spec(library) and registry.op.why_unusable(vendor, None, arch) is None:
            registry.declare(vendor)
    return registry


def default_dispatcher(op: str, arch: Arch) -> Dispatcher:
    """The dispatcher behind `tilewise.matmul` and its like; one per op and architecture."""
    return _dispatcher(op, arch, settings())


@cache
def _dispatcher(op: str, arch: Arch, under: Settings) -> Dispatcher:
    """Settings say where models are, hence one dispatcher for each."""
    return default_registry(op, arch).dispatcher


def select(problem: Problem, *, arch: str | Arch | None = None, top_k: int | None = None) -> Choice:
    """The kernel that tilewise would run for `problem`; nothing is built or run."""
    if not isinstance(problem, Problem):
        raise InputError(f"{problem!r} is not a problem; pass a GemmProblem or a ConvProblem")
    return default_dispatcher(problem.op, resolve_arch(arch)).select(problem, top_k=top_k)


def live_arch(tensor: Any) -> Arch:
    """The architecture of the device that holds `tensor`."""
    device = view(tensor).device
    return detect("cpu") if device == "cpu" else detect("gpu", int(device.removeprefix("cuda:")))


def run(problem: Problem, *tensors: Any, out: Any = None) -> Result:
    """Computes `problem` on its tensors' device, with the kernel that `select` chooses."""
    if not tensors:
        raise TensorError("run() needs the operands after the problem")
    return default_dispatcher(problem.op, live_arch(tensors[0])).run(problem, *tensors, out=out)
