"""`tune`: runs a model once, times what it computes, and lets the winners serve from then on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.dispatch import live_arch
from tilewise.dispatch.remembered import CALLS
from tilewise.engines.device import detect
from tilewise.errors import InputError
from tilewise.judge.trials import TOP, tune_problems
from tilewise.problems.capture import capture
from tilewise.selection.measured import Times, write_plan
from tilewise.settings import settings


def tune(
    model: nn.Module, *inputs: Any, plan: str | os.PathLike[str] | None = None, top: int = TOP
) -> Times:
    """Times the `top` kernels and PyTorch's on every problem of one run of `model`.

    A model in training is run with its gradients. The times go into the file `plan` (by default
    the one in force, else one in the cache), which is in force from then on here; other processes
    take it by TILEWISE_PLAN. Gives what was timed.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no model; pass a torch.nn.Module")
    problems = _problems(model, inputs)
    arch = _arch(model, inputs)
    times = tune_problems(problems, arch, top=top)
    path = Path(plan) if plan else settings().plan or settings().cache_dir / "plan.json"
    write_plan(path, arch, times)
    use_plan(path)
    return times


def use_plan(path: str | os.PathLike[str] | None) -> None:
    """Lets the choices of a plan file come first in this process, or none's."""
    if path is None:
        os.environ.pop("TILEWISE_PLAN", None)
    else:
        os.environ["TILEWISE_PLAN"] = str(Path(path).absolute())
    settings.cache_clear()
    CALLS.forget()


def _problems(model: nn.Module, inputs: tuple[Any, ...]) -> list[Problem]:
    """What one run computes; gradients of parameters are left as they were."""
    wants = model.training and torch.is_grad_enabled()
    held = [(p, p.grad) for p in model.parameters()]
    with torch.set_grad_enabled(wants), capture() as captured:
        result = model(*inputs)
        if wants:
            _backward(result)
    for parameter, gradient in held:
        parameter.grad = gradient
    return list(captured.problems)


def _backward(result: Any) -> None:
    if isinstance(result, dict):
        result = tuple(result.values())
    tensors = result if isinstance(result, tuple | list) else (result,)
    ends = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])


def _arch(model: nn.Module, inputs: tuple[Any, ...]) -> Arch:
    for tensor in (*model.parameters(), *inputs):
        if isinstance(tensor, Tensor):
            return live_arch(tensor)
    return detect("cpu")
