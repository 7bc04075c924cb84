"""`report`: one HTML page about stores and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import DtypeOption, ForceFlag, JsonFlag, check_free, emit, out
from tilewise.cli.models import StoresArgument
from tilewise.cli.progress import telling


def report(
    stores: StoresArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="A model folder, to judge its choices.")
    ] = None,
    op: Annotated[str, typer.Option("--op", help="Which op, if the stores hold several.")] = "",
    dtype: DtypeOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Writes an HTML report about measurements and choices.

    A single self-contained file: efficiency, roofline, coverage, failures, tables.
    """
    from tilewise.report.page import write_report

    check_free(target, force)
    with telling("starting") as tell:
        facts = write_report(stores, target, model=model, op=op, dtype=dtype or "", tell=tell)
    found = {
        "path": str(target.resolve()),
        "bytes": target.stat().st_size,
        "problems": len(facts.data.problems),
        "readings": facts.readings,
    }
    if as_json:
        return emit(found)
    out.print(f"{found['path']}: {found['problems']:,} problems, {found['readings']:,} readings")
    return None
