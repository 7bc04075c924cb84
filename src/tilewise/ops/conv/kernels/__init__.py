"""Every kind of convolution kernel, and the one function that says whether a kernel can serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops import vendor
from tilewise.ops.conv.kernels import (
    channelwise,
    ck,
    cktile,
    cpu,
    dense,
    depthwise,
    gemm,
    grouped,
    image,
    padded,
    ragged,
    stem,
    triton,
)

_RULES: dict[type[Kernel], Callable[[Any, Any, Arch], str | None]] = {
    **dict.fromkeys(cpu.CPU_KERNEL_TYPES, cpu.why_unusable),
    triton.TritonConvKernel: triton.why_unusable,
    gemm.GemmConvKernel: gemm.why_unusable,
    cktile.CkTileConvKernel: cktile.why_unusable,
    ck.CkDeviceKernel: ck.why_unusable,
    ck.CkDepthwiseKernel: ck.why_unusable,
    dense.DenseConvKernel: dense.why_unusable,
    channelwise.ChannelwiseConvKernel: channelwise.why_unusable,
    depthwise.DepthwiseConvKernel: depthwise.why_unusable,
    grouped.GroupedConvKernel: grouped.why_unusable,
    padded.PaddedConvKernel: padded.why_unusable,
    ragged.RaggedConvKernel: ragged.why_unusable,
    stem.StemConvKernel: stem.why_unusable,
    image.ImageConvKernel: image.why_unusable,
    vendor.VendorKernel: vendor.why_unusable,
}

KERNEL_TYPES: tuple[type[Kernel], ...] = tuple(_RULES)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None.

    Without a problem: whether the kernel could serve any problem there.
    """
    if problem is not None and kernel.op != problem.op:
        return f"it computes {kernel.op}, not {problem.op}"
    return _RULES[type(kernel)](kernel, problem, arch)
