"""What kernels of convolutions have in common: a direction; those in CUDA C++, rules they keep."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tilewise.core.kernel import Kernel
from tilewise.errors import KernelError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaConvKernel(DirectedConvKernel):
    """A kernel in CUDA C++, whose traits keep rules between them."""

    engine: ClassVar[str] = "cuda"

    def __post_init__(self) -> None:
        self.check_choices()
        for rule, is_broken in self.rules().items():
            if is_broken:
                raise KernelError(f"{self.name}: {rule}")

    @abstractmethod
    def rules(self) -> dict[str, Any]:
        """Rules between the traits -> whether this kernel breaks them."""

    @property
    def is_deterministic(self) -> bool:
        """Not where slices of a sum are added by atomics."""
        return not getattr(self, "atomic", False)
