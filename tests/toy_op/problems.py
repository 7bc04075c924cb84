"""Which row sums are worth looking at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from random import Random
from typing import Any

from tilewise.ops.buckets import INTENSITY, by_size
from tilewise.ops.commands import DriverCommand, number
from tilewise.ops.contract import Problems
from tilewise.ops.draws import TINY, Draw, Fields, log_uniform
from toy_op.problem import RowSumProblem


def _uniform(align: int) -> Draw:
    return lambda rng: {
        "rows": log_uniform(rng, 1, 2048),
        "columns": log_uniform(rng, align, 4096, align),
    }


def _tall(rng: Random) -> dict[str, Any]:
    return {"rows": log_uniform(rng, 1024, 65536), "columns": log_uniform(rng, 1, 16)}


def _wide(rng: Random) -> dict[str, Any]:
    return {"rows": log_uniform(rng, 1, 16), "columns": log_uniform(rng, 1024, 65536)}


def _edges() -> Iterator[tuple[str, Fields]]:
    for rows, columns in product(TINY, repeat=2):
        yield "tiny", {"rows": rows, "columns": columns}


def _shape(problem: RowSumProblem) -> str:
    return "tall" if problem.rows > problem.columns else "wide"


def _command(flags: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"op": "row_sum", "rows": number(flags, "rows", 1), "columns": number(flags, "columns", 1)}
    ]


PROBLEMS = Problems(
    families={"tall": _tall, "wide": _wide},
    uniform=_uniform,
    largest=4096,
    edges=_edges,
    sizes=("rows", "columns"),
    axes=(
        by_size("rows", lambda p: p.rows, 2, 64),
        by_size("columns", lambda p: p.columns, 2, 64),
        INTENSITY,
    ),
    aliases={"height": ("rows",), "width": ("columns",)},
    shape=_shape,
    slices={"width": lambda p: "odd" if p.columns % 2 else "even"},
    columns=("rows", "columns", "dtype"),
    commands={"reduce": DriverCommand(flags={"r": "rows"}, rows=_command)},
    brief=lambda p: {"op": p.op, "rows": p.rows, "columns": p.columns},
)
