"""`report`: one HTML page about stores and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import DtypeOption, JsonFlag, emit, err, out
from tilewise.cli.models import StoresArgument
from tilewise.errors import InputError


def report(
    stores: StoresArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="A model folder, to judge its choices.")
    ] = None,
    op: Annotated[str, typer.Option("--op", help="Where stores hold several ops.")] = "",
    dtype: DtypeOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Writes one self-contained HTML page: choices, roofline, coverage, failures, tables."""
    from tilewise.report.page import write_report

    if target.exists() and not force:
        raise InputError(f"{target} is there already; name another file, or add --force")
    with err.status("starting") as status:
        facts = write_report(
            stores, target, model=model, op=op, dtype=dtype or "", tell=status.update
        )
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
