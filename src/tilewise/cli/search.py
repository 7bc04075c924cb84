"""`search`: looks for fast kernels in the legal space, guided by a model."""

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
    listing,
    parse_problem,
)
from tilewise.cli.explain import ProblemWords, fitting_model
from tilewise.cli.kernels import ConfigOption, EngineOption, pick
from tilewise.cli.models import ModelOption
from tilewise.cli.progress import telling
from tilewise.core.model import ANY_ENGINE
from tilewise.engines.device import resolve_arch


def search(
    words: ProblemWords,
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    model: ModelOption = None,
    strategy: Annotated[str, typer.Option(help="random or de (differential evolution).")] = "de",
    budget: Annotated[int, typer.Option(min=1, help="How many kernels may be scored.")] = 200,
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    engine: EngineOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Searches the whole space of kernels for one problem.

    The same seed gives the same result.
    """
    from tilewise.learn.search import legal_kernels, model_score
    from tilewise.learn.search import search as look

    chosen = resolve_arch(arch)
    problem = parse_problem(op, words, dtype)
    found = fitting_model(model, problem, chosen, dtype)
    engines = engine or [e for e in found.calibration.engines if e != ANY_ENGINE]
    with telling("searching"):
        pool = pick(op, chosen, problem.dtype, engines, expression, config)
        space = legal_kernels(pool, problem, chosen)
        score = model_score(found, problem, space, chosen)
        answers = look(space, score, strategy=strategy, budget=budget, seed=seed)[:top]
    if as_json:
        return emit(
            {
                "problem": problem.to_dict(),
                "strategy": strategy,
                "budget": budget,
                "legal": len(space),
                "answers": [{"kernel": a.kernel.name, "score": a.score} for a in answers],
            }
        )
    best = answers[0].score
    rows = [[100 * 2 ** (a.score - best), a.kernel.name] for a in answers]
    return listing(
        f"best of {min(budget, len(space))} tried, {len(space)} are legal",
        ["% of the best", "kernel"],
        rows,
    )
