"""C = A B: matrix products, optionally in a batch."""

from pathlib import Path

from tilewise.ops.contract import Op
from tilewise.ops.gemm.kernels import KERNEL_TYPES, why_unusable
from tilewise.ops.gemm.problem import GemmProblem, padded, shapes, storage
from tilewise.ops.gemm.reference import reference

OPS = (
    Op(
        name="gemm",
        package=__name__,
        folder=Path(__file__).parent,
        problem=GemmProblem,
        operands=("a", "b"),
        shapes=shapes,
        unit_axis=0,
        storage=storage,
        padded=padded,
        kernel_types=KERNEL_TYPES,
        why_unusable=why_unusable,
        reference=reference,
    ),
)
