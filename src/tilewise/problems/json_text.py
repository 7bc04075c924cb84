"""JSON objects found in text one by one, so that a broken one costs only itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewise.core.strict_json import loads, value_at

_BLANK = re.compile(r"[\s,]*")
_LIST_START = re.compile(r"\s*\[\s*([{\]]|$)")
_LIST_IN_OBJECT = re.compile(r'"(problems|rows|layers|results|benchmarks)"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class JsonPart:
    """One object of a text, or the reason why what stands there is none."""

    line: int
    text: str
    value: dict[str, Any] | None = None
    reason: str = ""


def starts_list(text: str) -> bool:
    """Whether the text is a list of objects, rather than a log whose lines start with `[...]`."""
    return _LIST_START.match(text) is not None


def json_objects(text: str, at: int = 0, *, closed_by: str = "]") -> Iterator[JsonPart]:
    """The objects of a list whose first element starts at or after `at`.

    With `closed_by` empty the objects just follow each other until the text ends.
    """
    line, counted = 1 + text.count("\n", 0, at), at
    while True:
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, at), at
        if at >= len(text):
            if closed_by:
                yield JsonPart(line, "", None, "the list is not closed; the file may be cut off")
            return
        if closed_by and text[at] == closed_by:
            return
        part, at = json_value_at(text, at, line)
        yield part


def json_value_at(text: str, at: int, line: int) -> tuple[JsonPart, int]:
    """The object at `at`, or what is wrong there; and where the text goes on."""
    try:
        value, end = value_at(text, at)
    except ValueError as error:
        # Behind the next closing brace the next object may well be sound.
        stop = text.find("}", max(at, getattr(error, "pos", at)))
        end = len(text) if stop < 0 else stop + 1
        return JsonPart(line, text[at:end], None, f"not JSON: {_message(error)}"), end
    if not isinstance(value, dict):
        return JsonPart(line, text[at:end], None, f"{_kind(value)}, not an object"), end
    return JsonPart(line, text[at:end], value), end


def json_lines(text: str) -> Iterator[JsonPart]:
    """One object a line; a single object spread over lines, or holding a list, is read too."""
    inner = _LIST_IN_OBJECT.search(text)
    first = text.lstrip().split("\n", 1)[0]
    if inner and (not _is_object(first) or inner.start() < len(first)):
        yield from json_objects(text, inner.end())
    elif not _is_object(first) and not any(map(_is_object, text.split("\n")[:100])):
        yield from json_objects(text, closed_by="")
    else:
        for number, line in enumerate(text.split("\n"), 1):
            stripped = line.strip()
            if stripped and not stripped.startswith(("#", "//")):
                yield _one_line(stripped, number)


def _one_line(text: str, number: int) -> JsonPart:
    try:
        value = loads(text)
    except ValueError as error:
        return JsonPart(number, text, None, f"not JSON: {_message(error)}")
    if not isinstance(value, dict):
        return JsonPart(number, text, None, f"{_kind(value)}, not an object")
    return JsonPart(number, text, value)


def _is_object(text: str) -> bool:
    return _one_line(text.strip(), 0).value is not None


def _message(error: Exception) -> str:
    """The decoder's complaint without its own line count, which starts at the object."""
    return str(getattr(error, "msg", error))


def _kind(value: object) -> str:
    return {list: "a list", str: "text", bool: "a flag"}.get(type(value), "a number")
