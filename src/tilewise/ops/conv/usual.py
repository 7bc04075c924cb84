"""The layer that a kernel is compiled ahead of time for."""

from __future__ import annotations

from typing import Any

from tilewise.core.kernel import Kernel
from tilewise.ops.conv.problem import ConvProblem

LAYER = {"n": 32, "h": 56, "w": 56, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
FIRST_LAYER = {"c": 3, "k": 64, "h": 224, "w": 224, "stride_h": 2, "stride_w": 2}
"""What a network's first layer has of its own."""


def usual_layer(kernel: Kernel, **sizes: int) -> ConvProblem:
    """A 3x3 layer over 32 images, in the kernel's direction and type, with sizes of its own."""
    given: dict[str, Any] = {**LAYER, **sizes}
    direction: Any = kernel.op.removeprefix("conv_")
    return ConvProblem(direction=direction, dtype=kernel.dtype, **given)  # type: ignore[attr-defined]  # all have one
