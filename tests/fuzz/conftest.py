"""Tells after a run how many cases were tried, over all worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fuzzing import LONG, LONGER, QUICK, SECONDS, case_file, name_of, spent, tried
from hypothesis import is_hypothesis_test

_elsewhere: list[dict[str, tuple[int, float]]] = []
"""What worker processes counted: test -> its cases and seconds."""


_ended: list[str] = []
"""The cases at which worker processes crashed."""


def _counted() -> dict[str, tuple[int, float]]:
    return {name: (count, spent.get(name, 0.0)) for name, count in tried.items()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process hands its counts over."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tried"] = _counted()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    _elsewhere.append(getattr(node, "workeroutput", {}).get("tried", {}))
    file = case_file(node.gateway.id)
    if error and LONG and file.exists():
        _ended.append(file.read_text(errors="replace").strip())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A long run passes over each test again until its seconds are over."""
    if not is_hypothesis_test(test := getattr(item, "obj", None)):
        return (yield)
    name, start, before = name_of(test), time.monotonic(), time.process_time()
    try:
        yield
        while (since := time.monotonic() - start) < SECONDS * LONGER:
            if since > SECONDS and tried[name] < QUICK * (time.process_time() - before):
                break
            item.runtest()
    finally:
        spent[name] = time.process_time() - before


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a test, and their sum last, where a long run's reader looks first."""
    for case in _ended:
        terminalreporter.write_line(f"a process ended at {case}", red=True)
    lines = [line for counts in (_counted(), *_elsewhere) for line in sorted(counts.items())]
    for name, (count, seconds) in lines:
        each = f"{count / max(seconds, 1e-3):,.0f} a second of CPU time"
        terminalreporter.write_line(f"{count:>11,}  {name}, {each}")
    if lines:
        total = sum(count for _, (count, _) in lines)
        terminalreporter.write_line(f"{total:>11,}  cases were tried by fuzzing")


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """What a power cut would leave is not asked here, where stores spent half their time on it."""
    with mock.patch("os.fsync"), mock.patch("os.fdatasync"):
        yield


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small sound files of every kind; not to be written to."""
    from material import write_material

    folder = tmp_path_factory.mktemp("material")
    write_material(folder)
    return folder
