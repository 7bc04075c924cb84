"""`export-c`: a model as one C header."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import ArchOption, ForceFlag, JsonFlag, check_free, emit, out
from tilewise.cli.models import given_model
from tilewise.errors import FileError
from tilewise.ops.contract import get_op
from tilewise.problems.lines import replace_text


def export_c(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    file: Annotated[Path, typer.Argument(help="The header to write.")],
    name: Annotated[
        str, typer.Option(help="Prefix for every name in it; default: the model's name.")
    ] = "",
    kernels: Annotated[
        Path | None, typer.Option(help="Kernels as JSON; default: those it was trained on.")
    ] = None,
    arch: ArchOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Exports a model as a C header.

    It ranks kernels as Python does, compiles as C11 and C++17, and needs no library.
    """
    from tilewise.core.arch import load_arch
    from tilewise.ops.configs import load_kernels
    from tilewise.selection.export_c import export_c as render
    from tilewise.selection.opening import measured_kernels

    check_free(file, force)
    found = given_model(model)
    figures = found.figures_for(load_arch(arch) if arch else None)
    pool = measured_kernels(found)
    try:
        if kernels is not None:
            pool = load_kernels(kernels.read_text(), get_op(found.op))
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from None
    text = render(found, pool, figures, name)
    replace_text(file, text)
    if as_json:
        return emit({"file": str(file), "kernels": len(pool), "bytes": len(text)})
    return out.print(f"{len(pool)} kernels, {len(text):,} bytes written to {file}")
