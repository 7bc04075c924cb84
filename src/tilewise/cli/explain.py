"""`explain` and `predict`: what a model says about one problem, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    JsonFlag,
    OpOption,
    emit,
    out,
    parse_problem,
    resolve_arch,
    table,
)
from tilewise.cli.models import ModelOption, measured_kernels, pick_model
from tilewise.ops.contract import get_op

ProblemWords = Annotated[list[str], typer.Argument(help="The problem as KEY=VALUE, e.g. M=128.")]


def explain(
    words: ProblemWords,
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    model: ModelOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Says which kernel a model chooses, why, what came second and what is known nearby."""
    from tilewise.selection.explain import explain as ask
    from tilewise.selection.selector import Selector

    chosen = resolve_arch(arch)
    problem = parse_problem(op, words, dtype)
    found = pick_model(model, op, chosen, dtype)
    report = ask(Selector(found, measured_kernels(found), chosen), problem)
    if as_json:
        return emit(report)
    out.print(
        f"{report['kernel']}: {report['predicted_us']:.2f} us, "
        f"{report['predicted_tflops']:.1f} TFLOPS predicted"
    )
    if not report["is_familiar"]:
        out.print("unfamiliar: no measured problem is near; the dispatcher would not ask the model")
    out.print(
        f"problems nearby reached {100 * report['expected_efficiency']:.1f} % "
        f"(give or take {100 * report['uncertainty']:.1f}) of the best when they were unseen"
    )
    if "runner_up" in report:
        gap = 100 * report["expected_gap"]
        table(
            f"against {report['runner_up']}, {gap:.1f} % slower",
            ["feature", "chosen", "runner-up", "speaks for it by %"],
            [[r["feature"], r["chosen"], r["runner_up"], r["percent"]] for r in report["reasons"]],
        )
    return table(
        "nearest measured problems",
        ["octaves", "efficiency", "problem"],
        [[n["distance_octaves"], n["efficiency"], n["problem"]] for n in report["nearest"]],
    )


def predict(
    words: ProblemWords,
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    model: ModelOption = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Only these kernels (repeatable).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predicts microseconds, TFLOPS and GB/s of kernels on one problem."""
    from tilewise.selection.predictor import Predictor

    chosen = resolve_arch(arch)
    problem = parse_problem(op, words, dtype)
    found = pick_model(model, op, chosen, dtype)
    kernels = [get_op(op).kernel_from_name(name) for name in kernel or ()]
    kernels = kernels or measured_kernels(found)
    predictor = Predictor(found, chosen)
    order = {r.kernel: i for i, r in enumerate(predictor.rank_kernels(problem, kernels))}
    columns = zip(
        kernels,
        predictor.predict_latency(problem, kernels).tolist(),
        predictor.predict_tflops(problem, kernels).tolist(),
        predictor.predict_bandwidth(problem, kernels).tolist(),
        strict=True,
    )
    rows = sorted(columns, key=lambda row: order[row[0]])
    if as_json:
        names = ("predicted_us", "predicted_tflops", "predicted_gb_s")
        return emit([{"kernel": k.name, **dict(zip(names, v, strict=True))} for k, *v in rows])
    return table(
        f"{len(rows)} kernels, fastest first",
        ["kernel", "us", "TFLOPS", "GB/s"],
        [[k.name, *values] for k, *values in rows],
    )
