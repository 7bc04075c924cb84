"""What the demo learns here, and what is published of the H200."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.cli.console import out, table
from tilewise.cli.progress import progress_bar, telling
from tilewise.cli.session import Session
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import POLICIES
from tilewise.core.model import load_model
from tilewise.core.problem import spell_problem
from tilewise.dispatch import select
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.selection.models import SHIPPED
from tilewise.settings import settings

SWEPT = 40
"""Problems that the demo measures and learns from."""
HELD_OUT = 4
"""Parts that take turns in being held out."""
QUICK = replace(POLICIES["quick"], time_ms=3.0, rounds=3)
H200_PROBLEMS = (
    GemmProblem(m=1, n=6144, k=4096, dtype="bf16"),
    GemmProblem(m=16, n=2112, k=7168, dtype="bf16"),
    GemmProblem(m=4096, n=8192, k=4096, dtype="bf16"),
)


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
    policy = replace(QUICK, threads=settings().threads)
    session = Session(arch="", kind="cpu", policy=policy, timeout=5.0)
    place = session.executor("gemm")
    with progress_bar() as on_event:
        summary = sweep(
            *(store, problems(), lambda arch: list(kernels), place, session.policy),
            on_event=on_event,
        )
    out.print(f"  {summary.rows:,} readings of {SWEPT} products, every result checked")
    data = from_stores([store], op="gemm")
    with telling("training") as tell:
        params = Params(trees=60, leaves=8, min_rows=5)
        trained = train(data, params, fold_count=HELD_OUT, name="demo", tell=tell)
        save(trained, data, model)
        write_report([store], page, model=model, tell=tell)
    found, plain = trained.model.metrics["efficiency"], trained.model.metrics["analytic"]
    out.print(
        f"  chosen for unseen products: {found['mean']:.1f} % of the best kernel's speed in the "
        f"mean, {found['min']:.1f} % at worst (the analytic model: {plain['mean']:.1f} %)",
        soft_wrap=True,
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


def of_h200(datasets: Path) -> dict[str, Any]:
    """What the shipped model of the H200 chooses, and what is published of how well it does."""
    model = load_model(SHIPPED / "sm_90_gemm")
    rows = []
    for problem in H200_PROBLEMS:
        choice = select(problem, arch="sm_90:H200")
        rows.append(
            {
                "problem": spell_problem(problem),
                "kernel": choice.kernel.name,
                "predicted_us": round(choice.predicted_us, 1),
                "reason": choice.reason,
            }
        )
    table(
        "Chosen for an H200, from here",
        ["problem", "kernel", "us"],
        [[row["problem"], row["kernel"], row["predicted_us"]] for row in rows],
    )
    efficiency = 100 * model.measured.efficiency[np.isfinite(model.measured.efficiency)]
    figures = {
        "problems": len(efficiency),
        "mean": round(float(efficiency.mean()), 2),
        "p10": round(float(np.percentile(efficiency, 10)), 2),
        "min": round(float(efficiency.min()), 2),
    }
    out.print(
        f"  on {figures['problems']:,} products that were held out when it was trained: "
        f"{figures['mean']} / {figures['p10']} / {figures['min']} % of the best "
        "(mean / P10 / worst)",
        soft_wrap=True,
    )
    return {"choices": rows, "unseen": figures, "replayed": replayed(datasets)}


def replayed(datasets: Path) -> dict[str, Any] | None:
    """The published measurements told again: what the oracle and cuBLAS took; None without them."""
    from tilewise.core.arch import load_arch
    from tilewise.learn.dataset import from_stores

    store = datasets / "h200" / "gemm"
    if not store.is_dir():
        return None
    data = from_stores([store], op="gemm", arch=load_arch("sm_90", "H200"), dtype="bf16")
    is_vendor = np.array([kernel.engine == "vendor" for kernel in data.kernels])[data.kernel_index]
    rows = np.flatnonzero(is_vendor & data.is_ok)
    gain = data.time_us[rows] / data.best_us[data.problem_index[rows]]
    mean = round(float(np.exp(np.log(gain).mean())), 3)
    out.print(
        f"  replayed: on {len(rows):,} published products in bf16 the best kernel is {mean} times "
        "as fast as cuBLAS (geometric mean, both measured there)",
        soft_wrap=True,
    )
    return {"problems": len(rows), "oracle_over_vendor": mean}
