"""`data import` and `data export`: other people's measurements in, CSV out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import (
    DtypeOption,
    ForceFlag,
    JsonFlag,
    check_free,
    emit,
    out,
    table,
    warn_of,
)
from tilewise.cli.progress import telling
from tilewise.engines.device import resolve_arch

OnlyOpOption = Annotated[str, typer.Option("--op", help="Only this op; default: all.")]
StoreArgument = Annotated[Path, typer.Argument(help="A store; created if it does not exist.")]


def import_(
    file: Annotated[Path, typer.Argument(help="CK Tile's CSV, benchmark JSON or log.")],
    store: StoreArgument,
    arch: Annotated[
        str, typer.Option("--arch", help="Architecture it was measured on, such as gfx950.")
    ],
    op: OnlyOpOption = "",
    dtype: DtypeOption = None,
    device: Annotated[str, typer.Option(help="Device it was measured on.")] = "",
    toolchain: Annotated[str, typer.Option(help="Compiler that built the kernels.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Adds other tools' measurements to a store.

    Rows that cannot be used are shown with the reason.
    """
    from tilewise.data.importing import import_file

    choices = {"op": op, "dtype": dtype or "", "device": device, "toolchain": toolchain}
    chosen = resolve_arch(arch)
    with telling(f"reading {file}"):
        found = import_file(file, store, chosen, **choices)
    if as_json:
        return emit({"store": str(store), **found.to_dict()})
    warn_of(found.bad_lines)
    counts = found.to_dict()
    rows = [[status, number] for status, number in found.statuses.items()]
    rows += [["already stored", found.known]] if found.known else []
    rows += [["not usable", counts["bad"]]] if counts["bad"] else []
    table(f"{counts['rows']} rows added", ["status", "rows"], rows)
    what = f"{counts['problems']} problems, {counts['kernels']} kernels in {store}"
    out.print(what, soft_wrap=True)
    for note, number in found.notes.items():
        out.print(f"{number} {note}")
    return None


def export(
    store: Annotated[Path, typer.Argument(help="A store.")],
    file: Annotated[Path, typer.Argument(help="The CSV file to write.")],
    op: OnlyOpOption = "",
    latest: Annotated[
        bool, typer.Option("--latest", help="Only the last attempt at each measurement.")
    ] = False,
    failures: Annotated[
        bool, typer.Option("--failures", help="Also failures and wrong results.")
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Writes measurements as CSV, with CK Tile's columns."""
    from tilewise.data.exporting import export_csv

    check_free(file, force)
    with telling(f"reading {store}"):
        rows = export_csv(store, file, op=op, latest=latest, failures=failures)
    if as_json:
        return emit({"file": str(file), "rows": rows})
    return out.print(f"{rows} rows written to {file}")
