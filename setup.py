"""What package indexes show of the README, from where its own links lead nowhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def shown(readme: str, source: str | None) -> str:
    """The README with links into the repository at `source`; without one, of links their text."""

    def whole(link: re.Match[str]) -> str:
        is_picture, text, path = link.groups()
        if source is None:
            return "" if is_picture else text
        return f"{is_picture}[{text}]({source}/{'raw' if is_picture else 'blob'}/main/{path})"

    return LINK.sub(whole, readme)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    setup(
        long_description=shown(
            (HERE / "README.md").read_text(), project.get("urls", {}).get("Source")
        ),
        long_description_content_type="text/markdown",
    )
