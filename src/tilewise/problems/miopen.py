"""MIOpenDriver command lines, as its logs and people's scripts hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tilewise.errors import ProblemError

# Short flag -> long flag, as the driver's help lists them; values left out here are of no
# consequence for the shape (iterations, verification, timing, files).
_CONV_FLAGS = {
    "n": "batchsize",
    "c": "in_channels",
    "k": "out_channels",
    "g": "group_count",
    "!": "in_d",
    "H": "in_h",
    "W": "in_w",
    "@": "fil_d",
    "y": "fil_h",
    "x": "fil_w",
    "#": "conv_stride_d",
    "u": "conv_stride_h",
    "v": "conv_stride_w",
    "$": "pad_d",
    "p": "pad_h",
    "q": "pad_w",
    "^": "dilation_d",
    "l": "dilation_h",
    "j": "dilation_w",
    "_": "spatial_dim",
    "F": "forw",
    "I": "in_layout",
    "m": "mode",
    "z": "pad_mode",
}
_CONV_KEYS = {
    "batchsize": ("N", 100),
    "in_channels": ("C", 3),
    "out_channels": ("K", 32),
    "group_count": ("G", 1),
    "in_d": ("Di", 32),
    "in_h": ("Hi", 32),
    "in_w": ("Wi", 32),
    "fil_d": ("Z", 3),
    "fil_h": ("Y", 3),
    "fil_w": ("X", 3),
    **{f"conv_stride_{dim}": (f"stride_{dim}", 1) for dim in "dhw"},
    **{f"pad_{dim}": (f"pad_{dim}", 0) for dim in "dhw"},
    **{f"dilation_{dim}": (f"dilation_{dim}", 1) for dim in "dhw"},
}
"""Long flag -> file key and what the driver assumes when the flag is absent."""

_GEMM_FLAGS = {
    "b": "batch_count",
    "m": "a_h",
    "k": "a_w",
    "n": "b_w",
    "u": "transA",
    "v": "transB",
    "C": "isColMajor",
}
_GEMM_KEYS = {
    "a_h": ("M", 256),
    "b_w": ("N", 256),
    "a_w": ("K", 256),
    "batch_count": ("batch", 1),
}
_DIRECTIONS = {1: "conv_fwd", 2: "conv_bwd_data", 4: "conv_bwd_weight"}
_COMMAND = re.compile(r"(?:MIOpenDriver(?:\.exe)?[\"']?\s+|^\s*)((?:conv|gemm)\w*)\s+(-.*)")
_DTYPES = {"": "fp32", "fp16": "fp16", "bfp16": "bf16", "int8": "int8", "fp8": "fp8", "bfp8": "bf8"}


def looks_like_commands(text: str) -> bool:
    """Whether any of the first lines is a driver command."""
    return any(_COMMAND.search(line) for line in text.split("\n", 200)[:200])


def parse_command(line: str, op: str = "") -> list[dict[str, Any]]:
    """The rows that one command stands for: one for each direction it runs.

    With `op` only that one is kept. A layout is set only where the command names one.
    """
    found = _COMMAND.search(line)
    if not found:
        raise ProblemError("it is no MIOpenDriver conv or gemm command")
    what, rest = found[1], found[2]
    base = what[:4]
    if what[4:] not in _DTYPES:
        known = ", ".join(base + suffix for suffix in _DTYPES)
        raise ProblemError(f"{what!r} is unknown; use one of {known}")
    flags = _flags(rest, _CONV_FLAGS if base == "conv" else _GEMM_FLAGS)
    row: dict[str, Any] = {"dtype": _DTYPES[what[4:]]}
    if base == "gemm":
        rows = [{"op": "gemm", **row, **_gemm_row(flags)}]
    else:
        row |= _conv_row(flags)
        rows = [{"op": each, **row} for each in _ops(flags)]
    kept = [each for each in rows if op in ("", each["op"])]
    if not kept:
        ran = ", ".join(each["op"] for each in rows)
        raise ProblemError(f"it runs {ran}; {op} was asked for")
    return kept


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


def _number(flags: Mapping[str, str], name: str, default: int) -> int:
    text = flags.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ProblemError(f"--{name} is {text!r}; it must be an integer") from None


def _ops(flags: Mapping[str, str]) -> list[str]:
    mask = _number(flags, "forw", 0)
    if not 0 <= mask <= 7:
        raise ProblemError(f"-F is {mask}; it is 0 for all, else 1 fwd + 2 bwd + 4 wrw")
    return [op for bit, op in _DIRECTIONS.items() if mask == 0 or mask & bit]


def _conv_row(flags: Mapping[str, str]) -> dict[str, Any]:
    if flags.get("mode", "conv") != "conv":
        raise ProblemError(f"-m {flags['mode']} is not supported; only plain convolutions are")
    is_3d = _number(flags, "spatial_dim", 2) == 3
    row: dict[str, Any] = {
        key: _number(flags, name, default)
        for name, (key, default) in _CONV_KEYS.items()
        if is_3d or key not in ("Di", "Z", "stride_d", "pad_d", "dilation_d")
    }
    if "in_layout" in flags:
        row["layout"] = flags["in_layout"]
    if flags.get("pad_mode", "default") not in ("default", "0"):
        row |= _padding(flags["pad_mode"], row, "dhw" if is_3d else "hw")
    return row


def _padding(mode: str, row: Mapping[str, Any], dims: str) -> dict[str, int]:
    """What the padding modes come to: `same` keeps ceil(size / stride) outputs."""
    if mode not in ("same", "valid"):
        raise ProblemError(f"-z is {mode!r}; use default, same or valid")
    if mode == "valid":
        return {f"pad_{dim}": 0 for dim in dims}
    pads = {}
    for dim, size_key, taps_key in (("d", "Di", "Z"), ("h", "Hi", "Y"), ("w", "Wi", "X")):
        if dim in dims:
            size, taps, stride = row[size_key], row[taps_key], max(1, row[f"stride_{dim}"])
            outputs = -(-size // stride)
            pads[f"pad_{dim}"] = pad = max(0, (outputs - 1) * stride + taps - size + 1) // 2
            if (size + 2 * pad - taps) // stride + 1 != outputs:
                raise ProblemError(f"-z same needs unequal padding along {dim}; set the pads")
    return pads


def _gemm_row(flags: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        key: _number(flags, name, default) for name, (key, default) in _GEMM_KEYS.items()
    }
    if _number(flags, "isColMajor", 0):
        raise ProblemError("column-major results (-C 1) are not supported; swap A and B")
    a = "c" if _number(flags, "transA", 0) else "r"
    b = "c" if _number(flags, "transB", 0) else "r"
    return {**row, "layout": f"{a}{b}r"}
