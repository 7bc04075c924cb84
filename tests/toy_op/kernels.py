"""Two types of CPU kernels, told apart by family, and the vendor's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.errors import KernelError
from tilewise.ops import vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSumKernel(Kernel):
    """What both have in common."""

    engine: ClassVar[str] = "cpu"

    isa: str = trait("", ("avx2", "avx512"))

    def __post_init__(self) -> None:
        self.check_choices()

    @classmethod
    def only_op(cls) -> str:
        return "row_sum"

    @property
    def tile(self) -> tuple[int, int, int]:
        return (1, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainKernel(RowSumKernel):
    """One number after the other."""

    family: str = trait("", ("plain",))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialKernel(RowSumKernel):
    """Several sums at once, added up at the end."""

    family: str = trait("", ("partial",))
    sums: int = trait("s", (4, 8, 16), doc="sums at once")

    def __post_init__(self) -> None:
        self.check_choices()
        if self.sums < 2:
            raise KernelError(f"sums is {self.sums}; it must be at least 2")

    @property
    def tile(self) -> tuple[int, int, int]:
        return (1, 1, self.sums)


KERNEL_TYPES: tuple[type[Kernel], ...] = (PlainKernel, PartialKernel, vendor.VendorKernel)


def why_unusable(kernel: Any, problem: Problem | None, arch: Arch) -> str | None:
    if isinstance(kernel, vendor.VendorKernel):
        return vendor.why_unusable(kernel, problem, arch)
    if not arch.has(kernel.isa):
        return f"{arch.name} has no {kernel.isa}"
    if isinstance(kernel, PartialKernel) and problem is not None:
        columns = problem.gemm.k
        if columns < kernel.sums:
            return f"{columns} columns are fewer than {kernel.sums} sums"
    return None
