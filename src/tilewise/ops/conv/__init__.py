"""Grouped convolution: forward, and the gradients of its input and of its filter."""

from pathlib import Path

from tilewise.ops import gemm
from tilewise.ops.contract import Op
from tilewise.ops.conv.kernels import KERNEL_TYPES, why_unusable
from tilewise.ops.conv.problem import ConvProblem, padded, shapes, storage
from tilewise.ops.conv.reference import reference
from tilewise.ops.conv.reshape import reshaped

OPERANDS = {"conv_fwd": ("x", "w"), "conv_bwd_data": ("dy", "w"), "conv_bwd_weight": ("x", "dy")}

OPS = tuple(
    Op(
        name=name,
        package=__name__,
        folder=Path(__file__).parent,
        lenders={"gemm": Path(gemm.__file__).parent},
        problem=ConvProblem,
        operands=operands,
        shapes=shapes,
        unit_axis=2,
        implied={"direction": name.removeprefix("conv_")},
        storage=storage,
        padded=padded,
        reshaped=reshaped,
        kernel_types=KERNEL_TYPES,
        why_unusable=why_unusable,
        reference=reference,
    )
    for name, operands in OPERANDS.items()
)
