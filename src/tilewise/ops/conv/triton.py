# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RET505
"""Convolutions in Triton: implicit products through pointers, for any shape, stride and GPU.

Forward and backward-data are one kernel: pixels of a *result* gather pixels of a *source*. Along a
dimension a tap `t` of result pixel `j` reads the source at `j * step + base + t * reach`. Forward
that is one class of pixels with `step` the stride, `base` minus the padding and `reach` the
dilation. Backward, pixels fall into as many classes as the stride is long (`residue`); within one
every tap that counts falls on a pixel, so no product is with an inserted zero.

Strides are in elements, offsets of pixels in 64 bits. NDIM leaves out dimensions of size one. MODE
says how the reduction over taps and channels is walked: `taps` one tap at a time, `packed` over
both in one row, for few channels, `merged` over the channels of several groups side by side, whose
foreign products are zeroed in the filter. A tile has `lanes_in` channels of the source and
`lanes_out` of the result: those of a group, or of all that are merged.

A reduction that is CUT leaves fp32 sums in `work`, a slice each, or added up in one (ATOMIC).
"""

import triton
import triton.language as tl

from tilewise.ops.triton_pieces import activate, place


@triton.jit
def portion(steps, slices, part):
    """First step and number of steps of one of `slices` parts."""
    each = steps // slices
    more = steps - each * slices
    return part * each + tl.minimum(part, more), each + (part < more).to(tl.int32)


@triton.jit
def pixel_at(pixel, size_d, size_h, size_w, NDIM: tl.constexpr):
    """Image and position (d, h, w) of pixels counted through all images."""
    w = pixel % size_w
    rest = pixel // size_w
    if NDIM == 1:
        return rest, w * 0, w * 0, w
    h = rest % size_h
    rest = rest // size_h
    if NDIM == 2:
        return rest, w * 0, h, w
    return rest // size_d, rest % size_d, h, w


@triton.jit
def tap_at(tap, count_h, count_w, NDIM: tl.constexpr):
    """Position (d, h, w) of a tap of the filter."""
    if NDIM == 1:
        return tap * 0, tap * 0, tap
    w = tap % tl.maximum(count_w, 1)
    rest = tap // tl.maximum(count_w, 1)
    if NDIM == 2:
        return rest * 0, rest, w
    return rest // tl.maximum(count_h, 1), rest % tl.maximum(count_h, 1), w


@triton.jit
def along(size, taps, stride, pad, gap, common, inverse, residue, BACKWARD: tl.constexpr):
    """One dimension of a class of pixels.

    Gives its pixels, its first tap, how many taps count and how far apart they are; then `base`,
    `step` and `reach`. Backward, tap `t` reaches result pixel `i` from the source at
    `(i + pad - t * gap) / stride` where that divides. `common` is the greatest common divisor of
    stride and dilation, `inverse` that of `gap / common` modulo `stride / common`.
    """
    if BACKWARD:
        jump = stride // common
        at = residue + pad
        first = (at // common * inverse) % jump
        count = tl.maximum(0, (taps - first + jump - 1) // jump)
        count = tl.where(at % common == 0, count, 0)
        base = (at - first * gap) // stride
        return tl.cdiv(size - residue, stride), first, count, jump, base, 1, -(gap // common)
    else:
        return size, residue * 0, taps, 1, residue - pad, stride, gap


@triton.jit
def offset_of(n, d, h, w, stride_n, stride_d, stride_h, stride_w, NDIM: tl.constexpr):
    """Where pixels lie, in elements."""
    at = n.to(tl.int64) * stride_n + w.to(tl.int64) * stride_w
    if NDIM > 1:
        at += h.to(tl.int64) * stride_h
    if NDIM > 2:
        at += d.to(tl.int64) * stride_d
    return at


@triton.jit
def is_inside(d, h, w, size_d, size_h, size_w, NDIM: tl.constexpr):
    """Which positions are pixels and not padding."""
    inside = (w >= 0) & (w < size_w)
    if NDIM > 1:
        inside &= (h >= 0) & (h < size_h)
    if NDIM > 2:
        inside &= (d >= 0) & (d < size_d)
    return inside


@triton.jit
def finish_pixels(
    acc, out, bias, residual, sums, live, at, channel, is_channel, row, channels, out_c,
    ACT: tl.constexpr,
):  # fmt: skip
    """Biases, adds the residual, activates and stores a tile; `sums` gets what BatchNorm wants.

    That is, for every row of tiles, the sum and the sum of squares of each channel as stored. A
    residual lies in memory like the result.
    """
    if bias is not None:
        acc += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    mask = live[:, None] & is_channel[None, :]
    at = at[:, None] + (channel.to(tl.int64) * out_c)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    result = activate(acc, ACT).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=mask)
    if sums is not None:
        kept = tl.where(mask, result.to(tl.float32), 0.0)
        here = sums + row.to(tl.int64) * (2 * channels) + channel
        tl.store(here, tl.sum(kept, 0), mask=is_channel)
        tl.store(here + channels, tl.sum(kept * kept, 0), mask=is_channel)


@triton.jit
def leave_pixels(
    acc, work, part, live, pixel, channel, is_channel, pixels, channels, ATOMIC: tl.constexpr
):
    """Leaves a partial tile in the workspace: [slices, pixels, channels], all groups together."""
    at = work + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    mask = live[:, None] & is_channel[None, :]
    if ATOMIC:
        tl.atomic_add(at, acc, mask=mask, sem="relaxed")
    else:
        tl.store(at + part.to(tl.int64) * pixels * channels, acc, mask=mask)


@triton.jit
def conv_pixels(
    src, filt, out, bias, residual, work, sums, tiles_m, tiles_n, pieces, slices, images,
    source_channels, result_channels, lanes_in, lanes_out, groups, source_d, source_h, source_w,
    result_d, result_h, result_w, taps_d, taps_h, taps_w, stride_d, stride_h, stride_w,
    pad_d, pad_h, pad_w, gap_d, gap_h, gap_w, common_d, common_h, common_w,
    inverse_d, inverse_h, inverse_w, src_n, src_c, src_d, src_h, src_w,
    filt_tile, filt_group, filt_out, filt_in, filt_d, filt_h, filt_w,
    out_n, out_c, out_d, out_h, out_w,
    BACKWARD: tl.constexpr, MODE: tl.constexpr, NDIM: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_C: tl.constexpr, CUT: tl.constexpr, ATOMIC: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of BM pixels by BN channels of the result, or a slice of its reduction.

    The second axis of the grid is the class of pixels, backward.
    """
    part = tl.program_id(0) // pieces
    group, row, col = place(tl.program_id(0) % pieces, tiles_m, tiles_n, GROUP_M)
    kind = tl.program_id(1)
    rest_d, rest_h, rest_w = kind * 0, kind * 0, kind * 0
    if BACKWARD:
        rest_w = kind % stride_w
        rest_h = kind // stride_w % stride_h
        rest_d = kind // stride_w // stride_h
    size_d, tap_d, count_d, jump_d, base_d, step_d, reach_d = along(
        result_d, taps_d, stride_d, pad_d, gap_d, common_d, inverse_d, rest_d, BACKWARD
    )
    size_h, tap_h, count_h, jump_h, base_h, step_h, reach_h = along(
        result_h, taps_h, stride_h, pad_h, gap_h, common_h, inverse_h, rest_h, BACKWARD
    )
    size_w, tap_w, count_w, jump_w, base_w, step_w, reach_w = along(
        result_w, taps_w, stride_w, pad_w, gap_w, common_w, inverse_w, rest_w, BACKWARD
    )
    pixels = images * size_d * size_h * size_w
    m = row * BM + tl.arange(0, BM)
    live = m < pixels
    n, d, h, w = pixel_at(tl.where(live, m, 0), size_d, size_h, size_w, NDIM)
    from_d, from_h, from_w = d * step_d + base_d, h * step_h + base_h, w * step_w + base_w
    lane = col * BN + tl.arange(0, BN)
    channel = group * lanes_out + lane
    is_channel = (lane < lanes_out) & (channel < groups * result_channels)
    own = src + (group * lanes_in).to(tl.int64) * src_c
    own += offset_of(n, from_d, from_h, from_w, src_n, src_d, src_h, src_w, NDIM)[:, None]
    weights = filt + group.to(tl.int64) * filt_tile
    weights += tap_d * filt_d + tap_h * filt_h + tap_w * filt_w
    if MODE == "merged":
        group_out = lane // result_channels
        at_out = group_out * filt_group + (lane - group_out * result_channels) * filt_out
    else:
        at_out = lane * filt_out
    taps = count_d * count_h * count_w
    if MODE == "packed":
        steps = tl.cdiv(taps * source_channels, BK)
        blocks = 1
    else:
        blocks = tl.cdiv(lanes_in, BK)
        steps = taps * blocks
    first, count = portion(steps, slices, part)
    if BACKWARD:
        count = tl.where(row * BM < pixels, count, 0)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(first, first + count):
        if MODE == "packed":
            entry = step * BK + k
            tap = entry // source_channels
            c = entry - tap * source_channels
            is_lane = entry < taps * source_channels
            td, th, tw = tap_at(tap, count_h, count_w, NDIM)
            move = offset_of(tap * 0, td * reach_d, th * reach_h, tw * reach_w,
                             src_n, src_d, src_h, src_w, NDIM)  # fmt: skip
            inside = is_inside(
                from_d[:, None] + (td * reach_d)[None, :],
                from_h[:, None] + (th * reach_h)[None, :],
                from_w[:, None] + (tw * reach_w)[None, :],
                source_d, source_h, source_w, NDIM,
            )  # fmt: skip
            a = tl.load(
                own + (move + c.to(tl.int64) * src_c)[None, :],
                mask=inside & live[:, None] & is_lane[None, :],
                other=0.0,
            )
            at_in = td * jump_d * filt_d + th * jump_h * filt_h + tw * jump_w * filt_w
            b_ptrs = weights + (at_in + c * filt_in)[:, None] + at_out[None, :]
            b = tl.load(b_ptrs, mask=is_lane[:, None] & is_channel[None, :], other=0.0)
        else:
            tap = step // blocks
            c = (step - tap * blocks) * BK + k
            td, th, tw = tap_at(tap, count_h, count_w, NDIM)
            move = offset_of(tap * 0, td * reach_d, th * reach_h, tw * reach_w,
                             src_n, src_d, src_h, src_w, NDIM)  # fmt: skip
            inside = is_inside(
                from_d + td * reach_d, from_h + th * reach_h, from_w + tw * reach_w,
                source_d, source_h, source_w, NDIM,
            )  # fmt: skip
            inside &= live
            a_ptrs = own + move + (c.to(tl.int64) * src_c)[None, :]
            weight_at = td * jump_d * filt_d + th * jump_h * filt_h + tw * jump_w * filt_w
            if MODE == "merged":
                is_lane = (c < lanes_in) & (group * lanes_in + c < groups * source_channels)
                group_in = c // source_channels
                at_in = (c - group_in * source_channels) * filt_in
                mask = is_lane[:, None] & is_channel[None, :]
                mask &= group_in[:, None] == group_out[None, :]
                a = tl.load(a_ptrs, mask=inside[:, None] & is_lane[None, :], other=0.0)
                b_ptrs = weights + weight_at + at_in[:, None] + at_out[None, :]
                b = tl.load(b_ptrs, mask=mask, other=0.0)
            elif EVEN_C:
                a = tl.load(a_ptrs, mask=inside[:, None], other=0.0)
                b_ptrs = weights + weight_at + (c * filt_in)[:, None] + at_out[None, :]
                b = tl.load(b_ptrs, mask=is_channel[None, :], other=0.0)
            else:
                is_lane = c < source_channels
                a = tl.load(a_ptrs, mask=inside[:, None] & is_lane[None, :], other=0.0)
                b_ptrs = weights + weight_at + (c * filt_in)[:, None] + at_out[None, :]
                b = tl.load(b_ptrs, mask=is_lane[:, None] & is_channel[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BACKWARD:
        d, h, w = d * stride_d + rest_d, h * stride_h + rest_h, w * stride_w + rest_w
    channels = groups * result_channels
    if CUT:
        pixel = ((n * result_d + d) * result_h + h) * result_w + w
        every = images.to(tl.int64) * result_d * result_h * result_w
        leave_pixels(acc, work, part, live, pixel, channel, is_channel, every, channels, ATOMIC)
    else:
        at = offset_of(n, d, h, w, out_n, out_d, out_h, out_w, NDIM)
        finish_pixels(
            acc, out, bias, residual, sums, live, at, channel, is_channel,
            kind * tiles_m + row, channels, out_c, ACT,
        )  # fmt: skip


@triton.jit
def conv_direct(
    src, filt, out, bias, residual, work, sums, tiles_m, tiles_n, pieces, slices, images,
    source_channels, result_channels, groups, source_d, source_h, source_w,
    result_d, result_h, result_w, taps_d, taps_h, taps_w, stride_d, stride_h, stride_w,
    pad_d, pad_h, pad_w, gap_d, gap_h, gap_w, common_d, common_h, common_w,
    inverse_d, inverse_h, inverse_w, src_n, src_c, src_d, src_h, src_w,
    filt_group, filt_out, filt_in, filt_d, filt_h, filt_w, out_n, out_c, out_d, out_h, out_w,
    BACKWARD: tl.constexpr, NDIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP_M: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """BM pixels by BN channels of all groups, multiplied one by one: few channels a group.

    A foreign channel never enters a sum, so an Inf or NaN stays where it is.
    """
    _, row, col = place(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    kind = tl.program_id(1)
    rest_d, rest_h, rest_w = kind * 0, kind * 0, kind * 0
    if BACKWARD:
        rest_w = kind % stride_w
        rest_h = kind // stride_w % stride_h
        rest_d = kind // stride_w // stride_h
    size_d, tap_d, count_d, jump_d, base_d, step_d, reach_d = along(
        result_d, taps_d, stride_d, pad_d, gap_d, common_d, inverse_d, rest_d, BACKWARD
    )
    size_h, tap_h, count_h, jump_h, base_h, step_h, reach_h = along(
        result_h, taps_h, stride_h, pad_h, gap_h, common_h, inverse_h, rest_h, BACKWARD
    )
    size_w, tap_w, count_w, jump_w, base_w, step_w, reach_w = along(
        result_w, taps_w, stride_w, pad_w, gap_w, common_w, inverse_w, rest_w, BACKWARD
    )
    pixels = images * size_d * size_h * size_w
    m = row * BM + tl.arange(0, BM)
    live = m < pixels
    n, d, h, w = pixel_at(tl.where(live, m, 0), size_d, size_h, size_w, NDIM)
    from_d, from_h, from_w = d * step_d + base_d, h * step_h + base_h, w * step_w + base_w
    channels = groups * result_channels
    channel = col * BN + tl.arange(0, BN)
    is_channel = channel < channels
    group = channel // result_channels
    own = src + offset_of(n, from_d, from_h, from_w, src_n, src_d, src_h, src_w, NDIM)[:, None]
    own += ((group * source_channels).to(tl.int64) * src_c)[None, :]
    weights = filt + group * filt_group + (channel - group * result_channels) * filt_out
    weights += tap_d * filt_d + tap_h * filt_h + tap_w * filt_w
    steps = count_d * count_h * count_w * source_channels
    if BACKWARD:
        steps = tl.where(row * BM < pixels, steps, 0)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(steps):
        tap = step // source_channels
        c = step - tap * source_channels
        td, th, tw = tap_at(tap, count_h, count_w, NDIM)
        move = offset_of(tap * 0, td * reach_d, th * reach_h, tw * reach_w,
                         src_n, src_d, src_h, src_w, NDIM)  # fmt: skip
        inside = is_inside(
            from_d + td * reach_d, from_h + th * reach_h, from_w + tw * reach_w,
            source_d, source_h, source_w, NDIM,
        )  # fmt: skip
        inside &= live
        at = own + (move + c.to(tl.int64) * src_c)
        a = tl.load(at, mask=inside[:, None] & is_channel[None, :], other=0.0)
        weight_at = td * jump_d * filt_d + th * jump_h * filt_h + tw * jump_w * filt_w
        b = tl.load(weights + weight_at + c * filt_in, mask=is_channel, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
    if BACKWARD:
        d, h, w = d * stride_d + rest_d, h * stride_h + rest_h, w * stride_w + rest_w
    at = offset_of(n, d, h, w, out_n, out_d, out_h, out_w, NDIM)
    finish_pixels(
        acc, out, bias, residual, sums, live, at, channel, is_channel,
        kind * tiles_m + row, channels, out_c, ACT,
    )  # fmt: skip


@triton.jit
def add_pixels(
    out, bias, residual, work, sums, tiles_n, slices, pixels, channels,
    result_d, result_h, result_w, out_n, out_c, out_d, out_h, out_w,
    NDIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The sum of all slices of BM pixels by BN channels, in a fixed order, finished and stored."""
    row = tl.program_id(0) // tiles_n
    m = row * BM + tl.arange(0, BM)
    channel = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    live, is_channel = m < pixels, channel < channels
    at = work + m.to(tl.int64)[:, None] * channels + channel[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(slices):
        acc += tl.load(at, mask=live[:, None] & is_channel[None, :], other=0.0)
        at += pixels.to(tl.int64) * channels
    n, d, h, w = pixel_at(m, result_d, result_h, result_w, NDIM)
    to = offset_of(n, d, h, w, out_n, out_d, out_h, out_w, NDIM)
    finish_pixels(
        acc, out, bias, residual, sums, live, to, channel, is_channel,
        row, channels, out_c, ACT,
    )  # fmt: skip


@triton.jit
def add_sums(sums, work, rows, channels, BM: tl.constexpr, BN: tl.constexpr):
    """The [2, channels] sums of a result, from those of its rows of tiles."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    is_column = column < 2 * channels
    row = tl.arange(0, BM)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, rows, BM):
        at = work + (first + row).to(tl.int64)[:, None] * (2 * channels) + column[None, :]
        mask = (first + row < rows)[:, None] & is_column[None, :]
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(acc, 0), mask=is_column)


@triton.jit
def finish_filter(
    acc, out, work, part, filters, per_filter, k, tap, c, mask, taps_h, taps_w, channels,
    out_k, out_c, out_d, out_h, out_w,
    NDIM: tl.constexpr, CUT: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Stores a tile of the filter's gradient, or leaves it in `work`: [slices, k, taps, c]."""
    if CUT:
        at = work + k.to(tl.int64) * per_filter + tap * channels + c
        if ATOMIC:
            tl.atomic_add(at, acc, mask=mask, sem="relaxed")
        else:
            tl.store(at + part.to(tl.int64) * filters * per_filter, acc, mask=mask)
    else:
        d, h, w = tap_at(tap, taps_h, taps_w, NDIM)
        at = out + k.to(tl.int64) * out_k + c.to(tl.int64) * out_c
        at += offset_of(d * 0, d, h, w, 0, out_d, out_h, out_w, NDIM)
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def conv_filter(
    src, grad, out, work, tiles_m, tiles_n, pieces, slices, pixels,
    source_channels, result_channels, lanes_in, lanes_out, groups, source_d, source_h, source_w,
    result_d, result_h, result_w, taps_d, taps_h, taps_w, stride_d, stride_h, stride_w,
    pad_d, pad_h, pad_w, gap_d, gap_h, gap_w, src_n, src_c, src_d, src_h, src_w,
    grad_n, grad_c, grad_d, grad_h, grad_w, out_k, out_c, out_d, out_h, out_w,
    MODE: tl.constexpr, NDIM: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, EVEN_C: tl.constexpr,
    CUT: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM filters by BN of their (tap, channel) entries, summed over a slice of the pixels."""
    part = tl.program_id(0) // pieces
    group, row, col = place(tl.program_id(0) % pieces, tiles_m, tiles_n, GROUP_M)
    taps = taps_d * taps_h * taps_w
    k = row * BM + tl.arange(0, BM)
    e = tl.arange(0, BN)
    if MODE == "packed":
        entry = col * BN + e
        tap = entry // source_channels
        c = entry - tap * source_channels
        is_lane = entry < taps * source_channels
    else:
        blocks = tl.cdiv(lanes_in, BN)
        tap = col // blocks
        c = (col - tap * blocks) * BN + e
        is_lane = (c < lanes_in) & (group * lanes_in + c < groups * source_channels)
    td, th, tw = tap_at(tap, taps_h, taps_w, NDIM)
    is_filter = (k < lanes_out) & (group * lanes_out + k < groups * result_channels)
    over_d, over_h, over_w = td * gap_d - pad_d, th * gap_h - pad_h, tw * gap_w - pad_w
    move = offset_of(over_w * 0, over_d, over_h, over_w, src_n, src_d, src_h, src_w, NDIM)
    own = src + (group * lanes_in + c).to(tl.int64) * src_c + move
    theirs = grad + (group * lanes_out + k).to(tl.int64) * grad_c
    first, count = portion(tl.cdiv(pixels, BK), slices, part)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(first, first + count):
        pixel = step * BK + tl.arange(0, BK)
        live = pixel < pixels
        n, d, h, w = pixel_at(pixel, result_d, result_h, result_w, NDIM)
        y_at = offset_of(n, d, h, w, grad_n, grad_d, grad_h, grad_w, NDIM)
        d, h, w = d * stride_d, h * stride_h, w * stride_w
        x_at = offset_of(n, d, h, w, src_n, src_d, src_h, src_w, NDIM)
        y_mask = live[:, None] & is_filter[None, :]
        y = tl.load(theirs[None, :] + y_at[:, None], mask=y_mask, other=0.0)
        if MODE == "packed":
            inside = is_inside(
                d[:, None] + over_d[None, :], h[:, None] + over_h[None, :],
                w[:, None] + over_w[None, :], source_d, source_h, source_w, NDIM,
            )  # fmt: skip
            mask = inside & live[:, None] & is_lane[None, :]
        else:
            inside = is_inside(
                d + over_d, h + over_h, w + over_w, source_d, source_h, source_w, NDIM
            )
            mask = (inside & live)[:, None]
            if not EVEN_C:
                mask &= is_lane[None, :]
        x = tl.load(own[None, :] + x_at[:, None], mask=mask, other=0.0)
        acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
    mask = is_filter[:, None] & is_lane[None, :]
    if MODE == "merged":
        group_in = c // source_channels
        mask &= (k // result_channels)[:, None] == group_in[None, :]
        c = c - group_in * source_channels
    finish_filter(
        acc, out, work, part, groups * result_channels, taps * source_channels,
        (group * lanes_out + k)[:, None], (tap + e * 0)[None, :], c[None, :], mask,
        taps_h, taps_w, source_channels, out_k, out_c, out_d, out_h, out_w, NDIM, CUT, ATOMIC,
    )  # fmt: skip


@triton.jit
def filter_direct(
    src, grad, out, work, tiles_m, tiles_n, pieces, slices, pixels,
    source_channels, result_channels, groups, source_d, source_h, source_w,
    result_d, result_h, result_w, taps_d, taps_h, taps_w, stride_d, stride_h, stride_w,
    pad_d, pad_h, pad_w, gap_d, gap_h, gap_w, src_n, src_c, src_d, src_h, src_w,
    grad_n, grad_c, grad_d, grad_h, grad_w, out_k, out_c, out_d, out_h, out_w,
    NDIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CUT: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """BK taps of BN filters, one channel of each, BM pixels at a time: few channels a group.

    Rows of tiles are blocks of taps of one channel, columns are blocks of filters.
    """
    part = tl.program_id(0) // pieces
    tile = tl.program_id(0) % pieces
    row = tile // tiles_n
    blocks = tiles_m // source_channels
    c = row // blocks
    taps = taps_d * taps_h * taps_w
    tap = (row - c * blocks) * BK + tl.arange(0, BK)
    is_tap = tap < taps
    k = (tile - row * tiles_n) * BN + tl.arange(0, BN)
    is_filter = k < groups * result_channels
    td, th, tw = tap_at(tap, taps_h, taps_w, NDIM)
    over_d, over_h, over_w = td * gap_d - pad_d, th * gap_h - pad_h, tw * gap_w - pad_w
    move = offset_of(tap * 0, over_d, over_h, over_w, src_n, src_d, src_h, src_w, NDIM)
    lane = (k // result_channels) * source_channels + c
    own = src + (lane.to(tl.int64) * src_c)[None, None, :] + move[None, :, None]
    theirs = grad + (k.to(tl.int64) * grad_c)[None, :]
    first, count = portion(tl.cdiv(pixels, BM), slices, part)
    acc = tl.zeros((BK, BN), dtype=tl.float32)
    for step in range(first, first + count):
        pixel = step * BM + tl.arange(0, BM)
        live = pixel < pixels
        n, d, h, w = pixel_at(pixel, result_d, result_h, result_w, NDIM)
        y_at = offset_of(n, d, h, w, grad_n, grad_d, grad_h, grad_w, NDIM)
        y = tl.load(theirs + y_at[:, None], mask=live[:, None] & is_filter[None, :], other=0.0)
        d, h, w = d * stride_d, h * stride_h, w * stride_w
        x_at = offset_of(n, d, h, w, src_n, src_d, src_h, src_w, NDIM)
        inside = is_inside(
            d[:, None] + over_d[None, :], h[:, None] + over_h[None, :],
            w[:, None] + over_w[None, :], source_d, source_h, source_w, NDIM,
        )  # fmt: skip
        inside &= live[:, None] & is_tap[None, :]
        mask = inside[:, :, None] & is_filter[None, None, :]
        x = tl.load(own + x_at[:, None, None], mask=mask, other=0.0)
        acc += tl.sum(x.to(tl.float32) * y.to(tl.float32)[:, None, :], 0)
    finish_filter(
        acc, out, work, part, groups * result_channels, taps * source_channels,
        k[None, :], tap[:, None], (c + k * 0)[None, :], is_tap[:, None] & is_filter[None, :],
        taps_h, taps_w, source_channels, out_k, out_c, out_d, out_h, out_w, NDIM, CUT, ATOMIC,
    )  # fmt: skip


@triton.jit
def add_filter(
    out, work, slices, entries, per_filter, channels, taps_h, taps_w,
    out_k, out_c, out_d, out_h, out_w,
    NDIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN entries of the filter's gradient: the sum of their slices, BM at a time, stored."""
    entry = tl.program_id(0) * BN + tl.arange(0, BN)
    is_entry = entry < entries
    part = tl.arange(0, BM)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, slices, BM):
        at = work + (first + part).to(tl.int64)[:, None] * entries + entry[None, :]
        acc += tl.load(at, mask=(first + part < slices)[:, None] & is_entry[None, :], other=0.0)
    k = entry // per_filter
    rest = entry - k * per_filter
    tap = rest // channels
    finish_filter(
        tl.sum(acc, 0), out, work, k, 0, per_filter, k, tap, rest - tap * channels, is_entry,
        taps_h, taps_w, channels, out_k, out_c, out_d, out_h, out_w, NDIM, False, False,
    )  # fmt: skip
