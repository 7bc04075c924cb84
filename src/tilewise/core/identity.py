"""Disk keys: sha256 over canonical JSON with a schema number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SCHEMA = 1


def canonical_json(value: Any) -> str:
    """Sorted, compact, ASCII JSON: equal values give equal text on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Mapping[str, Any]) -> str:
    """The sha256 of a value's canonical JSON, hexadecimal."""
    return hashlib.sha256(canonical_json({"schema": SCHEMA, **value}).encode()).hexdigest()
