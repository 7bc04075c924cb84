"""`prepare`: chooses and compiles a patched model's kernels at once, before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.core.arch import Arch
from tilewise.dispatch import live_arch
from tilewise.dispatch.remembered import CALLS
from tilewise.engines.device import detect
from tilewise.engines.gpu.bound import live_target
from tilewise.engines.gpu.build import compile_together
from tilewise.errors import InputError
from tilewise.torch_ops.collecting import COLLECTOR


def prepare(model: nn.Module, *inputs: Any, workers: int | None = None) -> list[str]:
    """Compiles everything that a step of a patched model launches on a GPU, `workers` at a time.

    PyTorch's routines run the model once, a model in training with its gradients; parameters,
    their gradients, buffers and random numbers are left as they were. Kernels are kept on disk, so
    that a second process finds them. Returns a line for each kernel that does not compile; the
    next best takes its place.
    """
    require_module(model)
    with _untouched(model, inputs), COLLECTOR.collect() as sources:
        run_once(model, inputs)
    CALLS.forget()  # what was decided meanwhile calls PyTorch's
    return compile_together(sources, live_target(arch_of(model, inputs)), workers)


def require_module(model: Any) -> None:
    """Raises where `model` is none."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is not a model; pass a torch.nn.Module")


def run_once(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A step without an optimizer; gradients of parameters are left as they were."""
    wants = model.training and torch.is_grad_enabled()
    held = [(p, p.grad) for p in model.parameters()]
    with torch.set_grad_enabled(wants):
        result = model(*inputs)
        if wants:
            _backward(result)
    for parameter, gradient in held:
        parameter.grad = gradient


def arch_of(model: nn.Module, inputs: tuple[Any, ...]) -> Arch:
    """Of the device that a model is on."""
    for tensor in (*model.parameters(), *inputs):
        if isinstance(tensor, Tensor):
            return live_arch(tensor)
    return detect("cpu")


def _backward(result: Any) -> None:
    if isinstance(result, dict):
        result = tuple(result.values())
    tensors = result if isinstance(result, tuple | list) else (result,)
    ends = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])


@contextmanager
def _untouched(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[None]:
    """Puts back what a step changes besides gradients: running statistics, random numbers."""
    held = [(buffer, buffer.clone()) for buffer in model.buffers()]
    found = {t.get_device() for t in (*model.parameters(), *inputs) if isinstance(t, Tensor)}
    with torch.random.fork_rng(devices=[device for device in sorted(found) if device >= 0]):
        yield
    with torch.no_grad():
        for buffer, before in held:
            buffer.copy_(before)
