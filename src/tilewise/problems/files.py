"""Problem files: CSV, JSON, JSON lines and MIOpenDriver commands in; CSV and JSON out.

The format is seen from the content. A bad line costs itself: it is reported by number with the
reason, the others are kept, and only a file without a single problem is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.core.problem import Problem
from tilewise.core.strict_json import loads
from tilewise.errors import FileError, InputError
from tilewise.problems import miopen
from tilewise.problems.json_text import JsonPart, json_lines, json_objects, starts_list
from tilewise.problems.lines import (
    BadLine,
    Line,
    csv_lines,
    csv_text,
    read_bytes,
    read_text,
    replace_text,
)
from tilewise.problems.problem_set import ProblemSet, plain
from tilewise.problems.rows import RowReader
from tilewise.problems.tables import read_parquet

__all__ = ["BadLine", "ProblemFile", "read_problems", "write_problems"]

WRITABLE = (".csv", ".json", ".jsonl")


@dataclass(slots=True, kw_only=True)
class ProblemFile(ProblemSet):
    """What a file holds: its problems with their labels, and the lines that are none."""

    bad_lines: list[BadLine] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    """Where each problem stands."""

    def spoil(self, at: int, reason: str) -> None:
        """Reports the line of a problem whose labels turn out to be no use."""
        self.bad_lines.append(self.lines[at].bad(reason))


def read_problems(path: str | Path, op: str = "", **defaults: Any) -> ProblemFile:
    """The problems of a file, of `op` alone or, without it, of the op that each row names.

    `defaults` (`dtype="bf16"`, `layout=...`) serve rows that do not say. `-` reads standard input.
    """
    reader = RowReader(op, **defaults)
    found = ProblemFile()
    for line in map(Line.checked, _lines(path, reader)):
        reason = line.reason
        for row in line.rows:
            try:
                found.add(*reader.read(row))
                found.lines.append(line)
            except InputError as error:
                reason = str(error)
        if reason:
            found.bad_lines.append(line.bad(reason))
    if not found.problems:
        raise FileError(_why_none(path, op, found.bad_lines))
    return found


def write_problems(
    path: str | Path,
    problems: Iterable[Problem],
    labels: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes problems with their labels, in the format that the name's ending asks for."""
    target = Path(path)
    rows = plain(problems, labels).rows()
    if target.suffix == ".csv":
        replace_text(target, csv_text(rows))
    elif target.suffix == ".json":
        replace_text(target, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    elif target.suffix == ".jsonl":
        replace_text(target, "".join(json.dumps(row) + "\n" for row in rows))
    else:
        raise FileError(f"{target} ends in {target.suffix!r}; use {', '.join(WRITABLE)}")


def _why_none(path: str | Path, op: str, bad_lines: Sequence[BadLine]) -> str:
    what = f"{op} problem" if op else "problem"
    if not bad_lines:
        return f"{path} holds no {what}: it is empty"
    shown = "; ".join(map(str, bad_lines[:3]))
    more = f"; and {len(bad_lines) - 3} more" if len(bad_lines) > 3 else ""
    return f"{path} holds no {what}: {shown}{more}"


def _lines(path: str | Path, reader: RowReader) -> Iterator[Line]:
    if str(path).endswith(".parquet"):
        return _parquet_lines(path)
    text = read_text(path)
    start = next((c for c in text if not c.isspace()), "")
    if starts_list(text):
        return map(_json_line, json_objects(text, text.index("[") + 1))
    if start == "{":
        return map(_json_line, json_lines(text))
    if miopen.looks_like_commands(text):
        return _command_lines(text, reader)

    def check_header(header: list[str]) -> None:
        missing = reader.missing_from(header)
        if missing:
            raise FileError(
                f"{path} has the columns {', '.join(header)[:200]}; "
                f"{reader.op} problems need {', '.join(missing)} too"
            )

    return csv_lines(path, text, check_header)


def _json_line(part: JsonPart) -> Line:
    return Line(part.line, part.text, [part.value] if part.value is not None else [], part.reason)


def _command_lines(text: str, reader: RowReader) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield Line(number, line, miopen.parse_command(line, op=reader.op))
            except InputError as error:
                yield Line(number, line, reason=str(error))


def _plain(value: Any) -> Any:
    """A cell as JSON holds it: dates, bytes and lists become their text."""
    return value if isinstance(value, str | int | float) else str(value)


def _parquet_lines(path: str | Path) -> Iterator[Line]:
    try:
        rows = read_parquet(read_bytes(path)).to_pylist()
    except (FileError, ValueError, OverflowError) as error:  # and of dates beyond Python's
        raise FileError(f"{path} is not a Parquet file: {error}") from None
    for number, row in enumerate(rows, 1):
        given = {k: _plain(v) for k, v in row.items() if v is not None}
        try:
            # Stores and out-of-fold tables hold the whole problem in one column.
            given |= loads(given.pop("problem", "{}"))
        except (TypeError, ValueError, AttributeError):
            yield Line(number, str(row), reason="the column problem is not a JSON object")
            continue
        yield Line(number, str(row), [given])
