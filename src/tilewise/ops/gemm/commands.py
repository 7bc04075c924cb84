"""GEMM commands of MIOpenDriver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.errors import ProblemError
from tilewise.ops.commands import DriverCommand, number

_FLAGS = {
    "b": "batch_count",
    "m": "a_h",
    "k": "a_w",
    "n": "b_w",
    "u": "transA",
    "v": "transB",
    "C": "isColMajor",
}
_KEYS = {
    "a_h": ("M", 256),
    "b_w": ("N", 256),
    "a_w": ("K", 256),
    "batch_count": ("batch", 1),
}


def _rows(flags: Mapping[str, str]) -> list[dict[str, Any]]:
    row: dict[str, Any] = {
        key: number(flags, name, default) for name, (key, default) in _KEYS.items()
    }
    if number(flags, "isColMajor", 0):
        raise ProblemError("column-major results (-C 1) are not supported; swap A and B")
    a = "c" if number(flags, "transA", 0) else "r"
    b = "c" if number(flags, "transB", 0) else "r"
    return [{"op": "gemm", **row, "layout": f"{a}{b}r"}]


COMMANDS = {"gemm": DriverCommand(flags=_FLAGS, rows=_rows)}
