"""How long work tells what it is at, whoever listens."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str], None]
"""Takes a few words on what is under way."""


def silent(_: str) -> None:
    """Tells nobody."""
