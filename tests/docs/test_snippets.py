"""Every command and snippet in the README and the documentation runs.

Fenced blocks of `python` share a namespace within their page, those of `bash` are run line by line,
in order, in a folder of their own. A block of `text` right below one of `python` is what that
prints. A comment before a block that cannot run here says why, as in
`<!-- skip: needs a GPU -->`; blocks of other languages are shown, not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "text", "json", "yaml", "c", "console"}
FENCE = re.compile(
    r"(?:^<!-- skip: ([^\n]+) -->\n)?^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
OUTPUT = re.compile(r"\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNER = "import sys; exec(compile(sys.stdin.read(), 'snippet', 'exec'))"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    why_skipped: str
    printed: str
    """What stands below the block as its output, if anything does."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            language=found[2],
            text=found[3],
            line=text[: found.start()].count("\n") + 1,
            why_skipped=found[1] or "",
            printed=below[1] if (below := OUTPUT.match(text, found.end())) else "",
        )
        for found in FENCE.finditer(text)
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_code(page: Path) -> bool:
    return any(block.language in ("python", "bash") for block in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{name(page)}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    made = {"results.md", "reference/python.md", "reference/commands.md"}
    made_here = {(ROOT / "docs" / path).resolve() for path in made}
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            place = (page.parent / target).resolve()
            assert place.exists() or place in made_here, f"{name(page)}: {target}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language in ("python", "bash") for b in blocks(p))], ids=name
)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    for given in ("datasets", "benchmarks"):
        (tmp_path / given).symlink_to(ROOT / given)
    tools = tmp_path / ".bin"
    tools.mkdir()
    command = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tilewise "$@"\n'
    (tools / "tilewise").write_text(command)
    (tools / "tilewise").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(tilewise.__file__).parent.parent),
    }
    told: list[str] = []
    for block in blocks(page):
        if block.why_skipped:
            continue
        if block.language == "python":
            # Earlier blocks ran before; they run again, quietly, for the names they define.
            told.append(block.text)
            run = [sys.executable, "-c", RUNNER]
            given_text = "\n".join(told)
        elif block.language == "bash":
            run = ["bash", "-euo", "pipefail"]
            given_text = block.text
        else:
            continue
        ended = subprocess.run(
            run, input=given_text, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{name(page)}:{block.line}\n{ended.stdout}\n{ended.stderr}"
        if block.language == "python":
            assert ended.stdout.endswith(block.printed), (
                f"{name(page)}:{block.line}\n{ended.stdout}"
            )
