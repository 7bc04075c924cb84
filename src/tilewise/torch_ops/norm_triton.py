# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RET505
"""BatchNorm with what follows it, in Triton: forward and backward, a reduction and one pass each.

Tensors are channels-last and packed: `total` elements in rows of `width`, which holds the channels
`FOLD` times over, so that tiles of BC columns have no idle lanes whatever the number of channels.
A reduction is cut into `slices`, each of which leaves two rows of `width` sums in `work`.

`stats` has four rows of fp32, one entry a channel: mean, 1 / deviation, scale and shift. A result
is ACT(z * scale + shift + residual).
"""

import triton
import triton.language as tl

from tilewise.ops.triton_pieces import activate


@triton.jit
def tile_at(program, width, channels, BC: tl.constexpr):
    """Number of a tile of rows, its columns, and their channels."""
    columns = width // BC
    tile = program // columns
    at = (program - tile * columns) * BC + tl.arange(0, BC)
    return tile, at, at % channels


@triton.jit
def places(tile, at, width, total, BR: tl.constexpr):
    """Offsets of a tile's elements, and which of them there are."""
    rows = (tile * BR + tl.arange(0, BR)).to(tl.int64)
    offsets = rows[:, None] * width + at[None, :]
    return offsets, offsets < total


@triton.jit
def slope(pre, ACT: tl.constexpr):
    """The activation's derivative; of relu the result serves as well as what was activated."""
    if ACT == "relu":
        return tl.where(pre > 0.0, 1.0, 0.0)
    elif ACT == "silu":
        gate = 1.0 / (1.0 + tl.exp(-pre))
        return gate * (1.0 + pre * (1.0 - gate))
    elif ACT == "gelu":
        bell = tl.exp(pre * pre * -0.5) * 0.3989422804014327
        return 0.5 * (1.0 + tl.erf(pre * 0.7071067811865476)) + pre * bell
    else:
        return tl.full(pre.shape, 1.0, tl.float32)


@triton.jit
def activated_gradient(dy, z, y, scale, shift, offsets, is_there, ACT: tl.constexpr):
    """The gradient of what was activated, and z."""
    own = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offsets, mask=is_there, other=0.0).to(tl.float32)
    if ACT != "none":
        if y is None:
            gradient *= slope(own * scale[None, :] + shift[None, :], ACT)
        else:
            gradient *= slope(tl.load(y + offsets, mask=is_there, other=0.0).to(tl.float32), ACT)
    return gradient, own


@triton.jit
def keep_sums(first, second, work, at, width):
    place = work + tl.program_id(1).to(tl.int64) * 2 * width + at
    tl.store(place, tl.sum(first, 0))
    tl.store(place + width, tl.sum(second, 0))


@triton.jit
def add_up(work, channel, channels, slices, FOLD: tl.constexpr, BR: tl.constexpr):
    """Both sums of channels over all slices and all places in a row."""
    is_there = channel[None, :] < channels
    first = tl.zeros([BR, channel.shape[0]], tl.float32)
    second = tl.zeros([BR, channel.shape[0]], tl.float32)
    width = channels * FOLD
    for row in range(0, slices * FOLD, BR):
        rows = row + tl.arange(0, BR)
        offsets = (rows // FOLD * 2 * width + rows % FOLD * channels)[:, None] + channel[None, :]
        mask = is_there & (rows[:, None] < slices * FOLD)
        first += tl.load(work + offsets, mask=mask, other=0.0)
        second += tl.load(work + offsets + width, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def forward_sums(
    z, work, total, channels, width, tiles, slices, BR: tl.constexpr, BC: tl.constexpr
):
    """Sums and sums of squares of each column."""
    _, at, _ = tile_at(tl.program_id(0), width, channels, BC)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for tile in range(tl.program_id(1), tiles, slices):
        offsets, is_there = places(tile, at, width, total, BR)
        value = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32)
        first += value
        second += value * value
    keep_sums(first, second, work, at, width)


@triton.jit
def finish_forward(
    work,
    stats,
    gamma,
    beta,
    running_mean,
    running_var,
    tracked,
    channels,
    slices,
    count,
    unbiased,
    eps,
    momentum,
    FOLD: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Statistics of the batch from its sums; running ones take their share of them."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    is_there = channel < channels
    first, second = add_up(work, channel, channels, slices, FOLD, BR)
    mean = first / count
    var = tl.maximum(second / count - mean * mean, 0.0)
    inverse = 1.0 / tl.sqrt(var + eps)
    scale = inverse
    if gamma is not None:
        scale *= tl.load(gamma + channel, mask=is_there, other=0.0).to(tl.float32)
    shift = -mean * scale
    if beta is not None:
        shift += tl.load(beta + channel, mask=is_there, other=0.0).to(tl.float32)
    tl.store(stats + channel, mean, mask=is_there)
    tl.store(stats + channels + channel, inverse, mask=is_there)
    tl.store(stats + 2 * channels + channel, scale, mask=is_there)
    tl.store(stats + 3 * channels + channel, shift, mask=is_there)
    if running_mean is not None:
        old = tl.load(running_mean + channel, mask=is_there, other=0.0).to(tl.float32)
        tl.store(running_mean + channel, old + momentum * (mean - old), mask=is_there)
        old = tl.load(running_var + channel, mask=is_there, other=0.0).to(tl.float32)
        tl.store(running_var + channel, old + momentum * (var * unbiased - old), mask=is_there)
    if tracked is not None:
        is_first = tl.program_id(0) == 0
        tl.store(tracked, tl.load(tracked) + 1, mask=is_first)


@triton.jit
def apply_forward(
    z,
    stats,
    residual,
    y,
    total,
    channels,
    width,
    ACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    tile, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    scale = tl.load(stats + 2 * channels + channel)
    shift = tl.load(stats + 3 * channels + channel)
    offsets, is_there = places(tile, at, width, total, BR)
    value = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32)
    value = value * scale[None, :] + shift[None, :]
    if residual is not None:
        value += tl.load(residual + offsets, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y + offsets, activate(value, ACT).to(y.dtype.element_ty), mask=is_there)


@triton.jit
def backward_sums(
    dy,
    z,
    y,
    stats,
    work,
    total,
    channels,
    width,
    tiles,
    slices,
    ACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums of each column's gradients, and of these times the normalised value."""
    _, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    mean = tl.load(stats + channel)
    inverse = tl.load(stats + channels + channel)
    scale = tl.load(stats + 2 * channels + channel)
    shift = tl.load(stats + 3 * channels + channel)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for tile in range(tl.program_id(1), tiles, slices):
        offsets, is_there = places(tile, at, width, total, BR)
        gradient, own = activated_gradient(dy, z, y, scale, shift, offsets, is_there, ACT)
        first += gradient
        second += gradient * (own - mean[None, :]) * inverse[None, :]
    keep_sums(first, second, work, at, width)


@triton.jit
def finish_backward(
    work,
    stats,
    factors,
    dgamma,
    dbeta,
    channels,
    slices,
    count,
    FOLD: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradients of gamma and beta; `factors` such that dz = gradient * scale + z * f[0] + f[1]."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    is_there = channel < channels
    first, second = add_up(work, channel, channels, slices, FOLD, BR)
    if dgamma is not None:
        tl.store(dgamma + channel, second.to(dgamma.dtype.element_ty), mask=is_there)
    if dbeta is not None:
        tl.store(dbeta + channel, first.to(dbeta.dtype.element_ty), mask=is_there)
    mean = tl.load(stats + channel, mask=is_there, other=0.0)
    inverse = tl.load(stats + channels + channel, mask=is_there, other=0.0)
    scale = tl.load(stats + 2 * channels + channel, mask=is_there, other=0.0)
    factor = -scale * inverse * second / count
    tl.store(factors + channel, factor, mask=is_there)
    tl.store(factors + channels + channel, -scale * first / count - factor * mean, mask=is_there)


@triton.jit
def apply_backward(
    dy,
    z,
    y,
    stats,
    factors,
    dz,
    dresidual,
    total,
    channels,
    width,
    ACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    tile, at, channel = tile_at(tl.program_id(0), width, channels, BC)
    scale = tl.load(stats + 2 * channels + channel)
    shift = tl.load(stats + 3 * channels + channel)
    by_z = tl.load(factors + channel)
    fixed = tl.load(factors + channels + channel)
    offsets, is_there = places(tile, at, width, total, BR)
    gradient, own = activated_gradient(dy, z, y, scale, shift, offsets, is_there, ACT)
    if dresidual is not None:
        tl.store(dresidual + offsets, gradient.to(dresidual.dtype.element_ty), mask=is_there)
    value = gradient * scale[None, :] + own * by_z[None, :] + fixed[None, :]
    tl.store(dz + offsets, value.to(dz.dtype.element_ty), mask=is_there)
