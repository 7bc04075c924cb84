"""What is done to a convolution's result besides, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.ops.arguments import check_activation

FIRST, SECOND, OUT, BIAS, RESIDUAL, SUMS = range(6)
"""Positions of the tensors of a call: operands, result, then what an epilogue reads or writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """activation(sum + bias + residual), and sums of what is stored."""

    bias: bool = False
    """A vector over the result's channels, of the result's type."""
    activation: str = "none"
    residual: bool = False
    """A tensor like the result, added before the activation."""
    sums: bool = False
    """A second result of [2, channels] in fp32: sums and sums of squares over all pixels."""

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of what a call takes besides operands and result, in the order given."""
        asked = ((BIAS, self.bias), (RESIDUAL, self.residual), (SUMS, self.sums))
        return tuple(position for position, is_there in asked if is_there)

    @property
    def is_plain(self) -> bool:
        return not self.tensors and self.activation == "none"
