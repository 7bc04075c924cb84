"""An analytic estimate of a kernel's time, which ranks until a model has been trained.

Tiles are dealt to compute units in waves; a wave takes as long as its slowest part: arithmetic at
the rate the tile shape can sustain, or bytes at the rate of the nearest cache that holds them.
"""

from __future__ import annotations

from math import prod

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem


def estimate_us(kernel: Kernel, problem: Problem, arch: Arch) -> float:
    """Predicted time in microseconds. Comparable between kernels of one problem, not exact."""
    if problem.is_empty:
        return arch.launch_us
    tile: tuple[int, int, int] = kernel.tile  # type: ignore[attr-defined]  # part of every kernel
    efficiency: float = getattr(kernel, "efficiency", 1.0)
    split: int = getattr(kernel, "split_k", 1)
    view = problem.gemm
    sizes = (view.m, view.n, view.k)
    blocks = [-(-size // max(1, t)) for size, t in zip(sizes, tile, strict=True)]
    padded = [b * max(1, t) for b, t in zip(blocks, tile, strict=True)]

    units = arch.compute_units
    tiles = view.groups * blocks[0] * blocks[1] * max(1, split)
    waves = -(-tiles // units)
    work = 2.0 * view.groups * prod(padded)
    per_tile = work / tiles
    peak = arch.peak_tflops.get(problem.dtype, arch.peak_tflops["fp32"]) * 1e6
    compute_us = waves * units * per_tile / (peak * efficiency)

    # Each tile reads its strips of both operands; what the last-level cache holds is read once.
    width = dtype(problem.dtype).bytes
    strips = tiles * (tile[0] + tile[1]) * (padded[2] / max(1, split)) * width
    last_level = arch.l3_bytes or arch.l2_bytes
    reread = max(0.0, strips - problem.bytes) if problem.bytes > last_level else 0.0
    memory_us = (problem.bytes + 0.25 * reread) / (arch.memory_gb_s * 1e3)
    reduce_us = (split - 1) * view.groups * view.m * view.n * 8 / (arch.memory_gb_s * 1e3)
    return arch.launch_us + max(compute_us, memory_us) + 0.3 * min(compute_us, memory_us) + reduce_us
