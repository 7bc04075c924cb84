"""A third op in one folder, to prove that nothing outside an op's folder knows it.

`y[m] = x[m, 0] + ... + x[m, n - 1]`: one operand, a result of one dimension, no layouts.
"""

from pathlib import Path

from tilewise.ops.contract import Op
from toy_op.kernels import KERNEL_TYPES, why_unusable
from toy_op.problem import RowSumProblem, shapes, storage
from toy_op.reference import reference

OPS = (
    Op(
        name="row_sum",
        package=__name__,
        folder=Path(__file__).parent,
        problem=RowSumProblem,
        operands=("x",),
        shapes=shapes,
        unit_axis=0,
        storage=storage,
        kernel_types=KERNEL_TYPES,
        why_unusable=why_unusable,
        reference=reference,
    ),
)
