"""The whole report on a ranking: efficiency beside its ceiling, slices, and the worst choices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array, log2
from tilewise.learn.dataset import Dataset
from tilewise.learn.noise import noise_ceiling
from tilewise.learn.score import Judgement, analytic_us, as_chosen, errors, judge, summary
from tilewise.learn.slices import slices

CLOSE = 0.02
"""Kernels predicted closer than this, relatively, are as good as tied."""


def report(
    data: Dataset, score: Array, predicted_us: Array, rows: NDArray[np.bool_]
) -> dict[str, Any]:
    """What a ranking did on `rows`, JSON-ready; failed kernels are left out of the errors.

    `efficiency` is that of the ranking, `chosen` of what a dispatcher takes by it.
    """
    outcome = judge(data, score, rows)
    ok = rows & data.is_ok
    return {
        "efficiency": summary(outcome),
        "chosen": summary(judge(data, as_chosen(data, score), rows)),
        "noise_ceiling": noise_ceiling(data.keep(rows)),
        "analytic": summary(judge(data, -analytic_us(data), rows)),
        "time": errors(log2(predicted_us[ok]), log2(data.time_us[ok])),
        "slices": slices(data, outcome),
        "worst": worst(data, outcome, predicted_us),
    }


def worst(
    data: Dataset, outcome: Judgement, predicted_us: Array, count: int = 10
) -> list[dict[str, Any]]:
    """The problems that were chosen worst for: what was chosen, what was best, and why."""
    shown = []
    for i in np.argsort(outcome.efficiency, kind="stable")[:count]:
        chosen, best = outcome.chosen[i], outcome.best[i]
        shown.append(
            {
                "problem": data.problems[outcome.problems[i]].to_dict(),
                "efficiency": round(100 * float(outcome.efficiency[i]), 2),
                "chosen": data.kernels[data.kernel_index[chosen]].name,
                "chosen_us": _number(data.time_us[chosen]),
                "chosen_predicted_us": _number(predicted_us[chosen]),
                "best": data.kernels[data.kernel_index[best]].name,
                "best_us": _number(data.time_us[best]),
                "best_predicted_us": _number(predicted_us[best]),
                "place_of_best": int(outcome.place[i]) + 1,
                "why": _why(data, int(chosen), int(best), predicted_us),
            }
        )
    return shown


def _why(data: Dataset, chosen: int, best: int, predicted_us: Array) -> str:
    """What went wrong, in words: noise, a near tie, or which of the two was misjudged."""
    if chosen == best:
        return "this is the best kernel"
    if not data.is_ok[chosen]:
        return "the chosen kernel fails, which the model did not foresee"
    spread = np.nan_to_num(data.spread_us[[chosen, best]])
    if data.time_us[chosen] - data.time_us[best] <= spread.sum():
        return "their times differ by less than the noise"
    # Only ratios matter to a ranking: the chosen one looked too fast or the best one too slow.
    ratio = predicted_us / data.time_us
    gap = predicted_us[best] / predicted_us[chosen]
    if gap < 1 + CLOSE:
        return f"they were predicted {100 * (gap - 1):.1f} % apart, which is almost a tie"
    own = data.problem_index == data.problem_index[best]
    usual = float(np.median(ratio[own & data.is_ok]))
    fast, slow = usual / ratio[chosen], ratio[best] / usual
    if fast > slow:
        return f"the chosen kernel was predicted {fast:.2f} times as fast as it is"
    return f"the best kernel was predicted {slow:.2f} times as slow as it is"


def _number(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None
