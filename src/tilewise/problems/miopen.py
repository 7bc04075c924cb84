"""MIOpenDriver command lines, as its logs and people's scripts hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from tilewise.errors import ProblemError
from tilewise.ops.commands import DriverCommand
from tilewise.ops.contract import all_ops

_DTYPES = {"": "fp32", "fp16": "fp16", "bfp16": "bf16", "int8": "int8", "fp8": "fp8", "bfp8": "bf8"}


def looks_like_commands(text: str) -> bool:
    """Whether any of the first lines is a driver command."""
    return any(_pattern().search(line) for line in text.split("\n", 200)[:200])


def parse_command(line: str, op: str = "") -> list[dict[str, Any]]:
    """The rows that one command stands for: one for each direction it runs.

    With `op` only that one is kept. A layout is set only where the command names one.
    """
    found = _pattern().search(line)
    if not found:
        raise ProblemError(f"it is no MIOpenDriver {' or '.join(_commands())} command")
    base, suffix, rest = found.groups()
    if suffix not in _DTYPES:
        known = ", ".join(base + each for each in _DTYPES)
        raise ProblemError(f"{base + suffix!r} is unknown; use one of {known}")
    command = _commands()[base]
    dtype = {"dtype": _DTYPES[suffix]}
    rows = [{**dtype, **row} for row in command.rows(_flags(rest, command.flags))]
    kept = [each for each in rows if op in ("", each["op"])]
    if not kept:
        ran = ", ".join(each["op"] for each in rows)
        raise ProblemError(f"it runs {ran}; {op} was asked for")
    return kept


@cache
def _commands() -> dict[str, DriverCommand]:
    found = {name: c for op in all_ops().values() for name, c in op.problems.commands.items()}
    return dict(sorted(found.items()))


@cache
def _pattern() -> re.Pattern[str]:
    """A command, what its name says of the type, and its flags."""
    names = "|".join(map(re.escape, sorted(_commands(), reverse=True)))
    return re.compile(rf"(?:MIOpenDriver(?:\.exe)?[\"']?\s+|^\s*)({names})(\w*)\s+(-.*)")


def _flags(text: str, short: Mapping[str, str]) -> dict[str, str]:
    """Long flag -> value. Every flag of the driver takes one value."""
    tokens = text.split()
    flags: dict[str, str] = {}
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
        elif token.startswith("-") and len(token) > 1:
            name, equals, value = short.get(token[1], token[1]), token[2:], token[2:]
        else:
            raise ProblemError(f"{token!r} stands where a flag is expected")
        if not equals:
            at += 1
            if at >= len(tokens):
                raise ProblemError(f"flag {token} has no value")
            value = tokens[at]
        flags[name] = value
        at += 1
    return flags
