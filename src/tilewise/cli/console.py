"""What every command shares: JSON on stdout, tables for people, errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tilewise.core.problem import Problem, spell_problem
from tilewise.core.strict_json import finite
from tilewise.errors import InputError, printable
from tilewise.ops.contract import get_op
from tilewise.problems.lines import BadLine, is_stream
from tilewise.problems.rows import problem_from_words

if TYPE_CHECKING:
    from tilewise.dispatch import Registry
    from tilewise.selection.choice import Ranked

JsonFlag = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
OpOption = Annotated[str, typer.Option("--op", help="gemm, conv_fwd, conv_bwd_data, ...")]
ArchOption = Annotated[
    str | None,
    typer.Option("--arch", help="E.g. sm_90 or sm_90:H200; default: this machine."),
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="fp32, fp16, bf16, fp8, ...")]
FilterOption = Annotated[
    str | None, typer.Option("--filter", help="Keep only kernels that match this expression.")
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite what already exists.")]


MOST_BAD_LINES = 20
MOST_SECONDS = 1e6
"""The longest timeout: eleven days, well within what the system's clocks can wait for."""


def bearable(option: typer.CallbackParam, seconds: float) -> float:
    """Seconds that the system can wait for; `nan` passes every bound that typer checks."""
    if not seconds <= MOST_SECONDS:
        raise InputError(f"{option.opts[0]} is {seconds:g}; give at most {MOST_SECONDS:g} seconds")
    return seconds


def check_free(target: Path | None, force: bool) -> None:
    """Raises where a file or model would be replaced unasked; streams are written to, as ever."""
    if force or target is None or not target.exists():
        return
    if target.is_dir() or not is_stream(target):
        raise InputError(
            f"{target} already exists; choose another name, or add --force to overwrite it"
        )


class PlainConsole(Console):
    """Shows names and paths as they are: neither markup nor what a terminal takes for commands."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """All text comes by here, wherever it is from."""
        return super().render_str(printable(text), **how)

    def on_broken_pipe(self) -> None:
        """Lets `main` decide; rich would end the program with an error."""
        raise BrokenPipeError


out = PlainConsole()
err = PlainConsole(stderr=True)


def emit(value: Any) -> None:
    """`value` as JSON on stdout, and nothing else there."""
    sys.stdout.write(json.dumps(finite(value), indent=1, default=str) + "\n")


def say(text: str) -> None:
    """A sentence below a heading, wrapped between words."""
    out.print(Padding(text, (0, 0, 0, 3)))


def warn_of(bad: Sequence[BadLine]) -> None:
    """Shows the first bad lines of a file on stderr."""
    for line in bad[:MOST_BAD_LINES]:
        err.print(f"{line}: {line.text}", soft_wrap=True)
    if len(bad) > MOST_BAD_LINES:
        err.print(f"... and {len(bad) - MOST_BAD_LINES} more bad lines")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table for people; numbers stand right, and words are broken only where there is no room."""
    shown = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.header_style = "bold"
    body = [[cell(value) for value in row] for row in rows]
    cells = [[row[i] for row in body if row[i]] for i in range(len(columns))]
    words = [" ".join([c, *own]).split() for c, own in zip(columns, cells, strict=True)]
    widths = [min(_UNBROKEN, max(map(len, own), default=0)) for own in words]
    has_room = sum(widths) + 2 * len(widths) < out.width
    for column, own, width in zip(columns, cells, widths, strict=True):
        numeric = bool(own) and all(map(_is_number, own))
        shown.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=width if has_room else None,
        )
    for row in body:
        shown.add_row(*row)
    out.print(shown)


def listing(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Lines that end in a long name: never cut or folded, so that names can be copied."""
    body = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*body, strict=True)][:-1]
    out.print(title, soft_wrap=True)
    for row in body:
        numbers = "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=False))
        out.print(f"  {numbers}  {row[-1]}", soft_wrap=True)


_UNBROKEN = 16
"""Longer words, such as kernels' names, are folded where a table would be too wide."""
UNKNOWN = 1e15
"""Predictions beyond this are handicaps of kernels that a model never saw, not times."""


def forecast(ranked: Ranked) -> tuple[float | None, float | None]:
    """Microseconds and TFLOPS of a ranked kernel, None where nobody knows them."""
    if ranked.predicted_us > UNKNOWN:
        return None, None
    return ranked.predicted_us, ranked.predicted_tflops


def cell(value: Any) -> str:
    """A value as a person wants to read it."""
    if value is None or (isinstance(value, float) and value > UNKNOWN):
        return "unknown"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    if type(value) is int and abs(value) >= 10_000:
        return f"{value:,}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))  # one line


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").lstrip("-").rstrip("x%").isdigit()


def parse_problem(op: str, words: Sequence[str], element: str | None = None) -> Problem:
    """A problem from `KEY=VALUE` words, with the dtype that an option gives."""
    if element and any(word.partition("=")[0].strip().lower() == "dtype" for word in words):
        raise InputError("dtype is given twice; give it once")
    return problem_from_words(words, op, dtype=element)


def spell_values(values: Mapping[str, Any]) -> str:
    """A problem of a report by its words and dtype."""
    problem = get_op(values["op"]).problem.from_dict(values)
    return f"{spell_problem(problem)} {problem.dtype}"


def filtered(registry: Registry, expression: str) -> Registry:
    """The registry's kernels that a filter keeps; one that keeps none is a mistake."""
    kept = registry.filter(expression)
    if not len(kept):
        op, label = registry.op.name, registry.arch.label
        raise InputError(
            f"--filter {expression!r} leaves no kernel of {op} on {label}; "
            f"`tilewise kernels list --op {op}` shows what there is"
        )
    return kept
