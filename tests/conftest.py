"""Every test run compiles into a cache of its own kind, kept between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings

# Set before tilewise reads its settings; shared by parallel test workers on purpose.
_CACHE = Path(tempfile.gettempdir()) / f"tilewise-tests-{os.getuid()}"
os.environ.setdefault("TILEWISE_CACHE_DIR", str(_CACHE))

# No test asserts a time, and examples are the same on every machine.
settings.register_profile("tilewise", deadline=None, derandomize=True)
settings.load_profile("tilewise")
