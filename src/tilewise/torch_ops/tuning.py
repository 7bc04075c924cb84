"""`tune`: runs a model once, times what it computes, and lets the winners serve from then on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from tilewise.core.problem import Problem
from tilewise.dispatch.remembered import CALLS
from tilewise.judge.trials import TOP, tune_problems
from tilewise.problems.capture import capture
from tilewise.selection.measured import Times, check_plan, write_plan
from tilewise.settings import settings
from tilewise.torch_ops.preparing import arch_of, require_module, run_once


def tune(
    model: nn.Module, *inputs: Any, plan: str | os.PathLike[str] | None = None, top: int = TOP
) -> Times:
    """Times the `top` kernels and PyTorch's on every problem of one run of `model`.

    A model in training is run with its gradients. The times go into the file `plan` (by default
    the one in force, else one in the cache), which is in force from then on here; other processes
    take it by TILEWISE_PLAN. Gives what was timed.
    """
    require_module(model)
    path = Path(plan) if plan else settings().plan or settings().cache_dir / "plan.json"
    check_plan(path)
    problems = _problems(model, inputs)
    arch = arch_of(model, inputs)
    times = tune_problems(problems, arch, top=top)
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
    """What one run computes."""
    with capture() as captured:
        run_once(model, inputs)
    return list(captured.problems)
