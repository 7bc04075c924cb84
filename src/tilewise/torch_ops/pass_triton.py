# SPDX-License-Identifier: MIT
"""Passes over results in Triton: what stands between layers, forward and backward.

Where channels have something of their own, tensors are packed with channels innermost and lie as
in `norm_triton`: rows of `width`, which holds the channels FOLD times over. `part` elements are a
sample's, which has `tiles` tiles below each other, so that a tile has one factor. A backward pass
leaves a row of `width` sums for each of its `slices` in `work`.
"""

import triton
import triton.language as tl

from tilewise.ops.triton_pieces import activate, place
from tilewise.torch_ops.norm_triton import slope, tile_at


@triton.jit
def places_of(tile, tiles, at, width, part, BR: tl.constexpr):
    """Sample of a tile, offsets of its elements, and which of them there are."""
    sample = tile // tiles
    rows = ((tile - sample * tiles) * BR + tl.arange(0, BR)).to(tl.int64)
    inside = rows[:, None] * width + at[None, :]
    return sample, sample.to(tl.int64) * part + inside, inside < part


@triton.jit
def weigh_forward(
    z, weight, factors, residual, y, part, channels, width, tiles,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = z * weight * factor + residual: a weight of each channel, a factor of each sample."""
    tile, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    sample, offsets, is_there = places_of(tile, tiles, at, width, part, BR)
    scale = tl.load(weight + channel).to(tl.float32)
    if factors is not None:
        scale *= tl.load(factors + sample).to(tl.float32)
    value = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32) * scale[None, :]
    value += tl.load(residual + offsets, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y + offsets, value.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def weigh_backward(
    dy, z, weight, factors, dz, work, part, channels, width, tiles, all_tiles, slices,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dz, and sums for the weight's gradient where `work` is given."""
    _, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    scale = tl.load(weight + channel).to(tl.float32)
    total = tl.zeros([BR, BC], tl.float32)
    for tile in range(tl.program_id(1), all_tiles, slices):
        sample, offsets, is_there = places_of(tile, tiles, at, width, part, BR)
        gradient = tl.load(dy + offsets, mask=is_there, other=0.0).to(tl.float32)
        if factors is not None:
            gradient *= tl.load(factors + sample).to(tl.float32)
        if work is not None:
            total += gradient * tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32)
        value = gradient * scale[None, :]
        tl.store(dz + offsets, value.to(dz.dtype.element_ty), mask=is_there)
    if work is not None:
        tl.store(work + tl.program_id(1).to(tl.int64) * width + at, tl.sum(total, 0))


@triton.jit
def bias_forward(
    z, bias, y, part, channels, width, tiles,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = ACT(z + bias)."""
    tile, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    _, offsets, is_there = places_of(tile, tiles, at, width, part, BR)
    shift = tl.load(bias + channel).to(tl.float32)
    value = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32) + shift[None, :]
    tl.store(y + offsets, activate(value, ACT).to(y.dtype.element_ty), mask=is_there)


@triton.jit
def bias_backward(
    dy, z, bias, dz, work, part, channels, width, tiles, all_tiles, slices,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dz, and its sums for the bias's gradient."""
    _, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    shift = tl.load(bias + channel).to(tl.float32)
    total = tl.zeros([BR, BC], tl.float32)
    for tile in range(tl.program_id(1), all_tiles, slices):
        _, offsets, is_there = places_of(tile, tiles, at, width, part, BR)
        pre = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32) + shift[None, :]
        gradient = tl.load(dy + offsets, mask=is_there, other=0.0).to(tl.float32) * slope(pre, ACT)
        tl.store(dz + offsets, gradient.to(dz.dtype.element_ty), mask=is_there)
        total += gradient
    tl.store(work + tl.program_id(1).to(tl.int64) * width + at, tl.sum(total, 0))


@triton.jit
def add_rows(work, out, channels, rows, BR: tl.constexpr, BC: tl.constexpr):
    """A vector over the channels: the sum of so many rows, each as long as it."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros([BR, BC], tl.float32)
    for first in range(0, rows, BR):
        row = first + tl.arange(0, BR)
        mask = (row < rows)[:, None] & (channel < channels)[None, :]
        offsets = row.to(tl.int64)[:, None] * channels + channel[None, :]
        total += tl.load(work + offsets, mask=mask, other=0.0)
    tl.store(out + channel, tl.sum(total, 0).to(out.dtype.element_ty), mask=channel < channels)


@triton.jit
def rows_of(width, total, BR: tl.constexpr, BC: tl.constexpr):
    """Rows and columns of a tile, and which elements of a packed result there are."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    return row, column, (column < width) & (row * width + column < total)


@triton.jit
def gate_forward(
    g, u, y, g_row, u_row, width, total, ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """y = ACT(g) * u; rows of g and u may be apart."""
    row, column, is_there = rows_of(width, total, BR, BC)
    gate = tl.load(g + row * g_row + column, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(u + row * u_row + column, mask=is_there, other=0.0).to(tl.float32)
    value = activate(gate, ACT) * other
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def gate_backward(
    dy, g, u, dg, du, g_row, u_row, width, total,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Both gradients, packed."""
    row, column, is_there = rows_of(width, total, BR, BC)
    at = row * width + column
    gradient = tl.load(dy + at, mask=is_there, other=0.0).to(tl.float32)
    gate = tl.load(g + row * g_row + column, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(u + row * u_row + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(dg + at, (gradient * other * slope(gate, ACT)).to(dg.dtype.element_ty), mask=is_there)
    tl.store(du + at, (gradient * activate(gate, ACT)).to(du.dtype.element_ty), mask=is_there)


@triton.jit
def gate_products(
    x, gate, up, y, M, N, K, tiles_m, tiles_n,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = ACT(x gateᵀ) * (x upᵀ), all packed row by row: one tile of both products at a time.

    Rows past the end are clamped, and what is read too much is never stored.
    """
    _, row, col = place(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    m = row * BM + tl.arange(0, BM)
    n = col * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + (tl.minimum(m, M - 1).to(tl.int64) * K)[:, None] + k[None, :]
    inside = (tl.minimum(n, N - 1).to(tl.int64) * K)[None, :] + k[:, None]
    gated = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        if EVEN_K:
            a = tl.load(x_at)
            one = tl.load(gate + inside)
            two = tl.load(up + inside)
        else:
            left = K - step * BK
            a = tl.load(x_at, mask=(k < left)[None, :], other=0.0)
            one = tl.load(gate + inside, mask=(k < left)[:, None], other=0.0)
            two = tl.load(up + inside, mask=(k < left)[:, None], other=0.0)
        gated = tl.dot(a, one, gated, input_precision=PRECISION)
        other = tl.dot(a, two, other, input_precision=PRECISION)
        x_at += BK
        inside += BK
    value = activate(gated, ACT) * other
    at = (m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
