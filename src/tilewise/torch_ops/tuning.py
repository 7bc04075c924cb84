"""`tune`: runs a model once, times what it computes, and lets the winners serve from then on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from tilewise.core.problem import Problem, spell_problem
from tilewise.dispatch.remembered import CALLS
from tilewise.judge.trials import TOP, tune_problems
from tilewise.problems.capture import capture
from tilewise.selection.measured import Times, check_plan, write_plan
from tilewise.settings import settings
from tilewise.torch_ops.aligned import aligned
from tilewise.torch_ops.preparing import arch_of, require_module, run_once


class Tuned(Times):
    """Microseconds of every kernel that was timed, by problem and name; prints as a table."""

    def __str__(self) -> str:
        return aligned(("us", "PyTorch us", "fastest kernel", "problem"), map(_cells, self.items()))


def _cells(timed: tuple[Problem, dict[str, float]]) -> tuple[str, ...]:
    problem, times = timed
    fastest = min(times, key=lambda name: times[name])
    vendor = times.get(f"{problem.op}_vendor_torch")
    shown = f"{problem.op} {spell_problem(problem)} {problem.dtype}"
    return f"{times[fastest]:.1f}", f"{vendor:.1f}" if vendor else "", fastest, shown


def tune(
    model: nn.Module, *inputs: Any, plan: str | os.PathLike[str] | None = None, top: int = TOP
) -> Tuned:
    """Times the best `top` kernels and PyTorch's on every problem in one run of `model`.

    A model in training is run with its gradients. The times are written to the file `plan` (by
    default the one in use, else one in the cache), which this process uses from then on; other
    processes use it if TILEWISE_PLAN names it. Returns what was timed, which prints as a table.
    """
    require_module(model)
    path = Path(plan) if plan else settings().plan or settings().cache_dir / "plan.json"
    arch = arch_of(model, inputs)
    check_plan(path, arch)
    problems = _problems(model, inputs)
    times = tune_problems(problems, arch, top=top)
    write_plan(path, arch, times)
    use_plan(path)
    return Tuned(times)


def use_plan(path: str | os.PathLike[str] | None) -> None:
    """Gives the choices of a plan file precedence in this process; None takes that back."""
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
