"""Every test run compiles into a cache of its own kind, kept between runs."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

# Set before tilewise reads its settings; shared by parallel test workers on purpose.
_CACHE = Path(tempfile.gettempdir()) / f"tilewise-tests-{os.getuid()}"
os.environ.setdefault("TILEWISE_CACHE_DIR", str(_CACHE))

# The GPU tests need no hypothesis and run on machines that lack it.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # No test asserts a time, not even one to draw in, and examples are the same on every machine.
    settings.register_profile(
        "tilewise",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tilewise")


@pytest.fixture(autouse=True)
def _as_if_alone() -> None:
    """Which tests ran before in this process decides neither what is drawn nor what is told."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
    if notices := sys.modules.get("tilewise.notices"):
        notices._told.clear()
