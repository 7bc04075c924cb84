"""Every test run compiles into a cache of its own kind, kept between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Set before tilewise reads its settings; shared by parallel test workers on purpose.
_CACHE = Path(tempfile.gettempdir()) / f"tilewise-tests-{os.getuid()}"
os.environ.setdefault("TILEWISE_CACHE_DIR", str(_CACHE))
