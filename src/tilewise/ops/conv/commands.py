"""Convolution commands of MIOpenDriver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.errors import ProblemError
from tilewise.ops.commands import DriverCommand, number

# Short flag -> long flag, as the driver's help lists them; values left out here are of no
# consequence for the shape (iterations, verification, timing, files).
_FLAGS = {
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
_KEYS = {
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
_DIRECTIONS = {1: "conv_fwd", 2: "conv_bwd_data", 4: "conv_bwd_weight"}


def _rows(flags: Mapping[str, str]) -> list[dict[str, Any]]:
    """One for each direction that the command runs; a layout only where it names one."""
    row = _conv_row(flags)
    return [{"op": op, **row} for op in _ops(flags)]


def _ops(flags: Mapping[str, str]) -> list[str]:
    mask = number(flags, "forw", 0)
    if not 0 <= mask <= 7:
        raise ProblemError(f"-F is {mask}; it is 0 for all, else 1 fwd + 2 bwd + 4 wrw")
    return [op for bit, op in _DIRECTIONS.items() if mask == 0 or mask & bit]


def _conv_row(flags: Mapping[str, str]) -> dict[str, Any]:
    if flags.get("mode", "conv") != "conv":
        raise ProblemError(f"-m {flags['mode']} is not supported; only plain convolutions are")
    is_3d = number(flags, "spatial_dim", 2) == 3
    row: dict[str, Any] = {
        key: number(flags, name, default)
        for name, (key, default) in _KEYS.items()
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


COMMANDS = {"conv": DriverCommand(flags=_FLAGS, rows=_rows)}
