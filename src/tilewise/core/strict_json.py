"""JSON from outside: doubled keys and bottomless nesting are a ValueError, like all else.

Of two values under one key Python keeps the last in silence, and another reader the first. What is
written for others holds null where Python would write `Infinity` or `NaN`, which are no JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from math import isfinite
from typing import Any


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        doubled = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {doubled[:60]!r} appears twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def loads(data: str | bytes) -> Any:
    """The value that a text holds."""
    text = data if isinstance(data, str) else data.decode()
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The value that starts at `at`, and where it ends."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(value: Any) -> Any:
    """The value with null in place of numbers that JSON does not hold."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
