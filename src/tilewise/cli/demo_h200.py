"""What the demo asks about an H200, and what was measured on one of how well it is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.cli.console import out, say, table
from tilewise.cli.demo_gpu import PROBLEMS
from tilewise.cli.explain import explained
from tilewise.cli.progress import telling
from tilewise.core.arch import load_arch
from tilewise.core.model import Model, load_model
from tilewise.core.problem import spell_problem
from tilewise.dispatch import select
from tilewise.ops.contract import get_op
from tilewise.selection.models import SHIPPED

H200 = "sm_90:H200"
EXPLAINED = PROBLEMS[1]
_REASONS = 3


def of_h200(datasets: Path) -> dict[str, Any]:
    """What the shipped models choose for an H200, why, and how good such choices were there."""
    say("nothing runs on one now: the shipped models rank a few hundred kernels by predicted time")
    rows = []
    with telling("compiling the models"):
        for problem in PROBLEMS:
            choice = select(problem, arch=H200)
            rows.append(
                {
                    "op": problem.op,
                    "problem": spell_problem(problem),
                    "kernel": choice.kernel.name,
                    "predicted_us": round(choice.predicted_us, 1),
                    "candidates": choice.candidates,
                    "reason": choice.reason,
                }
            )
    for row in rows:
        out.print(f"\n   {row['op']} {row['problem']}")
        say(f"{row['predicted_us']} us predicted for the best of {row['candidates']} kernels:")
        out.print(f"   {row['kernel']}", soft_wrap=True)
    model = load_model(SHIPPED / "sm_90_gemm")
    why = _explained(model)
    with telling("reading what was measured on the H200"):
        found = replayed(model, datasets)
    return {"choices": rows, "explained": why, "replayed": found}


def _explained(model: Model) -> dict[str, Any]:
    """Why the second choice was made: what sets it apart from the runner-up."""
    report, _ = explained(model, EXPLAINED, load_arch(*H200.split(":")))
    out.print()
    say(
        f"Why, for {spell_problem(EXPLAINED)}? (`tilewise explain` tells more.) The runner-up is "
        f"expected to be {100 * report['expected_gap']:.1f} % slower. What sets the choice apart, "
        "among the features that the model sees:"
    )
    reasons = report["reasons"][:_REASONS]
    rows = [[r["feature"], r["chosen"], r["others"]] for r in reasons]
    table("", ["feature", "chosen", "runner-up"], rows)
    return {key: report[key] for key in ("kernel", "runner_up", "expected_gap")} | {
        "reasons": reasons
    }


def replayed(model: Model, datasets: Path) -> dict[str, Any] | None:
    """The published measurements once more, by choices of a model that had not seen them.

    None where they are not there, as beside an installed package.
    """
    from tilewise.learn.dataset import from_stores

    store = datasets / "h200" / "gemm"
    if not store.is_dir():
        say("the measurements are not part of the package: run this in a clone to replay them")
        return None
    data = from_stores([store], op="gemm", arch=load_arch("sm_90", "H200"), dtype="bf16")
    efficiency = _unseen(model)
    share = np.array([efficiency.get(problem.key, np.nan) for problem in data.problems])
    judged = np.isfinite(share) & np.isfinite(data.vendor_us)
    share, oracle = share[judged], (data.vendor_us / data.best_us)[judged]
    found = {
        "problems": int(judged.sum()),
        "mean": round(100 * float(share.mean()), 1),
        "p10": round(100 * float(np.percentile(share, 10)), 1),
        "min": round(100 * float(share.min()), 1),
        "oracle_over_vendor": round(float(np.exp(np.log(oracle).mean())), 3),
        "chosen_over_vendor": round(float(np.exp(np.log(share * oracle).mean())), 3),
    }
    say(
        f"Were such choices good? Published H200 measurements of {found['problems']} bf16 products "
        "of all proportions, with choices by models that had not seen them: on average the choice "
        f"runs at {found['mean']} % of the best kernel's speed (nine in ten reach {found['p10']} "
        f"%, the worst {found['min']} %) and is {found['chosen_over_vendor']:.2f} times as fast as "
        f"cuBLAS; always picking the best would make it {found['oracle_over_vendor']:.2f}. "
        "benchmarks/RESULTS.md has figures for layers of real models"
    )
    return found


def _unseen(model: Model) -> dict[str, float]:
    """Problem -> speed of the kernel chosen for it unseen, over the best one's."""
    make = get_op(model.op).problem.from_dict
    known = zip(model.measured.problems, model.measured.efficiency, strict=True)
    return {make(json.loads(p)).key: float(share) for p, share in known if np.isfinite(share)}
