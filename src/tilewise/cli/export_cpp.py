"""`export-cpp`: a C++ library that chooses and launches kernels without Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import FilterOption, JsonFlag, emit, err, out
from tilewise.cli.models import given_model
from tilewise.errors import FileError

if TYPE_CHECKING:
    from tilewise.core.problem import Problem
    from tilewise.export.library import Wanted, Written
    from tilewise.export.rules import OpExport
    from tilewise.export.top import Loss


FolderArgument = Annotated[Path, typer.Argument(metavar="folder", help="The new folder to write.")]
OpsOption = Annotated[list[str], typer.Option("--op", help="gemm, conv_fwd, ... (repeatable).")]
WantedArchOption = Annotated[
    str, typer.Option("--arch", help="As sm_90, sm_90:H200 or x86_avx512.")
]
DtypesOption = Annotated[list[str], typer.Option("--dtype", help="Of operands (repeatable).")]
OutDtypesOption = Annotated[
    list[str] | None,
    typer.Option("--out-dtype", help="Of results (repeatable); by default the dtype's own."),
]
LayoutsOption = Annotated[
    list[str] | None, typer.Option("--layout", help="Only these layouts (repeatable).")
]
WhereOption = Annotated[
    str, typer.Option(help="Serve problems for which this holds, as 'batch == 1 and n % 8 == 0'.")
]
MostKernelsOption = Annotated[
    int | None, typer.Option(min=1, help="At most this many kernels per op: the best ones.")
]
LayersOption = Annotated[
    Path | None,
    typer.Option(
        help="CSV, JSON or JSON lines: keep kernels that win there, and compile "
        "convolutions for these layers; by default the model's own."
    ),
]
OneModelOption = Annotated[
    Path | None, typer.Option(help="A model folder; by default the one that fits, an op each.")
]
ObjectsOption = Annotated[
    int, typer.Option(min=1, help="Compiled GPU kernels at most, an op each.")
]
CompilersOption = Annotated[int | None, typer.Option(min=1, help="How many compilers run at once.")]


def export_cpp(
    folder: FolderArgument,
    op: OpsOption,
    arch: WantedArchOption,
    dtype: DtypesOption,
    out_dtype: OutDtypesOption = None,
    layout: LayoutsOption = None,
    expression: FilterOption = None,
    where: WhereOption = "",
    top: MostKernelsOption = None,
    problems: LayersOption = None,
    model: OneModelOption = None,
    max_objects: ObjectsOption = 1000,
    max_workers: CompilersOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Writes a C++ library that chooses and launches kernels.

    It holds ranking, rules and kernels, is C++17, and CMake builds it.
    """
    from tilewise.core.arch import load_arch
    from tilewise.export.library import Wanted, write_library

    if folder.exists():
        raise FileError(f"{folder} exists already; name a new folder")
    wanted = [
        Wanted(
            op=name,
            arch=load_arch(arch),
            dtypes=tuple(dict.fromkeys(dtype)),
            out_dtypes=tuple(dict.fromkeys(out_dtype or ())),
            layouts=tuple(dict.fromkeys(layout or ())),
            expression=expression or "",
            where=where,
            problems=_problems(problems, name, dtype),
            top=top,
            model=None if model is None else given_model(model),
        )
        for name in dict.fromkeys(op)
    ]
    exports, losses = _narrowed(wanted)
    written = write_library(
        folder,
        exports,
        max_workers=max_workers,
        max_objects=max_objects,
        on_progress=lambda line: err.print(line, soft_wrap=True),
    )
    if as_json:
        told = {name: asdict(loss) for name, loss in losses.items()}
        return emit({"folder": str(folder), **asdict(written), "losses": told})
    return _tell(folder, written, losses)


def _problems(path: Path | None, op: str, dtypes: Sequence[str]) -> tuple[Problem, ...]:
    from tilewise.problems.files import read_problems

    if path is None or not dtypes:
        return ()
    found = (read_problems(path, op, dtype=dtype).problems for dtype in dict.fromkeys(dtypes))
    return tuple(dict.fromkeys(problem for some in found for problem in some))


def _narrowed(wanted: Sequence[Wanted]) -> tuple[list[OpExport], dict[str, Loss]]:
    """Every op's export, and what leaving kernels out costs where some are."""
    from tilewise.export.library import narrowed, prepared

    exports, losses = [], {}
    for one in wanted:
        export, loss = narrowed(prepared(one), one)
        exports.append(export)
        if loss is not None:
            losses[one.op] = loss
    return exports, losses


def _tell(folder: Path, written: Written, losses: Mapping[str, Loss]) -> None:
    """What it came to, in a line or two."""
    for name, loss in losses.items():
        out.print(
            f"{name}: {loss.kept} of {loss.winners} kernels that win somewhere on "
            f"{loss.problems} problems; efficiency lost by the model's word: mean "
            f"{loss.mean:.2%}, worst {loss.worst:.2%}; {loss.unserved} not served",
            soft_wrap=True,
        )
    kernels = ", ".join(f"{count} kernels of {name}" for name, count in written.kernels.items())
    objects = f", {written.objects} objects of {written.object_bytes:,} bytes"
    out.print(
        f"{kernels}{objects if written.objects else ''}; {written.total_bytes:,} bytes written to "
        f"{folder}",
        soft_wrap=True,
    )
