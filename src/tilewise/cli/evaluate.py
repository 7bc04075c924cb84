"""`evaluate` and `compare`: judge models on measurements, never on what they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.console import (
    DtypeOption,
    ForceFlag,
    JsonFlag,
    check_free,
    emit,
    out,
    spell_values,
    table,
)
from tilewise.cli.models import StoresArgument
from tilewise.cli.progress import telling
from tilewise.cli.train import show_efficiency
from tilewise.errors import InputError


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    stores: StoresArgument,
    dtype: DtypeOption = None,
    leave_out: Annotated[
        str, typer.Option(help="Score each group of this label with a model that never saw it.")
    ] = "",
    target: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write each problem's efficiency, for `problems augment`."
        ),
    ] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Scores a model against measurements.

    Problems that it was trained on are judged by predictions of models that had not seen them.
    """
    from tilewise.core.model import load_model
    from tilewise.learn.dataset import from_stores
    from tilewise.learn.evaluate import evaluate as judge
    from tilewise.learn.evaluate import leave_one_out
    from tilewise.learn.params import Params
    from tilewise.problems.files import write_problems

    if leave_out and target is not None:
        raise InputError("--out writes what the model itself is worth; drop --leave-out or --out")
    check_free(target, force)
    known = load_model(model)
    with telling("reading measurements") as tell:
        data = from_stores(stores, op=known.op, arch=known.trained_on, dtype=dtype or "")
        if leave_out:
            params = Params.from_dict(known.manifest.get("params", {}))
            groups = leave_one_out(data, leave_out, params, tell)
        else:
            tell(f"judging {known.name} on {len(data.problems):,} problems")
            found = judge(model, data)
    if leave_out:
        return _show_left_out(leave_out, groups, as_json)
    if target is not None:
        scored = found.scored_problems()
        write_problems(target, scored.problems, scored.labels)
    report = found.to_dict()
    if as_json:
        return emit(report)
    show_efficiency(
        f"{known.name}: {report['problems_unseen']} unseen problems, "
        f"{report['problems_out_of_fold']} out of fold",
        report,
    )
    _show_parts(report)
    return None


def _show_parts(report: dict[str, Any]) -> None:
    """Groups of problems, but for those that hold all of them; then the worst choices."""
    for name, groups in report["slices"].items():
        if len(groups) > 1:
            rows = [
                [group.strip(), v["problems"], v["mean"], v["p10"], v["min"]]
                for group, v in groups.items()
            ]
            table(f"by {name}", [name, "problems", "mean", "p10", "min"], rows)
    wrong = [row for row in report["worst"] if row["chosen"] != row["best"]]
    if wrong:
        out.print(
            "the worst: % of the best and problem, what was chosen, what was best", soft_wrap=True
        )
    for row in wrong:
        out.print(f"  {row['efficiency']:5.1f}  {spell_values(row['problem'])}", soft_wrap=True)
        out.print(f"         {row['chosen']}\n         {row['best']}", soft_wrap=True)


def _show_left_out(label: str, groups: dict[str, dict[str, float]], as_json: bool) -> None:
    if as_json:
        return emit(groups)
    columns = ("problems", "mean", "median", "p10", "min")
    rows = [[name, *(group[c] for c in columns)] for name, group in groups.items()]
    return table(f"left out by {label}", [label, *columns], rows)


def compare(
    old: Annotated[Path, typer.Argument(help="The model in use.")],
    new: Annotated[Path, typer.Argument(help="The model to replace it with.")],
    stores: StoresArgument,
    dtype: DtypeOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Tells whether a new model may replace an old one.

    Exits with 1 if it is not.
    """
    from tilewise.core.model import load_model
    from tilewise.learn.compare import compare as judge
    from tilewise.learn.dataset import from_stores

    known = load_model(old)
    with telling("reading measurements") as tell:
        data = from_stores(stores, op=known.op, arch=known.trained_on, dtype=dtype or "")
        tell(f"judging both on {len(data.problems):,} problems")
        report = judge(old, new, data)
    if as_json:
        emit(report)
    else:
        rows = [
            [c["rule"], c["old"], c["new"], "yes" if c["passed"] else "NO"]
            for c in report["checks"]
        ]
        table(f"{report['problems']} problems", ["rule", "old", "new", "holds"], rows)
        for fall in report["fallen"]:
            out.print(f"fell from {fall['old']} to {fall['new']}: {spell_values(fall['problem'])}")
    raise typer.Exit(0 if report["passed"] else 1)
