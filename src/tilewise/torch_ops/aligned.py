"""Tables that a print of a value shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of columns; the last one is as long as it is."""
    cells = [head, *rows]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head) - 1)]
    padded = (
        [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        for row in cells
    )
    return "\n".join("  ".join(row) for row in padded)
