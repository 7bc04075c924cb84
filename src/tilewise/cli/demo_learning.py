"""What the demo learns here: a sweep of small products, a model of them, and its judgement."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilewise.cli.console import say
from tilewise.cli.progress import progress_bar, telling
from tilewise.cli.session import Session
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import POLICIES
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.settings import settings

SWEPT = 80
"""Problems that the demo measures and learns from."""
HELD_OUT = 4
"""Parts that take turns in being held out."""
QUICK = replace(POLICIES["quick"], time_ms=3.0, rounds=3, threads=1)
"""On one core: where others are busy, two that wait for each other are read six times too slow."""


def learned(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Measures some products by these kernels, learns from that, and judges what was learned.

    Every problem is judged by a model that never saw it. The last result is a page's path.
    """
    from tilewise.learn.dataset import from_stores
    from tilewise.learn.params import Params
    from tilewise.learn.train import save, train
    from tilewise.report.page import write_report
    from tilewise.sweep.run import sweep

    folder = settings().cache_dir / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    store, model, page = folder / "store", folder / "model", folder / "report.html"
    session = Session(arch="", kind="cpu", policy=QUICK, timeout=5.0)
    place = session.executor("gemm")
    with progress_bar() as on_event:
        summary = sweep(
            *(store, problems(), lambda arch: list(kernels), place, session.policy),
            on_event=on_event,
        )
    data = from_stores([store], op="gemm")
    say(
        f"{summary.rows:,} timings on one core: {SWEPT} products by {len(data.kernels)} kernels, "
        "every result checked"
    )
    with telling("training") as tell:
        params = Params(trees=60, leaves=8, min_rows=5)
        trained = train(data, params, fold_count=HELD_OUT, name="demo", tell=tell)
        save(trained, data, model)
        write_report([store], page, model=model, tell=tell)
    found, plain = trained.model.metrics["efficiency"], trained.model.metrics["analytic"]
    say(
        f"for products the model has not seen, its choice runs at {found['mean']:.0f} % of the "
        f"best kernel's speed on average, {found['min']:.0f} % at worst; the built-in estimate, "
        f"which learns nothing, reaches {plain['mean']:.0f} % on average"
    )
    return {
        "readings": summary.rows,
        "efficiency": {name: found[name] for name in ("problems", "mean", "p10", "min")},
        "analytic_mean": plain["mean"],
        "report": str(page),
    }


def problems(seed: int = 7) -> list[GemmProblem]:
    """Small products of many proportions."""
    draw = random.Random(seed)
    sizes = [[round(2 ** draw.uniform(2, 8.5)) for _ in "mnk"] for _ in range(SWEPT)]
    return [GemmProblem(m=m, n=n, k=k, layout="rrr") for m, n, k in sizes]
