"""`explain` and `predict`: what a model says about one problem, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    JsonFlag,
    OpOption,
    emit,
    err,
    listing,
    out,
    parse_problem,
    spell_values,
    table,
)
from tilewise.cli.models import ModelOption, pick_model
from tilewise.cli.progress import telling
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.engines.device import resolve_arch
from tilewise.errors import InputError
from tilewise.ops.contract import get_op
from tilewise.selection.opening import measured_kernels
from tilewise.selection.selector import Selector, caveat, why_foreign

ProblemWords = Annotated[list[str], typer.Argument(help="The problem as KEY=VALUE, e.g. M=128.")]


def explain(
    words: ProblemWords,
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    model: ModelOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Explains which kernel is chosen for one problem, and why.

    Also: what came second, and what is known of problems nearby.
    """
    chosen = resolve_arch(arch)
    problem = parse_problem(op, words, dtype)
    found = fitting_model(model, problem, chosen, dtype)
    with telling(f"asking {found.name}"):
        report, asked_for = explained(found, problem, chosen)
    tell_difference(found, asked_for)
    if as_json:
        return emit(report)
    return tell(report, found.name)


def explained(model: Model, problem: Problem, arch: Arch) -> tuple[dict[str, Any], Arch]:
    """Why a model chooses what it does, and the figures of the device that it was asked about."""
    from tilewise.selection.explain import explain as ask

    selector = Selector(model, candidates(model, arch, problem.dtype), arch)
    problem = as_asked(selector, problem)
    report = ask(selector, problem, cost_us=lambda kernel: cost_us(kernel, problem, arch))
    return report, selector.arch


def tell_difference(model: Model, arch: Arch) -> None:
    """Says on standard error that times are scaled from another device's."""
    note = caveat(model, arch)
    if note is not None:
        err.print(note, soft_wrap=True)


def as_asked(selector: Selector, problem: Problem) -> Problem:
    """The problem in the shapes in which `select` asks a model about it; says so if they differ."""
    from tilewise.dispatch.reshaping import differing, simpler

    other = simpler(get_op(problem.op), problem)
    if other == problem or (
        selector.expect(problem).is_familiar and not selector.expect(other).is_familiar
    ):
        return problem
    err.print(f"treated as {differing(other, problem)}, on the same memory", soft_wrap=True)
    return other


def cost_us(kernel: Kernel, problem: Problem, arch: Arch) -> float | None:
    """What `select` charges a kernel besides its own time, for padding; None where it cannot."""
    from tilewise.dispatch.padding import aligned, copy_us

    op = get_op(kernel.op)
    larger = aligned(op, kernel, problem)
    if op.why_unusable(kernel, larger, arch) is not None:
        return None
    return copy_us(problem, larger, arch)


def fitting_model(folder: Path | None, problem: Problem, arch: Arch, dtype: str | None) -> Model:
    """The model asked for, or the first that fits; one made for something else is refused."""
    found = pick_model(folder, problem.op, arch, dtype)
    why = why_foreign(found, problem, arch)
    if why is not None:
        raise InputError(f"{found.name} cannot be asked: {why}; name another with --model")
    return found


def candidates(model: Model, arch: Arch, dtype: str) -> list[Kernel]:
    """What `select` would choose from for the dtype."""
    from tilewise.dispatch import default_registry
    from tilewise.dispatch.chooser import served_by

    pool = [
        kernel
        for kernel in default_registry(model.op, arch)
        if getattr(kernel, "dtype", dtype) in served_by(dtype)
    ]
    return pool or measured_kernels(model)


def tell(report: dict[str, Any], model: str) -> None:
    """An explanation, for people."""
    out.print(report["taken"], soft_wrap=True)
    if report["taken"] != report["kernel"]:
        out.print(
            "chosen because it is predicted to be as fast as the fastest: the vendor wins ties"
        )
        out.print(f"the fastest: {report['kernel']}", soft_wrap=True)
    out.print(
        f"predicted {report['predicted_us']:.4g} us, {report['predicted_tflops']:.4g} TFLOPS by "
        f"{model}: the fastest of {report['candidates']} kernels that can serve this problem",
        soft_wrap=True,
    )
    far = f"the nearest measured problem is {report['distance_octaves']:.1f} octaves away"
    limit = f"the model is trusted up to {report['reach_octaves']:.1f}"
    if report["is_familiar"]:
        reached = f"{100 * report['expected_efficiency']:.1f} % of the best kernel's speed"
        told = (
            f"on unseen problems nearby its choices reached {reached}, give or take "
            f"{100 * report['uncertainty']:.1f} ({far}; {limit})"
        )
    else:
        told = (
            f"UNFAMILIAR: {far}; {limit}. `select` falls back to the analytic model here and "
            "logs the problem for the next sweep"
        )
    out.print(told, soft_wrap=True)
    if "runner_up" in report:
        against(report)
    table(
        "Nearest measured problems",
        ["octaves away", "% of the best", "problem"],
        [
            [
                f"{n['distance_octaves']:.2f}",
                "-" if n["efficiency"] is None else 100 * n["efficiency"],
                spell_values(n["problem"]),
            ]
            for n in report["nearest"]
        ],
    )


def against(report: dict[str, Any]) -> None:
    """What speaks for the choice, against the others and against the runner-up."""
    for title, key, other in (
        ("What puts it ahead of the other kernels", "moved_by", "others"),
        ("What sets it apart from the runner-up", "reasons", "runner-up"),
    ):
        if key == "reasons":
            tie = ", which is a tie" if report["is_tie"] else ""
            gap = f"{100 * report['expected_gap']:.1f} % slower{tie}"
            out.print(f"runner-up: {report['runner_up']}, expected to be {gap}", soft_wrap=True)
        rows = [[p["feature"], p["chosen"], p["others"], p["percent"]] for p in report[key]]
        if rows:
            table(title, ["feature", "chosen", other, "effect %"], rows)


def predict(
    words: ProblemWords,
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    model: ModelOption = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Only these kernels (repeatable).")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many to show.")] = 10,
    as_json: JsonFlag = False,
) -> None:
    """Predicts time, TFLOPS and GB/s of the kernels for one problem."""
    from tilewise.selection.predictor import Predictor

    chosen = resolve_arch(arch)
    problem = parse_problem(op, words, dtype)
    found = fitting_model(model, problem, chosen, dtype)
    kernels = [get_op(op).kernel_from_name(name) for name in kernel or ()]
    why_unusable = get_op(op).why_unusable
    kernels = kernels or [
        k
        for k in candidates(found, chosen, problem.dtype)
        if k.engine in found.calibration.engines and why_unusable(k, problem, chosen) is None
    ]
    with telling(f"asking {found.name}"):
        predictor = Predictor(found, chosen)
        order = {r.kernel: i for i, r in enumerate(predictor.rank_kernels(problem, kernels))}
        columns = zip(
            kernels,
            predictor.predict_latency(problem, kernels).tolist(),
            predictor.predict_tflops(problem, kernels).tolist(),
            predictor.predict_bandwidth(problem, kernels).tolist(),
            strict=True,
        )
    rows = sorted(columns, key=lambda row: order[row[0]])[:top]
    tell_difference(found, predictor.arch)
    if as_json:
        names = ("predicted_us", "predicted_tflops", "predicted_gb_s")
        return emit([{"kernel": k.name, **dict(zip(names, v, strict=True))} for k, *v in rows])
    return listing(
        f"{len(rows)} of {len(kernels)} kernels, fastest first",
        ["us", "TFLOPS", "GB/s", "kernel"],
        [[*values, k.name] for k, *values in rows],
    )
