"""What readers of MIOpenDriver's commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.errors import ProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCommand:
    """How one of the driver's commands is read."""

    flags: Mapping[str, str]
    """Short flag -> long flag."""
    rows: Callable[[Mapping[str, str]], list[dict[str, Any]]]
    """Long flags with their values -> rows of problems, each with its op."""


def number(flags: Mapping[str, str], name: str, default: int) -> int:
    """The value of a flag as an integer."""
    text = flags.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ProblemError(f"--{name} is {text!r}; it must be an integer") from None
