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
WIDTH, ROW, LEFT = 800, 26, 290
STYLE = (
    ".t{font:14px system-ui,sans-serif;fill:#1c2330}.e{text-anchor:end}"
    ".h{font:600 15px system-ui,sans-serif;fill:#1c2330}.a{fill:#1769aa}.b{fill:#9db4c8}"
    ".g{fill:#fff}@media(prefers-color-scheme:dark){.g{fill:#16191f}.t,.h{fill:#e6eaf2}.a{fill:#6cb6ff}.b{fill:#8a9bac}}"
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
    """By how much what is selected on the H200 is faster than the vendor, in percent."""
    header, selected, *_ = table("GEMM on an H200 against cuBLAS", "")
    cells = zip(header[1:], selected[1:], strict=True)
    bars = [(f"bf16 GEMM, {name}", cell) for name, cell in cells]
    header, *rows = table("Convolution on an H200 against cuDNN", "selected")
    every = next(row for row in rows if row[0] == "all")
    cells = zip(header[1:], every[1:], strict=True)
    bars += [(f"convolution, {name}", cell) for name, cell in cells]
    return [(name, 100 * (number(cell) - 1), "a") for name, cell in bars]


def losses() -> list[Bar]:
    """What choices for unseen problems lose, beside the reference's recipe on the same data."""
    (_, *of_gemm), (_, *of_convs) = (
        table("What the H200's GEMM model chooses", "dtype"),
        table("Convolution on an H200 against cuDNN", "op"),
    )
    served = next(row for row in of_gemm if row[0].startswith("all, as a dispatcher"))
    _, reference, ours, *_ = table("The reference's recipe on the same data", "")
    return [
        ("GEMM", 100 - number(served[2]), "a"),
        *((f"convolution, {row[0]}", 100 - number(row[2]), "a") for row in of_convs),
        ("GEMM, our kernels alone", 100 - number(ours[-1]), "a"),
        ("the same by CK Tile's recipe", 100 - number(reference[-1]), "b"),
    ]


def panel(title: str, bars: Sequence[Bar], top: int) -> str:
    """Horizontal bars from zero, in percent."""
    scale = (WIDTH - LEFT - 80) / max(value for _, value, _ in bars)
    parts = [f'<text class="h" x="8" y="{top}">{escape(title)}</text>']
    for at, (label, value, style) in enumerate(bars):
        y, width = top + 12 + at * ROW, value * scale
        parts += [
            f'<text class="t e" x="{LEFT - 10}" y="{y + 15}">{escape(label)}</text>',
            f'<rect class="{style}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 8}"/>',
            f'<text class="t" x="{LEFT + width + 6:.1f}" y="{y + 15}">{value:.3g} %</text>',
        ]
    return "\n".join(parts)


def picture() -> str:
    """The whole drawing."""
    panels = (
        ("Mean speed gained over cuBLAS and cuDNN by what is selected, on an H200", speed()),
        ("Mean speed lost against the fastest kernel there is, on problems never seen", losses()),
    )
    body, top = [], 24
    for title, bars in panels:
        body.append(panel(title, bars, top))
        top += 44 + len(bars) * ROW
    # A ground of its own: a page need not be as dark as the reader's system.
    ground = f'<rect class="g" width="{WIDTH}" height="{top - 22}" rx="6"/>\n'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - 22}" role="img">\n'
        f"<style>{STYLE}</style>\n{ground}" + "\n".join(body) + "\n</svg>\n"
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
