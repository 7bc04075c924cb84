"""`bench`: named kernels, the selected ones and the vendor's timed in turn on one problem."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated, Any

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    FilterOption,
    JsonFlag,
    OpOption,
    emit,
    listing,
    out,
    parse_problem,
)
from tilewise.cli.explain import ProblemWords
from tilewise.cli.models import ModelOption, given_model
from tilewise.cli.progress import shown
from tilewise.cli.session import PolicyOption, Session, TimeoutOption, dispatcher_of, store_folder
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement
from tilewise.core.problem import Problem
from tilewise.errors import KernelError
from tilewise.judge.ratios import NOISY, Ratio, ratio
from tilewise.judge.verdicts import reading
from tilewise.ops.contract import get_op
from tilewise.selection.choice import Choice


def bench(
    words: ProblemWords,
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Time this kernel (repeatable).")
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=0, help="Also time this many from the top of the ranking.")
    ] = 1,
    model: ModelOption = None,
    expression: FilterOption = None,
    policy: PolicyOption = "",
    timeout: TimeoutOption = 5.0,
    as_json: JsonFlag = False,
) -> None:
    """Times a few kernels on one problem, side by side.

    The vendor's routines are timed too. Exits with 1 if one of them fails.
    """
    from tilewise.judge.validation import rows_of
    from tilewise.sweep.run import sweep

    problem = parse_problem(op, words, dtype)
    named = [get_op(op).kernel_from_name(name) for name in kernel or ()]
    session = Session.of(arch, policy, timeout)
    loaded = given_model(model) if model else None
    chosen: list[Choice] = []
    timed: list[Kernel] = []

    def kernels(device: Arch) -> Sequence[Kernel]:
        registry = session.registry(op, device, expression)
        why_unusable = registry.op.why_unusable
        for given in named:
            why = why_unusable(given, problem, device)
            if why is not None:
                raise KernelError(f"{given.name} cannot serve this problem: {why}")
        choice = dispatcher_of(registry, loaded).select(problem)
        ranked = (r.kernel for r in choice.ranking)
        head = [k for k in ranked if why_unusable(k, problem, device) is None][:top]
        chosen.append(choice)
        timed.extend(session.with_vendors(op, [*named, *head]))
        return timed

    with store_folder(None) as folder, shown(as_json=False) as on_event:
        summary = sweep(
            *(folder, [problem], kernels, session.executor(problem.op), session.policy),
            rivals=lambda _: timed,
            on_event=on_event,
        )
        rows = rows_of(folder, [problem], session.policy, summary.device).get(problem.key, [])
    if summary.stopped:
        raise typer.Exit(130)
    listed = timings(rows, chosen[0])
    if as_json:
        emit({"problem": problem.to_dict(), "device": summary.device, "rows": listed})
    else:
        tell(listed, problem, summary.device)
    raise typer.Exit(0 if all(row["status"] == "ok" for row in listed) else 1)


def timings(rows: Sequence[Measurement], choice: Choice) -> list[dict[str, Any]]:
    """The last reading of each kernel, fastest first, beside what was predicted."""
    last: dict[str, Measurement] = {}
    for row in sorted(rows, key=lambda r: (r.is_ok, r.attempt)):
        last[row.kernel] = row
    predicted = {r.kernel.name: r.predicted_us for r in choice.ranking}
    timed = [r for r in last.values() if r.is_ok and r.time_us]
    vendors = [r for r in timed if r.engine == "vendor"]
    vendor = min(vendors, key=lambda r: r.time_us or 0.0, default=None)
    ratios = {r.kernel: compare(vendor, r) for r in timed} if vendor else {}
    shown_fields = ("kernel", "status", "message", "time_us", "spread_us", "min_us", "repeats")
    return [
        {
            **{name: getattr(row, name) for name in shown_fields},
            "tflops": row.tflops,
            "gb_s": row.gb_s,
            "predicted_us": predicted.get(row.kernel),
            **against_vendor(ratios.get(row.kernel)),
            "is_selected": row.kernel == choice.kernel.name,
        }
        for row in sorted(last.values(), key=lambda r: r.time_us or inf)
    ]


def compare(vendor: Measurement, row: Measurement) -> Ratio:
    """How many times as fast as the vendor's a kernel is; the vendor's own is as fast as itself."""
    if row is vendor:
        return Ratio(value=1.0, low=1.0, high=1.0)
    return ratio(reading(vendor), reading(row))


def against_vendor(found: Ratio | None) -> dict[str, Any]:
    """What may be said of a ratio, and what it may be."""
    if found is None:
        return {"vs_vendor": None, "vs_vendor_interval": None}
    return {"vs_vendor": found.if_clear, "vs_vendor_interval": [found.low, found.high]}


def tell(rows: Sequence[dict[str, Any]], problem: Problem, device: str) -> None:
    """The readings, for people."""
    columns = ("time_us", "spread_us", "predicted_us", "tflops", "gb_s")
    listing(
        f"{problem.op} {problem.dtype} on {device}; * is what tilewise selects",
        ["", "us", "spread", "predicted", "TFLOPS", "GB/s", "vs vendor", "kernel"],
        [
            [
                "*" if row["is_selected"] else "",
                *("-" if row[c] is None else row[c] for c in columns),
                spelled(row),
                row["kernel"],
            ]
            for row in rows
        ],
    )
    for row in rows:
        if row["status"] != "ok":
            out.print(f"{row['kernel']}: {row['status']}: {row['message'].splitlines()[0]}")
    vendors = [row["kernel"] for row in rows if "_vendor_" in row["kernel"]]
    if vendors and all(name.endswith("_numpy") for name in vendors):
        out.print("Compared with NumPy alone; install PyTorch to compare with its routine.")


def spelled(row: dict[str, Any]) -> str:
    """The ratio to the vendor's, with its interval where that leaves something to say."""
    if row["vs_vendor_interval"] is None:
        return "-"
    if row["vs_vendor"] is None:
        return NOISY
    low, high = row["vs_vendor_interval"]
    return Ratio(value=row["vs_vendor"], low=low, high=high).spell()
