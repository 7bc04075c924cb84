"""The Python reference, which the site's build makes from signatures and docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
HOOKS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "hooks.py"))


def test_signatures_fit_the_page_and_keep_their_values() -> None:
    text = HOOKS["python_reference"]()
    fenced = [
        line
        for block in text.split("```text\n")[1:]
        for line in block[: block.index("```")].splitlines()
    ]
    assert [line for line in fenced if len(line) > HOOKS["WIDTH"]] == []
    assert "    device: str = ''," in fenced
    assert "**`Registry.declare(kernels=None, priority=Priority.NORMAL, **traits)`**" in text


def test_members_without_a_word_share_a_line() -> None:
    text = HOOKS["python_reference"]()
    assert "`** \n" not in text
    assert "Besides: `label`, `has(feature)`." in text
