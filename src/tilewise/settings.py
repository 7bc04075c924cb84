"""Every environment variable that tilewise reads, typed, in one place."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Read once, on first use; `settings.cache_clear()` reads again."""

    cache_dir: Path
    """TILEWISE_CACHE_DIR: compiled kernels and remembered choices (default ~/.cache/tilewise)."""
    model_dir: Path | None
    """TILEWISE_MODEL_DIR: where models are looked for before the shipped ones."""
    plan: Path | None
    """TILEWISE_PLAN: a plan file that `tune` wrote, whose measured choices come first."""
    compiler: str
    """TILEWISE_CXX: the C++ compiler; by default the first of g++, clang++, c++ on the PATH."""
    ops: tuple[str, ...]
    """TILEWISE_OPS: packages with ops of their own, by names that Python can import, by commas."""
    strict: bool
    """TILEWISE_STRICT: 1 leaves out kernels that let an Inf or NaN spread to other channels."""
    threads: int
    """TILEWISE_THREADS: CPU threads a kernel may use; by default the cores this process may use."""


@cache
def settings() -> Settings:
    """The settings in force."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache_dir = os.environ.get("TILEWISE_CACHE_DIR") or f"{home}/tilewise"
    models = os.environ.get("TILEWISE_MODEL_DIR")
    plan = os.environ.get("TILEWISE_PLAN")
    ops = os.environ.get("TILEWISE_OPS", "")
    threads = os.environ.get("TILEWISE_THREADS", "")
    if threads and not (re.fullmatch("[0-9]{1,4}", threads) and 0 < int(threads) < 4097):
        raise InputError(f"TILEWISE_THREADS is {threads!r}; it must be an integer from 1 to 4096")
    strict = os.environ.get("TILEWISE_STRICT", "")
    if strict not in ("", "0", "1"):
        raise InputError(f"TILEWISE_STRICT is {strict!r}; it must be 0 or 1")
    return Settings(
        cache_dir=_path("TILEWISE_CACHE_DIR", cache_dir),
        model_dir=_path("TILEWISE_MODEL_DIR", models) if models else None,
        plan=_path("TILEWISE_PLAN", plan) if plan else None,
        compiler=os.environ.get("TILEWISE_CXX", ""),
        ops=tuple(name.strip() for name in ops.split(",") if name.strip()),
        strict=strict == "1",
        threads=int(threads) if threads else len(os.sched_getaffinity(0)),
    )


def _path(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()  # wherever the program goes
    except RuntimeError:  # of a user who is not there, or who has no home
        raise InputError(
            f"{name} is {text!r}, whose ~ cannot be resolved; give the folder's full path"
        ) from None
