"""A model folder opened for use: what it says is held against the op that it is for.

`load_model` knows that a model is sound in itself. Here its kernels, fields and measured problems
are looked up, and it is asked about one of them, before anything is chosen by it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from tilewise.core.features import PROBLEM
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model, load_model
from tilewise.core.problem import Problem
from tilewise.core.strict_json import loads
from tilewise.errors import ModelError, TilewiseError
from tilewise.ops.columns import pool_rows
from tilewise.ops.contract import get_op


def open_model(folder: Path | str) -> Model:
    """The model in `folder`; raises ModelError where it cannot be used, whatever the reason."""
    model = load_model(folder)
    try:
        _check_fields(model)
        _try(model, measured_kernels(model))
    except Exception as error:  # whatever a file made go wrong is a fault of the file
        kind = "" if isinstance(error, TilewiseError) else f"{type(error).__name__}: "
        raise ModelError(f"{folder} cannot be used: {kind}{error}") from None
    return model


def measured_kernels(model: Model) -> list[Kernel]:
    """The kernels that the model was trained on."""
    op = get_op(model.op)
    try:
        found = [op.kernel_from_name(name) for name in model.manifest.get("kernels", ())]
    except TilewiseError as error:
        raise ModelError(
            f"{model.name} names a kernel that this version does not know: {error}; update "
            "tilewise, or train the model again"
        ) from None
    if not found:
        raise ModelError(f"{model.name} names no kernels")
    return found


def measured_problem(model: Model, at: int) -> Problem:
    """One of the problems that the model was trained on."""
    try:
        return get_op(model.op).problem.from_dict(loads(model.measured.problems[at]))
    except (TilewiseError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{model.name}: its measured problem {at} is none: {error}") from None


def _check_fields(model: Model) -> None:
    """Raises where a field of the problem is none, or is text where it should be a number."""
    known = {f"p_{f.name}": str(f.type) == "str" for f in fields(get_op(model.op).problem)}
    for field in model.features.fields_of(PROBLEM):
        if not field.is_asked and known.get(field.name) is not bool(field.words):
            what = "is not there" if field.name not in known else "is of another kind"
            raise ModelError(f"{model.name}: the field {field.name} {what} in a {model.op} problem")


def _try(model: Model, kernels: list[Kernel]) -> None:
    """Raises where the model has no finite opinion of its own kernels on its first problem."""
    few = list({kernel.engine: kernel for kernel in kernels}.values())
    rows = pool_rows(model, few, model.trained_on, measured_problem(model, 0))
    score, level = model.scores(rows), model.predict("level", rows)
    if not (np.isfinite(score).all() and np.isfinite(level).all()):
        raise ModelError(f"{model.name} predicts no finite time for a problem it was trained on")
