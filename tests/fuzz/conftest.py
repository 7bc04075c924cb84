"""Tells after a run how many cases were tried, over all worker processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import SECONDS, tried
from hypothesis import is_hypothesis_test

_elsewhere: Counter[str] = Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process hands its counts over."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tried"] = dict(tried)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _elsewhere.update(getattr(node, "workeroutput", {}).get("tried", {}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A long run passes over each test again until its seconds are over."""
    end = time.monotonic() + SECONDS
    yield
    while time.monotonic() < end and is_hypothesis_test(getattr(item, "obj", None)):
        item.runtest()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = tried + _elsewhere
    if counts:
        shown = "".join(f"\n  {count:>9,}  {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"fuzzing tried {counts.total():,} cases{shown}")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small sound files of every kind; not to be written to."""
    from material import write_material

    folder = tmp_path_factory.mktemp("material")
    write_material(folder)
    return folder
