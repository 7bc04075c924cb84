"""Text files as rows with line numbers, so that every complaint can name its line."""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tilewise.core.plain_files import replacing, resolved
from tilewise.errors import FileError

_UNDECODABLE = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that could not be used, and why."""

    number: int
    text: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        return {"line": self.number, "text": self.text, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Line:
    """The rows that one line (or JSON object) holds, or the reason why there are none."""

    number: int
    text: str
    rows: Sequence[Mapping[str, Any]] = ()
    reason: str = ""

    def checked(self) -> Line:
        """The same, without rows where the text holds bytes that are not UTF-8."""
        if self.text.isascii() or not _UNDECODABLE.search(self.text):
            return self
        return Line(self.number, self.text, reason="it is not UTF-8 text")

    def bad(self, reason: str) -> BadLine:
        """The complaint about this line, short enough to print."""
        text = " ".join(self.text[:200].split()).encode("utf-8", "replace").decode()
        return BadLine(number=self.number, text=text, reason=reason[:400])


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
        raise FileError(f"{path} is a binary file; text is needed")
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
    except (OSError, ValueError) as error:  # names too long, or of null bytes
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{str(path)[:200]} cannot be read: {reason}") from None


def csv_lines(
    path: str | Path, text: str, check_header: Callable[[list[str]], None]
) -> Iterator[Line]:
    """The rows of a table with a header; `check_header` raises where columns are wanting.

    A cell ends with its line: a stray quote spoils its own line, not the rest of the file.
    """
    delimiter = ""
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        delimiter = delimiter or max(",;\t|", key=line.count)
        try:
            cells = _cells(line, delimiter)
        except csv.Error as error:
            if not header:
                raise FileError(f"{path}: the header, line {number}, is not CSV: {error}") from None
            yield Line(number, line, reason=f"not CSV: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header:
            yield _csv_line(number, header, cells, delimiter)
        else:
            header = [cell.strip() for cell in cells]
            _check_doubled(path, header)
            check_header(header)


def _cells(line: str, delimiter: str) -> list[str]:
    (cells,) = csv.reader([f"{line}\n"], delimiter=delimiter, skipinitialspace=True)
    if cells and cells[-1].endswith("\n"):
        raise csv.Error("a quote is not closed by the end of its line")
    return cells


def _csv_line(number: int, header: list[str], cells: list[str], delimiter: str) -> Line:
    text = delimiter.join(cells)
    if len(cells) != len(header):
        return Line(number, text, reason=f"{len(cells)} fields; the header has {len(header)}")
    return Line(number, text, [dict(zip(header, cells, strict=True))])


def _check_doubled(path: str | Path, header: list[str]) -> None:
    doubled = sorted(name for name, count in Counter(header).items() if count > 1)
    if doubled:
        raise FileError(f"{path} has the column {', '.join(doubled)[:200]} more than once")


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """A table with a header, of `columns` or of every key in the order first seen."""
    out = StringIO()
    names = list(columns) or list(dict.fromkeys(key for row in rows for key in row))
    table = csv.DictWriter(out, names, restval="", lineterminator="\n", extrasaction="ignore")
    table.writeheader()
    table.writerows({key: _on_one_line(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _on_one_line(value: Any) -> Any:
    """Text without line ends, which no cell that `csv_lines` reads has."""
    return re.sub(r"\s*[\r\n]\s*", " ", value) if isinstance(value, str) else value


def replace_text(target: Path, text: str) -> None:
    """Writes under a temporary name, then renames: readers never see half a file.

    What a link points to is written, not the link, and a device or pipe is written to.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        if is_stream(target):
            with target.open("ab") as stream:
                stream.write(data)
            return
        with replacing(resolved(target)) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # of null bytes
        what = getattr(error, "strerror", None) or error
        raise FileError(f"{str(target)[:200]} cannot be written: {what}") from None


def is_stream(target: Path) -> bool:
    """Whether what is written there goes on elsewhere, such as standard output."""
    is_descriptor = str(target).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return is_descriptor or (target.exists() and not target.is_file())
