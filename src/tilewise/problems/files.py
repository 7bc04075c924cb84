"""Problem files: CSV, JSON, JSON lines and MIOpenDriver commands in; CSV and JSON out.

The format is told from the content. A bad line costs itself: it is reported by number with the
reason, the others are kept, and only a file without a single problem is refused.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import FileError, InputError
from tilewise.problems import miopen
from tilewise.problems.json_text import JsonPart, json_lines, json_objects
from tilewise.problems.problem_set import ProblemSet, plain
from tilewise.problems.rows import RowReader

_UNDECODABLE = re.compile("[\udc80-\udcff]")
WRITABLE = (".csv", ".json", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is no problem, and why."""

    number: int
    text: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


@dataclass(slots=True, kw_only=True)
class ProblemFile(ProblemSet):
    """What a file holds: its problems with their labels, and the lines that are none."""

    bad_lines: list[BadLine] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Line:
    """The rows that one line (or JSON object) holds, or the reason why there are none."""

    number: int
    text: str
    rows: Sequence[Mapping[str, Any]] = ()
    reason: str = ""


def read_problems(path: str | Path, op: str = "", **defaults: Any) -> ProblemFile:
    """The problems of a file, of `op` alone or, without it, of the op that each row names.

    `defaults` (`dtype="bf16"`, `layout=...`) serve rows that do not say. `-` reads standard input.
    """
    reader = RowReader(op, **defaults)
    found = ProblemFile()
    for line in _lines(path, reader):
        reason, rows = line.reason, line.rows
        if not line.text.isascii() and _UNDECODABLE.search(line.text):
            reason, rows = "it is not UTF-8 text", ()
        for row in rows:
            try:
                found.add(*reader.read(row))
            except InputError as error:
                reason = str(error)
        if reason:
            found.bad_lines.append(_bad_line(line, reason))
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
        _replace(target, _csv_text(rows))
    elif target.suffix == ".json":
        _replace(target, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    elif target.suffix == ".jsonl":
        _replace(target, "".join(json.dumps(row) + "\n" for row in rows))
    else:
        raise FileError(f"{target} ends in {target.suffix!r}; use {', '.join(WRITABLE)}")


def read_text(path: str | Path) -> str:
    """A file's text without its byte-order mark; raises FileError where there is none to read.

    Bytes that are not UTF-8 come back as lone surrogates, so that they spoil only their own line.
    """
    data = read_bytes(path)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return _with_newlines(data.decode("utf-16"))
        except UnicodeDecodeError as error:
            raise FileError(f"{path} starts like UTF-16 but is not: {error}") from None
    if b"\0" in data[:4096]:
        raise FileError(f"{path} is a binary file; CSV, JSON or MIOpenDriver text is needed")
    return _with_newlines(data.decode("utf-8-sig", errors="surrogateescape"))


def _with_newlines(text: str) -> str:
    """The same lines, all ended the same way, so that they are counted the same way."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_bytes(path: str | Path) -> bytes:
    """A file's bytes; raises FileError where it is missing, a folder or not readable."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise FileError(f"{path} is a folder; give a file") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None


def _bad_line(line: _Line, reason: str) -> BadLine:
    text = " ".join(line.text[:200].split()).encode("utf-8", "replace").decode()
    return BadLine(number=line.number, text=text, reason=reason[:400])


def _why_none(path: str | Path, op: str, bad_lines: Sequence[BadLine]) -> str:
    what = f"{op} problem" if op else "problem"
    if not bad_lines:
        return f"{path} holds no {what}: it is empty"
    shown = "; ".join(map(str, bad_lines[:3]))
    more = f"; and {len(bad_lines) - 3} more" if len(bad_lines) > 3 else ""
    return f"{path} holds no {what}: {shown}{more}"


def _lines(path: str | Path, reader: RowReader) -> Iterator[_Line]:
    if str(path).endswith(".parquet"):
        return _parquet_lines(path)
    text = read_text(path)
    start = next((c for c in text if not c.isspace()), "")
    if start == "[":
        return map(_json_line, json_objects(text, text.index("[") + 1))
    if start == "{":
        return map(_json_line, json_lines(text))
    if miopen.looks_like_commands(text):
        return _command_lines(text, reader)
    return _csv_lines(text, path, reader)


def _json_line(part: JsonPart) -> _Line:
    return _Line(part.line, part.text, [part.value] if part.value is not None else [], part.reason)


def _command_lines(text: str, reader: RowReader) -> Iterator[_Line]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield _Line(number, line, miopen.parse_command(line, op=reader.op))
            except InputError as error:
                yield _Line(number, line, reason=str(error))


def _csv_lines(text: str, path: str | Path, reader: RowReader) -> Iterator[_Line]:
    # Comments become blank lines, which the csv module skips while it keeps counting.
    lines = ("" if line.lstrip().startswith("#") else line for line in text.split("\n"))
    header_text = next((s for s in text.split("\n") if s.strip() and s.lstrip()[0] != "#"), "")
    delimiter = max(",;\t|", key=header_text.count)
    table = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    header: list[str] = []
    while True:
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            yield _Line(table.line_num, "", reason=f"not CSV: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header:
            yield _csv_line(table.line_num, header, cells, delimiter)
        else:
            header = _checked_header([cell.strip() for cell in cells], path, reader)


def _csv_line(number: int, header: list[str], cells: list[str], delimiter: str) -> _Line:
    text = delimiter.join(cells)
    if len(cells) != len(header):
        return _Line(number, text, reason=f"{len(cells)} fields; the header has {len(header)}")
    return _Line(number, text, [dict(zip(header, cells, strict=True))])


def _checked_header(header: list[str], path: str | Path, reader: RowReader) -> list[str]:
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise FileError(f"{path} has the column {', '.join(doubled)} more than once")
    missing = reader.missing_from(header)
    if missing:
        raise FileError(
            f"{path} has the columns {', '.join(header)[:200]}; "
            f"{reader.op} problems need {', '.join(missing)} too"
        )
    return header


def _parquet_lines(path: str | Path) -> Iterator[_Line]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(read_bytes(path)))
    except pa.ArrowException as error:
        raise FileError(f"{path} is not a Parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield _Line(number, str(row), [{k: v for k, v in row.items() if v is not None}])


def _csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    from io import StringIO

    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = StringIO()
    table = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()


def _replace(target: Path, text: str) -> None:
    """Writes under a temporary name, then renames: readers never see half a file."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(target)
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
