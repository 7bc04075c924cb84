"""`rank`: the kernels for one problem, fastest first, without running any."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    FilterOption,
    JsonFlag,
    OpOption,
    emit,
    filtered,
    forecast,
    listing,
    out,
    parse_problem,
)
from tilewise.cli.kernels import EngineOption
from tilewise.cli.progress import telling
from tilewise.dispatch import default_registry
from tilewise.engines.device import resolve_arch
from tilewise.selection.choice import Choice


def rank(
    words: Annotated[list[str], typer.Argument(help="The problem as KEY=VALUE, e.g. M=128.")],
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many to show.")] = 10,
    engine: EngineOption = None,
    expression: FilterOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Ranks the kernels for one problem by predicted time."""
    problem = parse_problem(op, words, dtype)
    registry = default_registry(op, resolve_arch(arch))
    if engine:
        for name in engine:
            registry.op.types_of(name)
        registry = registry.filter(lambda kernel: kernel.engine in engine)
    if expression:
        registry = filtered(registry, expression)
    with telling("ranking"):  # a model asked for the first time is compiled
        choice = registry.select(problem)
        ranking = choice.ranking[:top]
    if as_json:
        return emit(as_dict(choice, top))
    rows = [[place, *forecast(r), r.kernel.name] for place, r in enumerate(ranking, 1)]
    title = f"{choice.kernel.name}\n{choice.reason}"
    if not rows:
        return out.print(title, soft_wrap=True)
    return listing(
        f"{title}\n{choice.candidates} kernels can serve this problem; predicted, fastest first:",
        ["", "us", "TFLOPS", "kernel"],
        rows,
    )


def as_dict(choice: Choice, top: int) -> dict[str, object]:
    """A choice, JSON-ready, with the first `top` of its ranking."""
    ranking = [
        {"kernel": r.kernel.name, "predicted_us": us, "predicted_tflops": tflops}
        for r in choice.ranking[:top]
        for us, tflops in [forecast(r)]
    ]
    return {
        "problem": choice.problem.to_dict(),
        "kernel": choice.kernel.name,
        "predicted_us": choice.predicted_us,
        "predicted_tflops": choice.predicted_tflops,
        "path": choice.path,
        "reason": choice.reason,
        "candidates": choice.candidates,
        "ranking": ranking,
        "rejected": dict(choice.rejected),
    }
