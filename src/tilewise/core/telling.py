"""How long work reports its progress, to any front."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str], None]
"""Takes a few words on what is under way."""


def silent(_: str) -> None:
    """Tells nobody."""
