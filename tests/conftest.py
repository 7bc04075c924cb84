"""Every test run compiles into a cache of its own kind, kept between runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

# Set before tilewise reads its settings; shared by parallel test workers on purpose.
_CACHE = Path(tempfile.gettempdir()) / f"tilewise-tests-{os.getuid()}"
os.environ.setdefault("TILEWISE_CACHE_DIR", str(_CACHE))

# The GPU tests need no hypothesis and run on machines that lack it.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # No test asserts a time, and examples are the same on every machine.
    settings.register_profile("tilewise", deadline=None, derandomize=True)
    settings.load_profile("tilewise")
