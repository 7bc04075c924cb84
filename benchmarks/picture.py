"""Draws the README's picture from the published results: docs/assets/results.svg.

    python benchmarks/picture.py [--check]

`--check` exits with 1 where the picture in the tree is not the one that the results give.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks/RESULTS.md", ROOT / "docs/assets/results.svg"
WIDTH, ROW, LEFT = 760, 26, 250
STYLE = (
    ".t{font:14px system-ui,sans-serif;fill:#1c2330}.e{text-anchor:end}"
    ".h{font:600 15px system-ui,sans-serif;fill:#1c2330}.a{fill:#1769aa}.b{fill:#9db4c8}"
    "@media(prefers-color-scheme:dark){.t,.h{fill:#e6eaf2}.a{fill:#6cb6ff}.b{fill:#8a9bac}}"
)
Bar = tuple[str, float, str]
"""Label, value, style."""


def table(section: str, first: str) -> list[list[str]]:
    """The rows of the first table of a section whose header begins with `first`."""
    text = RESULTS.read_text().split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    start = next(at for at, row in enumerate(rows) if row[0] == first)
    return [rows[start], *rows[start + 2 :]]


def number(cell: str) -> float:
    found = re.match(r"[\d.]+", cell)
    assert found is not None, cell
    return float(found[0])


def speed() -> list[Bar]:
    """By how much what is selected on the H200 is faster than cuBLAS, by class of product."""
    header, selected, *_ = table("GEMM on an H200 against cuBLAS", "")
    cells = zip(header[1:], selected[1:], strict=True)
    return [(name, 100 * (number(cell) - 1), "a") for name, cell in cells]


def convolutions() -> list[Bar]:
    """By how much what is selected on the H200 is faster than cuDNN, by direction."""
    header, *rows = table("Convolution on an H200 against cuDNN", "selected")
    every = next(row for row in rows if row[0] == "all")
    cells = zip(header[1:], every[1:], strict=True)
    return [(name, 100 * (number(cell) - 1), "a") for name, cell in cells]


def losses() -> list[Bar]:
    """What choices lose on unseen problems, beside the reference's recipe on the same data."""
    header, *rows = table("What the H200's GEMM model chooses", "dtype")
    mean = header.index("mean")
    ours = [(f"{row[0]}, tilewise", 100 - number(row[mean]), "a") for row in rows[:3]]
    _, reference, *_ = table("The reference's recipe on the same data", "")
    theirs = ("all, by CK Tile's recipe", 100 - number(reference[-1]), "b")
    return [*ours, theirs]


def panel(title: str, bars: Sequence[Bar], top: int) -> str:
    """Horizontal bars from zero, in percent."""
    scale = (WIDTH - LEFT - 80) / max(value for _, value, _ in bars)
    parts = [f'<text class="h" x="8" y="{top}">{escape(title)}</text>']
    for at, (label, value, style) in enumerate(bars):
        y, width = top + 12 + at * ROW, value * scale
        parts += [
            f'<text class="t e" x="{LEFT - 10}" y="{y + 15}">{escape(label)}</text>',
            f'<rect class="{style}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 8}"/>',
            f'<text class="t" x="{LEFT + width + 6:.1f}" y="{y + 15}">{value:.1f} %</text>',
        ]
    return "\n".join(parts)


def picture() -> str:
    """The whole drawing."""
    panels = (
        ("Faster than cuBLAS: bf16 GEMM on an H200, as selected (mean)", speed()),
        ("Faster than cuDNN: convolutions on an H200, as selected (mean)", convolutions()),
        ("Slower than the fastest kernel: GEMM that the model never saw (mean)", losses()),
    )
    body, top = [], 24
    for title, bars in panels:
        body.append(panel(title, bars, top))
        top += 44 + len(bars) * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - 22}" role="img">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def main() -> int:
    made = picture()
    if "--check" in sys.argv[1:]:
        return 0 if PICTURE.is_file() and PICTURE.read_text() == made else 1
    PICTURE.write_text(made)
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
