"""The vendor's own routine as a kernel, so that it competes and serves as the yardstick."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.errors import KernelError

LIBRARIES = ("torch", "numpy")
TACTIC = (
    *("algorithm", "tile_m", "tile_n", "split", "reduction", "cluster_m", "cluster_n"),
    *("variant", "stages", "waves", "workspace"),
)
"""What a vendor's library can say about how it would serve a problem."""
Tactic = Mapping[str, float]
"""What it says it would do, by the names of `TACTIC`; empty where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorKernel(Kernel):
    """PyTorch's routine (cuBLAS, cuDNN, oneDNN, MKL) or NumPy's (OpenBLAS) for an op."""

    engine: ClassVar[str] = "vendor"

    op_name: str = field(metadata={"choices": ()})
    library: str = trait("", LIBRARIES)

    def __post_init__(self) -> None:
        self.check_choices()

    @property
    def op(self) -> str:
        return self.op_name

    @classmethod
    def from_name(cls, name: str) -> Self:
        found = re.fullmatch(r"(\w+)_vendor_([a-z]+)", name)
        if not found:
            raise KernelError(f"{name!r} is not the name of a vendor kernel: OP_vendor_LIBRARY")
        return cls(op_name=found[1], library=found[2])

    @property
    def tile(self) -> tuple[int, int, int]:
        return (1, 1, 1)


def why_unusable(kernel: VendorKernel, problem: Problem | None, arch: Arch) -> str | None:
    """NumPy knows no GPU and few dtypes; PyTorch serves what it can cast."""
    if kernel.library == "numpy":
        if arch.kind != "cpu":
            return f"NumPy does not run on {arch.name}"
        if problem is not None and problem.dtype not in ("fp32", "tf32", "fp16", "int8"):
            return f"NumPy has no {problem.dtype}"
    return None
