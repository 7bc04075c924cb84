"""`export-cpp`: a C++ library that chooses and launches kernels without Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import JsonFlag, emit, err, out
from tilewise.cli.models import given_model
from tilewise.errors import FileError, InputError

if TYPE_CHECKING:
    from tilewise.core.problem import Problem
    from tilewise.export.library import Wanted, Written
    from tilewise.export.rules import OpExport
    from tilewise.export.top import Loss


FolderArgument = Annotated[Path, typer.Argument(metavar="folder", help="The new folder to write.")]
OpsOption = Annotated[list[str], typer.Option("--op", help="gemm, conv_fwd, ... (repeatable).")]
WantedArchOption = Annotated[
    str, typer.Option("--arch", help="E.g. sm_90, sm_90:H200 or x86_avx512.")
]
DtypesOption = Annotated[list[str], typer.Option("--dtype", help="Of the operands (repeatable).")]
OutDtypesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--out-dtype", help="Of the result (repeatable); default: the usual one for the operands."
    ),
]
LayoutsOption = Annotated[
    list[str] | None,
    typer.Option("--layout", help="Only these layouts, as rcr or gemm:rcr (repeatable)."),
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Serve problems for which this holds, as 'batch == 1 and n % 8 == 0'; "
        "'gemm: m < 512' is for one op (repeatable)."
    ),
]
KernelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        help="Keep only kernels that match this expression; 'gemm: split_k == 1' is for one op "
        "(repeatable).",
    ),
]
MostKernelsOption = Annotated[
    int | None, typer.Option(min=1, help="Keep at most this many kernels per op, the best ones.")
]
LayersOption = Annotated[
    Path | None,
    typer.Option(
        help="CSV, JSON or JSON lines: keep kernels that win there, and compile "
        "convolutions for these layers; default: the model's own."
    ),
]
OneModelOption = Annotated[
    Path | None, typer.Option(help="A model folder; default: the shipped model that fits each op.")
]
ObjectsOption = Annotated[
    int, typer.Option(min=1, help="Compile at most this many GPU kernels per op.")
]
CompilersOption = Annotated[
    int | None, typer.Option(min=1, help="How many compilers to run at once.")
]


def export_cpp(
    folder: FolderArgument,
    op: OpsOption,
    arch: WantedArchOption,
    dtype: DtypesOption,
    out_dtype: OutDtypesOption = None,
    layout: LayoutsOption = None,
    expression: KernelsOption = None,
    where: WhereOption = None,
    top: MostKernelsOption = None,
    problems: LayersOption = None,
    model: OneModelOption = None,
    max_objects: ObjectsOption = 1000,
    max_workers: CompilersOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Exports a C++ library that chooses and launches kernels.

    It contains the ranking, the rules and the kernels. It is C++17 and built with CMake.
    """
    from tilewise.core.arch import load_arch
    from tilewise.export.library import Wanted, write_library

    if folder.exists():
        raise FileError(f"{folder} already exists; choose a new folder")
    ops = tuple(dict.fromkeys(op))
    given = _problems(problems, ops, dtype)
    wanted = [
        Wanted(
            op=name,
            arch=load_arch(arch),
            dtypes=tuple(dict.fromkeys(dtype)),
            out_dtypes=tuple(dict.fromkeys(out_dtype or ())),
            layouts=_own(layout, name, ops),
            expression=_all_of(_own(expression, name, ops)),
            where=_all_of(_own(where, name, ops)),
            problems=given[name],
            top=top,
            model=None if model is None else given_model(model),
        )
        for name in ops
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
        lost = {name: asdict(loss) for name, loss in losses.items()}
        return emit({"folder": str(folder), **asdict(written), "losses": lost})
    return _tell(folder, written, losses)


def _own(said: Sequence[str] | None, op: str, ops: Sequence[str]) -> tuple[str, ...]:
    """What an option says to an op; what stands before a colon names the op that is meant."""
    found: dict[str, None] = {}
    for text in said or ():
        meant, is_for_one, rest = text.rpartition(":")
        if is_for_one and meant.strip() not in ops:
            raise InputError(f"{text!r} is for {meant.strip()!r}; --op names {', '.join(ops)}")
        if not is_for_one or meant.strip() == op:
            found[rest.strip()] = None
    return tuple(found)


def _all_of(expressions: Sequence[str]) -> str:
    """One expression of several."""
    if len(expressions) < 2:
        return "".join(expressions)
    return " and ".join(f"({one})" for one in expressions)


def _problems(
    path: Path | None, ops: Sequence[str], dtypes: Sequence[str]
) -> dict[str, tuple[Problem, ...]]:
    """Every op's problems of a file; lines that are none of any op are told."""
    from tilewise.problems.files import read_problems

    if path is None:
        return dict.fromkeys(ops, ())
    read = {
        op: [read_problems(path, op, dtype=dtype) for dtype in dict.fromkeys(dtypes)] for op in ops
    }
    bad = [{line.number: line for line in one.bad_lines} for own in read.values() for one in own]
    useless = set.intersection(*map(set, bad)) if bad else set()
    for said in dict.fromkeys(str(own[at]) for at in sorted(useless) for own in bad):
        err.print(f"{path}, {said}", soft_wrap=True)
    return {
        op: tuple(dict.fromkeys(problem for one in own for problem in one.problems))
        for op, own in read.items()
    }


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
