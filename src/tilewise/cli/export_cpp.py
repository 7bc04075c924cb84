"""`export-cpp`: a C++ library that chooses and launches kernels without Python."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import FilterOption, JsonFlag, emit, err, out
from tilewise.cli.models import given_model
from tilewise.errors import FileError, InputError

if TYPE_CHECKING:
    from tilewise.export.library import Wanted
    from tilewise.export.rules import OpExport


def export_cpp(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder to write.")],
    op: Annotated[list[str], typer.Option("--op", help="gemm, conv_fwd, ... (repeatable).")],
    arch: Annotated[str, typer.Option("--arch", help="As sm_90, sm_90:H200 or x86_avx512.")],
    dtype: Annotated[list[str], typer.Option("--dtype", help="Of operands (repeatable).")],
    out_dtype: Annotated[
        list[str] | None,
        typer.Option("--out-dtype", help="Of results (repeatable); by default the dtype's own."),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="Only these layouts (repeatable).")
    ] = None,
    expression: FilterOption = None,
    where: Annotated[
        str,
        typer.Option(help="Serve problems for which this holds, as 'batch == 1 and n % 8 == 0'."),
    ] = "",
    top: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many kernels an op, that win on --problems."),
    ] = None,
    problems: Annotated[
        Path | None, typer.Option(help="Problems that --top looks at: CSV, JSON or JSON lines.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model folder; by default the one that fits, an op each.")
    ] = None,
    max_objects: Annotated[
        int, typer.Option(min=1, help="Compiled GPU kernels at most, an op each.")
    ] = 1000,
    max_workers: Annotated[int | None, typer.Option(min=1, help="Compilers at once.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Writes a C++17 library with ranking, rules and kernels; CMake builds it."""
    from tilewise.core.arch import load_arch
    from tilewise.export.library import Wanted, prepared, write_library
    from tilewise.export.top import strongest

    if folder.exists():
        raise FileError(f"{folder} exists already; name a new folder")
    if (top is None) != (problems is None):
        raise InputError("--top and --problems go together: give both or neither")
    exports: list[OpExport] = []
    losses: dict[str, Any] = {}
    for name in dict.fromkeys(op):
        wanted = Wanted(
            op=name,
            arch=load_arch(arch),
            dtypes=tuple(dict.fromkeys(dtype)),
            out_dtypes=tuple(dict.fromkeys(out_dtype or ())),
            layouts=tuple(dict.fromkeys(layout or ())),
            expression=expression or "",
            where=where,
            model=None if model is None else given_model(model),
        )
        export = prepared(wanted)
        if top is not None and problems is not None:
            export, loss = strongest(export, _problems(problems, wanted), top)
            losses[name] = asdict(loss)
        exports.append(export)
    written = write_library(
        folder,
        exports,
        max_workers=max_workers,
        max_objects=max_objects,
        on_progress=lambda line: err.print(line, soft_wrap=True),
    )
    if as_json:
        return emit({"folder": str(folder), **asdict(written), "losses": losses})
    for name, loss in losses.items():
        out.print(
            f"{name}: {loss['kept']} of {loss['winners']} kernels that win somewhere on "
            f"{loss['problems']} problems; efficiency lost by the model's word: mean "
            f"{loss['mean']:.2%}, worst {loss['worst']:.2%}; {loss['unserved']} not served",
            soft_wrap=True,
        )
    kernels = ", ".join(f"{count} kernels of {name}" for name, count in written.kernels.items())
    objects = f", {written.objects} objects of {written.object_bytes:,} bytes"
    return out.print(
        f"{kernels}{objects if written.objects else ''}; {written.total_bytes:,} bytes written to "
        f"{folder}",
        soft_wrap=True,
    )


def _problems(path: Path, wanted: Wanted) -> list[Any]:
    from tilewise.problems.files import read_problems

    return list(read_problems(path, wanted.op, dtype=wanted.dtypes[0]).problems)
