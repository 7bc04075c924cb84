"""Launches of dense CUDA kernels for groups whose channels are no multiple of a step's."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.ragged import RaggedConvKernel
from tilewise.ops.conv.launch_dense import launch_dense
from tilewise.ops.conv.launch_halo import launch_halo
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.usual import usual_layer
from tilewise.ops.launch import Launch


def launch_ragged(
    kernel: RaggedConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """The steps of the dense kernel, whose maps follow from the problem's groups."""
    launch = launch_halo if kernel.loader == "halo" else launch_dense
    return launch(kernel.dense, problem, arch, strides, is_aligned, epilogue)


def representative(kernel: RaggedConvKernel) -> ConvProblem:
    """A 3x3 layer whose groups end within a matrix instruction, or between two."""
    is_volume = kernel.loader == "halo" and kernel.spreads_nonfinite
    within = kernel.spreads_nonfinite or kernel.loader == "halo"
    count = 8 * (56 if within else 48)
    depth = {"d": 8, "z": 3, "pad_d": 1} if is_volume else {}
    return usual_layer(kernel, c=count, k=count, g=8, h=28, w=28, **depth)
