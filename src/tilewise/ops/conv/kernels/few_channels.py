"""Rules that CUDA kernels for few channels a group, or few channels, have in common."""

from __future__ import annotations

from typing import Protocol

from tilewise.core.arch import Arch
from tilewise.ops.conv.problem import ConvProblem

RESERVED = 1024
"""Shared memory that the system keeps for every block."""
MOST_BOX = 256
"""Of TMA's copies, in each dimension."""
MOST_COUNTED = 2**31 - 2**16
MOST_PLANES = 65535
"""Of a filter, which are blocks of a grid's third dimension."""


class Few(Protocol):
    """What the rules ask of a kernel."""

    @property
    def dtype(self) -> str: ...
    @property
    def blocks(self) -> int: ...
    @property
    def is_weight(self) -> bool: ...


def why_not_tma(arch: Arch) -> str | None:
    """Whether patches can be copied by the tensor memory accelerator."""
    if arch.kind != "gpu" or not (arch.has("tma") and arch.has("mbarrier")):
        return f"{arch.name} has no tensor memory accelerator"
    return None


def why_not_typed(k: Few, p: ConvProblem) -> str | None:
    """Layout, types, and something to multiply."""
    if p.layout != "nhwc":
        return "its layout is nhwc"
    if k.dtype != p.dtype:
        return f"its dtype is {k.dtype}, the problem's {p.dtype}"
    if p.out_dtype != k.dtype and not (k.is_weight and p.out_dtype == "fp32"):
        return f"it gives {k.dtype}, not {p.out_dtype}"
    if not (p.input_elements and p.filter_elements and p.output_elements):
        return "there is nothing to multiply"
    return None


def why_not_counted(p: ConvProblem) -> str | None:
    """Pixels and the filter have places in 31 bits, its planes in a grid's third dimension."""
    if any(n >= MOST_COUNTED for n in (p.in_pixels, p.out_pixels, p.filter_elements)):
        return "pixels and elements of the filter are counted in 31 bits"
    if p.z > MOST_PLANES:
        return f"the filter has more than {MOST_PLANES} planes"
    return None


def why_not_shared(k: Few, smem: int, arch: Arch) -> str | None:
    """Whether the blocks of a multiprocessor have room for so much each."""
    if smem > arch.smem_per_block_bytes or k.blocks * (smem + RESERVED) > arch.smem_bytes:
        return f"{k.blocks} blocks of {smem} bytes of shared memory do not fit"
    return None
