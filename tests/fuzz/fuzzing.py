"""What fuzz tests share: how many cases they try, and how many were tried.

A test is quick and the same every time where the suite runs; `make fuzz CASES=N` tries N cases of
each, new ones every time, and `make fuzz SECONDS=S` goes on with each for S seconds, with those
whose cases are quick for longer. What once failed stays beside its test as an `@example`.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

SECONDS = float(os.environ.get("FUZZ_SECONDS") or 0)
"""How long every test goes on, in passes; 0 where one pass is all."""

QUICK = 400
"""Cases a second of CPU time from which a test goes on for longer."""

LONGER = 3
"""How many times as long it goes on."""

LONG = int(os.environ.get("FUZZ_CASES") or (500 if SECONDS else 0))
"""Cases of every test in a pass of a long run; 0 where the suite runs."""

tried: Counter[str] = Counter()
"""Test -> cases that this process has tried."""

spent: dict[str, float] = {}
"""Test -> seconds of CPU time that this process took for them."""

_MOST = 4000
"""Characters of a case that are kept."""

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def case_file(worker: str) -> Path:
    """Where a worker process keeps its case while it runs, which would end with a crash."""
    return Path(tempfile.gettempdir()) / f"tilewise-fuzz-{os.getuid()}-{worker}"


@cache
def _descriptor() -> int:
    path = case_file(os.environ.get("PYTEST_XDIST_WORKER", "alone"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)


def _note(case: str) -> None:
    """What the system holds outlives the process."""
    os.pwrite(_descriptor(), case[:_MOST].ljust(_MOST).encode("utf-8", "replace")[:_MOST], 0)


def name_of(test: Callable[..., object]) -> str:
    """What a test is called where cases are counted."""
    return f"{test.__module__.rpartition('.')[2]}.{test.__name__}"


def fuzz(quick: int, **strategies: SearchStrategy[Any]) -> Callable[..., Any]:
    """Runs a test over the strategies: `quick` cases in the suite, FUZZ_CASES in a long run."""

    def decorate(test: Callable[..., None]) -> Any:
        @wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            tried[name_of(test)] += 1
            if LONG:
                _note(f"{name_of(test)}: { {name: kwargs[name] for name in strategies} }")
            test(*args, **kwargs)

        return settings(
            max_examples=LONG or quick,
            derandomize=not LONG,
            deadline=None,
            print_blob=True,
            suppress_health_check=_SLOW,
        )(given(**strategies)(counted))

    return decorate
