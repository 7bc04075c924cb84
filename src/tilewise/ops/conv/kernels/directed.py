"""What every kernel of convolutions has: the direction it computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.core.kernel import Kernel

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectedConvKernel(Kernel):
    """A kernel of one direction; kinds that do not know all of them narrow the choices."""

    op_name: str = field(metadata={"choices": OPS})

    @property
    def op(self) -> str:
        return self.op_name

    @property
    def is_weight(self) -> bool:
        """Whether it computes the gradient of the filter."""
        return self.op_name == "conv_bwd_weight"
