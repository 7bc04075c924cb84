"""`validate`: the selected kernel against every legal one and the vendor's, on this device."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    FilterOption,
    JsonFlag,
    OpOption,
    emit,
    out,
    table,
)
from tilewise.cli.models import ModelOption, given_model
from tilewise.cli.progress import shown
from tilewise.cli.session import PolicyOption, Session, TimeoutOption, dispatcher_of, store_folder
from tilewise.cli.sweep import BudgetOption, problems_of
from tilewise.core.arch import Arch
from tilewise.core.problem import spell_problem
from tilewise.errors import InputError

if TYPE_CHECKING:
    from tilewise.core.model import Model
    from tilewise.judge.validation import Contenders, Validation
    from tilewise.problems.files import ProblemFile

SHOWN, NAMED = 20, 3
"""Problems in the table, and those whose kernels are named beneath it."""


StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Keep measurements here, and resume from them.")
]
ReplayOption = Annotated[
    Path | None, typer.Option(help="Use this store's times instead of measuring.")
]
LeastMean = Annotated[
    float | None, typer.Option(min=0, max=100, help="Exit with 1 if mean efficiency (%) is lower.")
]
LeastP10 = Annotated[
    float | None, typer.Option(min=0, max=100, help="Exit with 1 if P10 efficiency (%) is lower.")
]
LeastRatio = Annotated[
    float | None, typer.Option(min=0, help="Exit with 1 if the mean speed-up is lower.")
]


def validate(
    op: OpOption,
    problems: Annotated[str, typer.Option("--problems", help="CSV, JSON or JSON lines.")],
    dtype: DtypeOption = None,
    arch: ArchOption = None,
    model: ModelOption = None,
    expression: FilterOption = None,
    policy: PolicyOption = "",
    store: StoreOption = None,
    budget: BudgetOption = 0.0,
    timeout: TimeoutOption = 5.0,
    replay: ReplayOption = None,
    min_efficiency: LeastMean = None,
    min_p10: LeastP10 = None,
    min_vs_vendor: LeastRatio = None,
    as_json: JsonFlag = False,
) -> None:
    """Measures how good the choices are on this machine.

    Every legal kernel is measured; then the selected one is timed in turn with the fastest and the
    vendor's. Stop it in any way: with --store the same command carries on.
    """
    found = problems_of(problems, op, dtype)
    session = Session.of(arch, policy, timeout, replay)
    _check_whole(session, found)
    outcome = _measured(
        session,
        op,
        found,
        given_model(model) if model else None,
        expression=expression,
        store=store,
        budget=budget,
    )
    report = outcome.to_dict()
    limits = {"mean": min_efficiency, "p10": min_p10, "vs_vendor": min_vs_vendor}
    report["checks"] = checks(report["summary"], limits)
    if as_json:
        emit({"op": op, "dtype": dtype, "policy": session.policy.to_dict(), **report})
    else:
        tell(outcome, report)
    if outcome.sweep.stopped == "interrupted":
        raise typer.Exit(130)
    passed = bool(outcome.verdicts) and all(check["passed"] for check in report["checks"])
    raise typer.Exit(0 if passed else 1)


def _check_whole(session: Session, found: ProblemFile) -> None:
    """Raises where a recording knows only the most promising kernels of a problem."""
    tried = session.recording.tried if session.recording else {}
    if count := sum(p.key in tried for p in found.problems):
        raise InputError(
            f"for {count} of the {len(found.problems)} problems {session.replay} holds only the "
            "most promising kernels (--top), whose best need not be the best; leave them out"
        )


def _measured(
    session: Session,
    op: str,
    found: ProblemFile,
    model: Model | None,
    *,
    expression: str | None,
    store: Path | None,
    budget: float,
) -> Validation:
    """Every kernel that takes part, timed on the session's device."""
    from tilewise.judge import validation
    from tilewise.sweep.run import Options

    def field(device: Arch) -> Contenders:
        registry = session.registry(op, device, expression)
        every = session.with_vendors(op, list(registry))
        return validation.Contenders(kernels=every, choose=dispatcher_of(registry, model).select)

    with store_folder(store) as folder, shown(as_json=False) as on_event:
        return validation.validate(
            *(folder, found.problems, field, session.executor(op), session.policy),
            options=Options(budget_s=budget),
            why_unusable=session.recording.why_unusable if session.recording else None,
            labels=[json.dumps(labels, default=str) for labels in found.labels],
            on_event=on_event,
        )


def against_the_vendor(summary: dict[str, Any]) -> str:
    """The mean ratio with its interval, or why there is none."""
    noisy = f"{summary['too_noisy']} of {summary['problems']} problems are too noisy to say"
    if summary["vs_vendor"] is None:
        return f"against the vendor: {noisy}" if summary["too_noisy"] else "the vendor has no times"
    low, high = summary["vs_vendor_interval"]
    line = (
        f"against the vendor: {summary['vs_vendor']:.3g} times as fast (geometric mean, "
        f"{low:.3g} to {high:.3g}), the best kernel {summary['best_vs_vendor']:.3g}"
    )
    return f"{line}; {noisy} and left out" if summary["too_noisy"] else line


def checks(summary: dict[str, Any], limits: dict[str, float | None]) -> list[dict[str, Any]]:
    """Each limit that was given, beside what was found; what could not be found has failed."""
    reached = {**(summary["efficiency"] or {}), "vs_vendor": summary["vs_vendor"]}
    return [
        {
            "check": name,
            "least": least,
            "found": reached.get(name),
            "passed": reached.get(name) is not None and reached[name] >= least,
        }
        for name, least in limits.items()
        if least is not None
    ]


def tell(outcome: Validation, report: dict[str, Any]) -> None:
    """The verdicts, worst first, and the summary, for people."""
    worst = sorted(outcome.verdicts, key=lambda v: v.efficiency)
    columns = ["% of best", "vs vendor", "chosen us", "best us", "vendor us", "problem"]
    table(
        f"{len(worst)} problems on {outcome.sweep.device}, worst first",
        columns,
        [
            [
                100 * v.efficiency,
                "-" if v.ratio is None else v.ratio.spell(),
                "-" if v.chosen_us is None else v.chosen_us,
                *(v.best_us, "-" if v.vendor_us is None else v.vendor_us),
                spell_problem(v.problem),
            ]
            for v in worst[:SHOWN]
        ],
    )
    for v in worst[:NAMED]:
        if v.chosen != v.best:
            row = f"{spell_problem(v.problem)}\n  chosen {v.chosen}\n  best   {v.best}"
            out.print(row, soft_wrap=True)
    summary = report["summary"]
    shares = ("mean", "median", "p10", "min")
    lines = [
        [name, *(summary[key][c] for c in shares)]
        for name, key in (("chosen", "efficiency"), ("oracle, measured again", "oracle_again"))
        if summary[key]
    ]
    if lines:
        table("% of the best", ["", *shares], lines)
        hits = ", ".join(f"{summary[f'top{k}']:g} % in {k}" for k in (1, 3, 5, 10))
        out.print(f"the best is ranked first or early: {hits}")
    out.print(against_the_vendor(summary), soft_wrap=True)
    chosen_by = ", ".join(f"{n} by the {path}" for path, n in summary["paths"].items())
    noise = "" if summary["noise"] is None else f"; readings spread by {summary['noise']:.1%}"
    out.print(f"chosen {chosen_by or 'nowhere'}{noise}")
    if summary["failures"] or summary["chosen_failed"]:
        failed = ", ".join(f"{n} {status}" for status, n in summary["failures"].items())
        out.print(f"failures: {failed or 'none'}; {summary['chosen_failed']} of chosen kernels")
    if outcome.unjudged:
        out.print(f"{len(outcome.unjudged)} problems could not be judged:")
        for why, count in Counter(outcome.unjudged.values()).most_common():
            first = next(p for p, reason in outcome.unjudged.items() if reason == why)
            out.print(f"  {count}: {why}, such as {spell_problem(first)}", soft_wrap=True)
    for check in report["checks"]:
        verdict = "holds" if check["passed"] else "FAILS"
        out.print(f"{check['check']} of at least {check['least']:g} {verdict}: {check['found']}")
