"""What commands about models share: finding one, and the kernels it is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.core.arch import Arch
from tilewise.core.model import Model
from tilewise.errors import InputError, ModelError
from tilewise.selection.models import find_models
from tilewise.selection.opening import open_model

ModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="A model folder; default: the shipped model that fits."),
]
StoresArgument = Annotated[list[Path], typer.Argument(help="Stores of measurements.")]


def given_model(folder: Path) -> Model:
    """The model that the user named; one that cannot be used is bad input."""
    try:
        return open_model(folder)
    except ModelError as error:
        raise InputError(str(error)) from None


def pick_model(folder: Path | None, op: str, arch: Arch, dtype: str | None) -> Model:
    """The model asked for, or the first that fits."""
    if folder is not None:
        return given_model(folder)
    found = find_models(op, arch, dtype or "")
    if not found:
        what = f"{op} on {arch.name}" + (f" in {dtype}" if dtype else "")
        raise InputError(f"there is no model for {what}; name one with --model, or `train` one")
    return open_model(found[0])
