"""Which few kernels of a pool serve given problems best, and what leaving the others out costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.export.cases import Case, known_names, of_layers, size_fields
from tilewise.export.rules import OpExport
from tilewise.selection.selector import Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What keeping some kernels costs, by the model's word: predicted time of best over kept."""

    problems: int
    winners: int
    """Kernels that are predicted fastest on some problem."""
    kept: int
    mean: float
    """The mean efficiency that is lost, 0 for none."""
    worst: float
    unserved: int
    """Problems that no kept kernel can serve."""


def strongest(
    export: OpExport, problems: Sequence[Problem], count: int | None = None
) -> tuple[OpExport, Loss]:
    """The export with kernels that win somewhere, at most `count` of them.

    Where kernels are compiled for layers, each is for those that it wins among the kept ones.
    """
    served = [p for p in problems if _is_served(export, p)]
    if not served:
        raise InputError(
            f"none of {len(problems)} problems is one that {export.op.name} is exported for; "
            "check --dtype, --layout and --where"
        )
    efficiency = _efficiencies(export, served)
    winners = np.unique(efficiency.argmax(axis=1))
    kept = _greedy(efficiency[:, winners], count or len(winners))
    chosen = sorted(int(winners[at]) for at in kept)
    reached = efficiency[:, chosen].max(axis=1)
    loss = Loss(
        problems=len(served),
        winners=len(winners),
        kept=len(chosen),
        mean=float(1 - reached.mean()),
        worst=float(1 - reached.min()),
        unserved=int((reached == 0).sum()),
    )
    kernels: tuple[Kernel, ...] = tuple(export.kernels[at] for at in chosen)
    best = efficiency[:, chosen].argmax(axis=1)
    won = {
        (kernels[at].name, problem)
        for at, problem, us in zip(best, served, reached, strict=True)
        if us > 0
    }
    made = for_layers(
        replace(export, kernels=kernels), served, lambda kernel, p: (kernel.name, p) in won
    )
    return made, loss


def for_layers(
    export: OpExport, problems: Sequence[Problem], serves: Callable[[Kernel, Problem], bool]
) -> OpExport:
    """The export for the layers of these problems, where kernels have to be compiled for such."""
    names = known_names(export.op, export.arch)
    if not names:
        return export
    cases: list[Case] = []
    for case in export.cases:
        own = [_sizes(export, problem) for problem in problems if _has_words(case, problem)]
        cases += of_layers(case, names, own)
    layers: dict[tuple[tuple[str, int], ...], int] = {}
    places = [layers.setdefault(tuple(_sizes(export, p).items()), len(layers)) for p in problems]
    serving = {
        kernel.name: frozenset(
            at for at, problem in zip(places, problems, strict=True) if serves(kernel, problem)
        )
        for kernel in export.kernels
    }
    return replace(export, layers=tuple(map(dict, layers)), cases=tuple(cases), serving=serving)


def _sizes(export: OpExport, problem: Problem) -> dict[str, int]:
    return {name: getattr(problem, name) for name in size_fields(export.op)}


def _has_words(case: Case, problem: Problem) -> bool:
    return all(getattr(problem, name) == word for name, word in case.words.items())


def _is_served(export: OpExport, problem: Problem) -> bool:
    """Whether the problem is of an exported case, and some kernel can serve it."""
    if problem.op != export.op.name or problem.is_empty:
        return False
    if not any(_has_words(case, problem) for case in export.cases):
        return False
    if export.where is not None:
        values = {name: getattr(problem, name) for name in export.where.fields}
        if not export.where(values):
            return False
    return any(export.op.why_unusable(k, problem, export.arch) is None for k in export.kernels)


def _efficiencies(export: OpExport, problems: Sequence[Problem]) -> NDArray[np.float64]:
    """Problems by kernels: predicted time of the best over each kernel's; 0 where it cannot."""
    selector = Selector(export.model, export.kernels, export.arch)
    found = np.zeros((len(problems), len(export.kernels)))
    for at, problem in enumerate(problems):
        score = selector.scores(problem).score
        legal = [export.op.why_unusable(k, problem, export.arch) is None for k in export.kernels]
        found[at] = np.where(legal, np.exp2(score - score[legal].max()), 0.0)
    return found


def _greedy(efficiency: NDArray[np.float64], count: int) -> list[int]:
    """Columns whose best is highest in the mean, taken one after the other."""
    kept: list[int] = []
    reached = np.zeros(len(efficiency))
    while len(kept) < min(count, efficiency.shape[1]):
        gains = np.maximum(efficiency, reached[:, None]).mean(axis=0)
        gains[kept] = -1.0
        best = int(gains.argmax())
        kept.append(best)
        reached = np.maximum(reached, efficiency[:, best])
    return kept
