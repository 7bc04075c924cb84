"""Import: the reference's CSV, benchmark JSON and raw logs into a store.

No row is lost in silence: each becomes a measurement, or is shown with its line and the reason.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.measurement import Measurement
from tilewise.data.foreign import KERNEL_KEYS, ForeignReader, records
from tilewise.data.store import Store, write_rows
from tilewise.errors import FileError, InputError, StoreError
from tilewise.problems.json_text import JsonPart, json_objects, json_value_at, starts_list
from tilewise.problems.lines import BadLine, Line, csv_lines, read_bytes, read_text

# Where a fragment of a log may start again after a broken one.
_NEXT_FRAGMENT = re.compile(r'^[ \t]*\{|\{\s*"(?:name|kernel|kernel_name)"', re.MULTILINE)
_OPENS = re.compile(r"\{\s*[\"}]")
_MOST_CHARACTERS = 1 << 18
"""Of an object that is not the first of its log."""
_TELLING = re.compile(r'"(?:name|kernel|kernel_name|latency[^"]*|tflops[^"]*|perf_result)"')


@dataclass(slots=True, kw_only=True)
class Imported:
    """What a file gave."""

    rows: list[Measurement] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    """What was odd about rows that were kept, and how often."""
    known: int = 0
    """Rows that the store held already."""

    @property
    def statuses(self) -> dict[str, int]:
        return dict(Counter(row.status for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the reasons of bad lines are counted, the first hundred shown."""
        return {
            "rows": len(self.rows),
            "problems": len({row.problem_key for row in self.rows}),
            "kernels": len({row.kernel_key for row in self.rows}),
            "statuses": self.statuses,
            "already_stored": self.known,
            "bad": len(self.bad_lines),
            "bad_lines": [line.to_dict() for line in self.bad_lines[:100]],
            "notes": dict(self.notes),
        }


def read_measurements(path: str | Path, arch: Arch, **choices: str) -> Imported:
    """The measurements of a foreign file. `choices` are those of ForeignReader."""
    reader = ForeignReader(arch, **choices)
    found = Imported()
    text = read_text(path)
    for line in map(Line.checked, _lines(text, path)):
        if line.reason and not line.rows:
            found.bad_lines.append(line.bad(line.reason))
        for row in line.rows:
            try:
                found.rows.append(reader.measurement(row))
            except InputError as error:
                found.bad_lines.append(line.bad(str(error)))
    found.notes = reader.notes
    if not found.rows:
        nothing = "no table and no JSON object tells of one" if text.strip() else "it is empty"
        shown = "; ".join(map(str, found.bad_lines[:3])) or nothing
        raise FileError(f"{path} holds no measurement: {shown}")
    return found


def import_file(path: str | Path, store: str | Path, arch: Arch, **choices: str) -> Imported:
    """Adds the measurements of a foreign file to a store; what it holds already is left out."""
    found = read_measurements(path, arch, **choices)
    run_id = f"import-{hashlib.sha256(read_bytes(path)).hexdigest()[:12]}"
    stored = _stored(Path(store))
    new = _new_rows(found.rows, stored)
    again = sum(row.attempt > 0 for row in new)
    if again:
        found.notes["repeats of a problem and kernel, stored as further attempts"] = again
    found.known = len(found.rows) - len(new)
    found.rows = [replace(row, run_id=run_id) for row in new]
    write_rows(store, found.rows)
    return found


def _stored(path: Path) -> list[tuple[str, int, str, float | None]]:
    """Key, attempt, status and time of what a store holds; nothing where there is none yet."""
    try:
        is_there = path.exists()
    except OSError as error:
        raise StoreError(f"the store {str(path)[:200]}: {error.strerror}") from None
    if not is_there:
        return []
    table = Store(path).table(["key", "attempt", "status", "time_us"], latest=False)
    columns = (table.column(name).to_pylist() for name in table.column_names)
    return list(zip(*columns, strict=True))


def _new_rows(
    rows: Iterable[Measurement], stored: Iterable[tuple[str, int, str, float | None]]
) -> list[Measurement]:
    """Rows not yet stored; a second time for the same key becomes its next attempt.

    A verdict is not replaced by a failure that comes after it: see `Measurement.rank`.
    """
    seen: set[tuple[str, str, str]] = set()
    attempts: Counter[str] = Counter()
    for key, attempt, status, time_us in stored:
        seen.add((key, status, _digits(time_us)))
        attempts[key] = max(attempts[key], attempt + 1)
    new = []
    for row in rows:
        identity = (row.key, row.status, _digits(row.time_us))
        if identity in seen:
            continue
        seen.add(identity)
        attempt = attempts[row.key]
        attempts[row.key] += 1
        new.append(replace(row, attempt=attempt, stage="retry" if attempt else "first"))
    return new


def _digits(time_us: float | None) -> str:
    """The time to what survives a trip through text and units."""
    return "" if time_us is None else f"{time_us:.12g}"


def _lines(text: str, path: str | Path) -> Iterator[Line]:
    start = next((c for c in text if not c.isspace()), "")
    if starts_list(text):
        return _expanded(json_objects(text, text.index("[") + 1))
    if start != "{" and _is_table(text):

        def check_header(header: list[str]) -> None:
            if not {name.lower() for name in header} & set(KERNEL_KEYS):
                raise FileError(
                    f"{path} has the columns {', '.join(header)[:200]}; "
                    f"one of {', '.join(KERNEL_KEYS)} must name the kernel"
                )

        return csv_lines(path, text, check_header)
    return _expanded(_fragments(text))


def _is_table(text: str) -> bool:
    """Whether the first line that says anything is a header rather than a log's first line."""
    first = next((s for s in text.split("\n") if s.strip() and s.lstrip()[0] != "#"), "")
    return bool(re.fullmatch(r"[\w()/ .%\"-]+([,;\t|][\w()/ .%\"-]+)+", first.strip()))


def _expanded(parts: Iterable[JsonPart]) -> Iterator[Line]:
    for part in parts:
        rows = list(records(part.value)) if part.value is not None else []
        yield Line(part.line, part.text, rows, part.reason)


def _fragments(text: str) -> Iterator[JsonPart]:
    """JSON objects strewn over a log; broken ones that were measurements are reported.

    Each is decoded from a piece: a decoder that fails counts all lines before, and there are files
    of nothing but opening braces.
    """
    opened, line, counted, most = _OPENS.search(text), 1, 0, len(text)  # all may be one object
    while opened:
        at = opened.start()
        line, counted = line + text.count("\n", counted, at), at
        part, length = json_value_at(text[at : at + most], 0, line)
        most = _MOST_CHARACTERS
        if part.value is not None:
            if _TELLING.search(part.text):
                yield part
            opened = _OPENS.search(text, at + length)
            continue
        following = _NEXT_FRAGMENT.search(text, at + 1)
        end = following.start() if following else len(text)
        if _TELLING.search(text, at, end):
            yield JsonPart(line, text[at:end], None, part.reason)
        opened = _OPENS.search(text, end)
