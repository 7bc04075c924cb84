"""Element types: sizes, what products are accumulated in, and how far rounding may carry."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from tilewise.errors import ProblemError, nearest


@dataclass(frozen=True, slots=True)
class DType:
    """One element type as stored in memory."""

    name: str
    bytes: int
    unit_roundoff: float
    """Half the distance between 1.0 and the next value; 0 for integers, which are exact."""
    accumulator: str
    result: str
    """What a product of this type is stored as unless the problem says otherwise."""


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("fp64", 8, 2.0**-53, "fp64", "fp64"),
        DType("fp32", 4, 2.0**-24, "fp32", "fp32"),
        # Stored as fp32; products round their operands to 10 mantissa bits.
        DType("tf32", 4, 2.0**-11, "fp32", "fp32"),
        DType("fp16", 2, 2.0**-11, "fp32", "fp16"),
        DType("bf16", 2, 2.0**-8, "fp32", "bf16"),
        DType("fp8", 1, 2.0**-4, "fp32", "bf16"),
        DType("bf8", 1, 2.0**-3, "fp32", "bf16"),
        DType("int8", 1, 0.0, "int32", "int32"),
        DType("int32", 4, 0.0, "int32", "int32"),
    )
}

OPERAND_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "bf8", "int8")
"""What the inputs of a GEMM or convolution may be.

fp8 is e4m3fn and bf8 is e5m2, except on GPUs with `fp8_fnuz`, whose own encodings they are there.
"""


def dtype(name: str) -> DType:
    """The element type called `name`."""
    try:
        return DTYPES[name]
    except KeyError:
        known = f"use one of {', '.join(DTYPES)}{nearest(str(name), DTYPES)}"
        raise ProblemError(f"dtype {name!r} is unknown; {known}") from None


def tolerance(operand: str, result: str, reduction: int) -> float:
    """The largest ‖out − ref‖ / ‖ref‖ that rounding alone can explain.

    Products of operands are exact in the accumulator, whose error grows as the square root of the
    reduction length for random data; the result is rounded once more. The factor 8 is the margin
    between a typical and a never-seen error. Whoever checks looks at the worst element too: in a
    large result one wrong row is within what 16-bit rounding allows of the whole.
    """
    store = dtype(result).unit_roundoff
    accumulate = dtype(dtype(operand).accumulator).unit_roundoff
    rounding = dtype(operand).unit_roundoff if operand == "tf32" else 0.0
    return 8 * (accumulate * max(1.0, sqrt(reduction)) + store + rounding)
