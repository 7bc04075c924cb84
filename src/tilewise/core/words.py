"""`KEY=VALUE` words, as problems and policies are spelled."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.errors import InputError


def pairs_of(words: Iterable[str], example: str) -> dict[str, str]:
    """Key -> value, both without space around them; each key may be given once."""
    found: dict[str, str] = {}
    for word in words:
        key, _, value = (part.strip() for part in word.partition("="))
        if not key or not value:
            raise InputError(f"{word!r} is not KEY=VALUE; write for example {example}")
        if key in found:
            raise InputError(f"{key} is given twice; give it once")
        found[key] = value
    return found
