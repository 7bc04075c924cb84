# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RET505
"""Pieces of Triton kernels that ops share: the order of tiles, and activations."""

import triton
import triton.language as tl


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Batch, row and column of a tile; GROUP_M rows are walked together for the sake of L2."""
    per_batch = tiles_m * tiles_n
    batch = tile // per_batch
    tile = tile - batch * per_batch
    width = GROUP_M * tiles_n
    group = tile // width
    first = group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    inside = tile - group * width
    return batch, first + inside % rows, inside // rows


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(x < 0.0, 0.0, x)  # NaN stays
    elif ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x
