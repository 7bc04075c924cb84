"""Launches of 1x1 convolutions: those of matrix products, told where a call's tensors lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise.core.arch import Arch
from tilewise.errors import TensorError
from tilewise.ops.conv.epilogue import FIRST, OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.gemm import GemmConvKernel, product, product_kernel
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.gemm import arguments
from tilewise.ops.gemm import launch as gemm
from tilewise.ops.launch import Launch, Pointer, Step, TensorMap

ORDERS = {
    "fwd": (FIRST, SECOND, OUT),
    "bwd_data": (FIRST, SECOND, OUT),
    "bwd_weight": (SECOND, FIRST, OUT),
}
"""Which tensors of a call are A, B and C; a bias has the same place in both."""


def launch_gemm(
    kernel: GemmConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """The product's steps; `is_aligned` says that every address is a multiple of 16 bytes."""
    order, matrix = ORDERS[problem.direction], product(problem)
    made = gemm.launch(
        *(product_kernel(kernel), matrix, arch),
        strides=_matrices(problem, strides, order, matrix.layout),
        is_aligned=is_aligned,
        epilogue=arguments.Epilogue(bias=epilogue.bias, activation=epilogue.activation),
    )
    return replace(made, steps=tuple(_of_call(step, order) for step in made.steps))


def representative(kernel: GemmConvKernel) -> ConvProblem:
    """A line of pixels that is the product's usual problem."""
    usual, direction = gemm.representative(product_kernel(kernel)), kernel.op.removeprefix("conv_")
    sizes = {
        "fwd": (usual.m, usual.k, usual.n),
        "bwd_data": (usual.m, usual.n, usual.k),
        "bwd_weight": (usual.k, usual.n, usual.m),
    }
    w, c, k = sizes[direction]
    return ConvProblem(direction=direction, n=1, c=c, k=k, w=w, x=1, dtype=kernel.dtype)


def _matrices(
    problem: ConvProblem,
    strides: tuple[Strides, Strides, Strides],
    order: tuple[int, int, int],
    layout: str,
) -> Any:
    """Strides of batch, row and column of A, B and C."""
    p, filters = problem, OUT if problem.direction == "bwd_weight" else SECOND
    outer = dict.fromkeys((FIRST, SECOND, OUT), (p.n, p.d, p.h, p.w))
    outer[filters] = (p.k, 1, 1, 1)
    channels = {
        "fwd": (p.c, p.c, p.k),
        "bwd_data": (p.k, p.c, p.c),
        "bwd_weight": (p.c, p.k, p.c),
    }[p.direction]
    pitches = [_pitch(strides[at], outer[at], channels[at]) for at in order]
    return tuple(
        (0, pitch, 1) if by == "r" else (0, 1, pitch)
        for pitch, by in zip(pitches, layout, strict=True)
    )


def _pitch(strides: Strides, outer: tuple[int, int, int, int], channels: int) -> int:
    """Elements from one pixel to the next, which must be as far apart everywhere."""
    image, channel, *spatial = strides
    if channel != 1:
        raise TensorError(f"channels lie {channel} apart; a matrix product needs them packed")
    pitch, end = channels, 0
    for size, stride in zip(reversed(outer), (*reversed(spatial), image), strict=True):
        if size == 1:
            continue
        if end and stride != end:
            raise TensorError(
                f"lines or images lie {stride} apart; a matrix product takes pixels in equal "
                f"steps, here {end}"
            )
        pitch = pitch if end else stride
        end = stride * size
    return pitch


def _of_call(step: Any, order: tuple[int, int, int]) -> Any:
    """The step with A and B at the places that they have in the convolution's call."""
    assert isinstance(step, Step)
    return replace(step, arguments=tuple(_argument(one, order) for one in step.arguments))


def _argument(one: Any, order: tuple[int, int, int]) -> Any:
    if isinstance(one, Pointer | TensorMap) and one.tensor < len(order):
        return replace(one, tensor=order[one.tensor])
    return one
