"""`tune`: times the best few kernels and the vendor's on given problems, into a plan file."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import ArchOption, DtypeOption, JsonFlag, OpOption, emit, err, out
from tilewise.cli.progress import telling
from tilewise.core.problem import spell_problem


def tune(
    op: OpOption,
    problems: Annotated[str, typer.Option("--problems", help="CSV, JSON or JSON lines.")],
    plan: Annotated[Path, typer.Option("--out", help="The plan file; times are added to it.")],
    dtype: DtypeOption = None,
    arch: ArchOption = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many kernels to time.")] = 4,
    as_json: JsonFlag = False,
) -> None:
    """Times the best few kernels per problem, into a plan file.

    The vendor's routine takes part. Programs that have TILEWISE_PLAN set to that file choose by
    these times, on the device where they were taken.
    """
    from tilewise.engines.device import resolve_arch
    from tilewise.judge.trials import tune_problems
    from tilewise.problems.files import read_problems
    from tilewise.selection.measured import check_plan, write_plan

    device = resolve_arch(arch)
    check_plan(plan, device)
    found = read_problems(problems, op, **({"dtype": dtype} if dtype else {}))
    for line in found.bad_lines:
        err.print(f"{problems}, {line}")
    numbers = count(1)
    with telling(f"timing {len(found.problems)} problems") as tell:
        times = tune_problems(
            found.problems,
            device,
            top=top,
            on_done=lambda *_: tell(f"timed {next(numbers)} of {len(found.problems)} problems"),
        )
    write_plan(plan, device, times)
    best = {problem: min(of, key=lambda name: of[name]) for problem, of in times.items()}
    if as_json:
        rows = [{"problem": p.to_dict(), "kernel": best[p], "us": of} for p, of in times.items()]
        emit({"device": device.label, "plan": str(plan), "rows": rows})
    else:
        for problem, name in best.items():
            out.print(f"{spell_problem(problem)}  {times[problem][name]:.1f} us  {name}")
        out.print(f"{len(best)} of {len(found.problems)} problems timed; plan in {plan}")
    raise typer.Exit(0 if len(best) == len(set(found.problems)) else 1)
