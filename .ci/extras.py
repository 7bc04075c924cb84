#!/usr/bin/env python3
"""Resolves every extra of pyproject.toml against plain PyPI, and says what each would install.

    .ci/extras.py                every extra
    .ci/extras.py demo learn     those two
    .ci/extras.py --if-reachable every extra; done with a word where PyPI cannot be asked

Nothing is installed. pip's own configuration is left aside (`--isolated`), so that what holds here
holds for a stranger. Exits 1 where an extra does not resolve, or brings what it promises not to.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LIGHT = ("demo", "learn")
"""Extras that a laptop installs: none of what follows may come along."""

HEAVY = ("torch", "triton", "ray", "ruff", "mypy", "pytest", "scikit-learn", "polars")


def main(words: list[str]) -> int:
    names = [word for word in words if word != "--if-reachable"]
    if len(names) < len(words) and not _is_reachable():
        print("PyPI cannot be reached from here: the extras are not checked")
        return 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if unknown := [name for name in names if name not in extras]:
        print(f"no extra called {', '.join(unknown)}; there are: {', '.join(sorted(extras))}")
        return 2
    failed = 0
    for name in names or sorted(extras):
        requirements = project["dependencies"] + extras[name]
        failed += not _report(name, requirements)
    return 1 if failed else 0


def _report(name: str, requirements: list[str]) -> bool:
    """Prints one line on the extra `name`; whether it resolves to what it promises."""
    answer = _resolve(requirements)
    if isinstance(answer, str):
        print(f"{name}: does not resolve\n{answer}")
        return False
    unwanted = [p for p in answer if p in HEAVY or p.startswith("nvidia-")]
    if name in LIGHT and unwanted:
        print(f"{name}: is meant to be light and brings {', '.join(unwanted)}")
        return False
    shown = [f"{p} {answer[p]}" for p in ("torch", "triton", "lightgbm", "ray") if p in answer]
    print(f"{name}: {len(answer)} packages{': ' if shown else ''}{', '.join(shown)}", flush=True)
    return True


def _is_reachable() -> bool:
    """Whether a package that is surely there can be found."""
    return not isinstance(_resolve(["numpy"]), str)


def _resolve(requirements: list[str]) -> dict[str, str] | str:
    """The versions by name that pip would install, or what it says against it."""
    words = ["install", "--isolated", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    words += ["--quiet", "--disable-pip-version-check", "--report", "-", *requirements]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return done.stderr.strip() or f"pip ended with {done.returncode}"
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
