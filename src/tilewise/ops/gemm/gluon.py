# SPDX-License-Identifier: MIT
"""Warp-specialised GEMM for Hopper: one warp copies tiles by TMA, one or two groups multiply.

A tile of C is computed as A[BM, BK] B[BK, BN] steps through a ring of STAGES shared-memory
buffers. `ready` barriers say that a stage has arrived, `empty` ones that it may be overwritten.
Work is handed out by `SCHEDULE`: whole tiles, tiles cut into SPLIT slices of the reduction, or
stream-K, where every program takes an equal share of all steps. Cut tiles leave fp32 partial sums
in `work`; whoever arrives last adds them in a fixed order, so results do not depend on timing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Batch, row and column of a tile; GROUP_M rows are walked together for the sake of L2."""
    per_batch = tiles_m * tiles_n
    batch = tile // per_batch
    tile = tile - batch * per_batch
    width = GROUP_M * tiles_n
    group = tile // width
    first = group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    inside = tile - group * width
    return batch, first + inside % rows, inside // rows


@gluon.jit
def share(steps, SPLIT: gl.constexpr, part):
    """First step and number of steps of one of SPLIT slices."""
    each = steps // SPLIT
    more = steps - each * SPLIT
    return part * each + gl.minimum(part, more), each + (part < more).to(gl.int32)


@gluon.jit
def stream_start(program, total_steps, programs):
    """Where a stream-K program's share begins."""
    each = total_steps // programs
    return program * each + gl.minimum(program, total_steps - each * programs)


@gluon.jit
def stream_owner(step, total_steps, programs):
    """The stream-K program that a step belongs to."""
    each = total_steps // programs
    more = total_steps - each * programs
    border = more * (each + 1)
    late = more + (step - border) // gl.maximum(each, 1)
    return gl.where(step < border, step // (each + 1), late)


@gluon.jit
def next_work(at, end, piece, steps, SPLIT: gl.constexpr, STREAM: gl.constexpr):
    """The next piece of work: tile, first step, number of steps, and what is left after it.

    `at` to `end` are this program's stream-K steps; they come before its whole pieces.
    """
    if STREAM:
        streaming = at < end
        tile = gl.where(streaming, at // steps, piece)
        first = gl.where(streaming, at - tile * steps, 0)
        count = gl.where(streaming, gl.minimum(steps - first, end - at), steps)
        at += gl.where(streaming, count, 0)
        piece += gl.where(streaming, 0, gl.num_programs(0))
    else:
        tile = piece // SPLIT
        first, count = share(steps, SPLIT, piece - tile * SPLIT)
        piece += gl.num_programs(0)
    return tile, first, count, at, piece


@gluon.jit
def all_work(stream_tiles, steps, STREAM: gl.constexpr):
    """Where this program's stream-K steps begin and end, and its first whole piece."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    at = gl.to_tensor(0)
    end = gl.to_tensor(0)
    if STREAM:
        at = stream_start(program, stream_tiles * steps, programs)
        end = stream_start(program + 1, stream_tiles * steps, programs)
    return at, end, stream_tiles + program


@gluon.jit
def copy_steps(
    ad, bd, a_ring, b_ring, empty, ready, filled, batch, row, col, first, count,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr,
):  # fmt: skip
    """Copies the operands of `count` steps into the ring; gives the new fill count."""
    for step in range(first, first + count):
        stage = filled % STAGES
        mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
        full = ready.index(stage)
        mbarrier.expect(full, ad.block_type.nbytes + bd.block_type.nbytes)
        k = step * BK
        if A_ROW:
            tma.async_copy_global_to_shared(ad, [batch, row * BM, k], full, a_ring.index(stage))
        else:
            tma.async_copy_global_to_shared(ad, [batch, k, row * BM], full, a_ring.index(stage))
        if B_ROW:
            tma.async_copy_global_to_shared(bd, [batch, k, col * BN], full, b_ring.index(stage))
        else:
            tma.async_copy_global_to_shared(bd, [batch, col * BN, k], full, b_ring.index(stage))
        filled += 1
    return filled


@gluon.jit
def load_warp(
    ad, bd, a_ring, b_ring, empty, ready, tiles, stream_tiles, tiles_m, tiles_n, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Copies everything this program's math warps will need, in their order."""
    filled = gl.to_tensor(0)
    at, end, piece = all_work(stream_tiles, steps, STREAM)
    while (at < end) | (piece < tiles * SPLIT):
        tile, first, count, at, piece = next_work(at, end, piece, steps, SPLIT, STREAM)
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        filled = copy_steps(
            ad, bd, a_ring, b_ring, empty, ready, filled, batch, row, col, first, count,
            BM, BN, BK, STAGES, A_ROW, B_ROW,
        )  # fmt: skip


@gluon.jit
def multiply(
    a_ring, b_ring, empty, ready, used, count,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, layout: gl.constexpr, acc_type: gl.constexpr,
):  # fmt: skip
    """Adds up `count` steps from the ring; gives the sum and the new use count.

    One product stays in flight while the next is issued; a stage is handed back one step late.
    """
    acc = gl.zeros((BM, BN), dtype=acc_type, layout=layout)
    for step in range(count):
        stage = used % STAGES
        mbarrier.wait(ready.index(stage), (used // STAGES) & 1)
        if A_ROW:
            a = a_ring.index(stage).reshape([BM, BK])
        else:
            a = a_ring.index(stage).reshape([BK, BM]).permute((1, 0))
        if B_ROW:
            b = b_ring.index(stage).reshape([BK, BN])
        else:
            b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=step > 0)
        used += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=count > 0)
    return acc, used


@gluon.jit
def activate(x, ACT: gl.constexpr):
    if ACT == "relu":
        return gl.maximum(x, 0.0)
    elif ACT == "silu":
        return x / (1.0 + gl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        return x


@gluon.jit
def halves(x, PARTS: gl.constexpr):
    """The tile as PARTS tiles side by side, without moving a register."""
    parts = (x,)
    for _ in gl.static_range(PARTS.bit_length() - 1):
        finer = ()
        for i in gl.static_range(len(parts)):
            wide = parts[i]
            pair = wide.reshape([wide.shape[0], 2, wide.shape[1] // 2]).permute((0, 2, 1)).split()
            finer = finer + pair
        parts = finer
    return parts


@gluon.jit
def finish(
    acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
    c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Scales, biases, activates and stores one finished tile."""
    m = row * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    n = col * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    if SCALE == "tensor":
        acc = acc * (gl.load(a_scale_ptr) * gl.load(b_scale_ptr))
    elif SCALE == "row":
        acc = acc * gl.expand_dims(gl.load(a_scale_ptr + m, mask=m < M, other=0.0), 1)
        acc = acc * gl.expand_dims(gl.load(b_scale_ptr + n, mask=n < N, other=0.0), 0)
    if bias_ptr is not None:
        if SWAP:
            bias = gl.load(bias_ptr + m, mask=m < M, other=0.0)
            acc = acc + gl.expand_dims(bias.to(gl.float32), 1)
        else:
            bias = gl.load(bias_ptr + n, mask=n < N, other=0.0)
            acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
    out = activate(acc, ACT).to(out_type)
    if TMA_STORE:
        parts = halves(out, PARTS)
        for i in gl.static_range(PARTS):
            buffer = c_ring.index(i % BUFFERS)
            tma.store_wait(pendings=BUFFERS - 1)
            if SWAP:
                buffer.reshape([BN // PARTS, BM]).permute((1, 0)).store(parts[i])
            else:
                buffer.reshape([BM, BN // PARTS]).store(parts[i])
            fence_async_shared()
            edge = col * BN + i * (BN // PARTS)
            if SWAP:
                tma.async_copy_shared_to_global(cd, [batch, edge, row * BM], buffer)
            else:
                tma.async_copy_shared_to_global(cd, [batch, row * BM, edge], buffer)
    else:
        rows = gl.expand_dims(m, 1).to(gl.int64) * c_row
        cols = gl.expand_dims(n, 0).to(gl.int64) * c_col
        inside = gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0)
        gl.store(c_ptr + batch.to(gl.int64) * c_batch + rows + cols, out, mask=inside)


@gluon.jit
def leave_partial(
    acc, work, flags, tile, own_slot, first_slot, last_slot, count, needed,
    BM: gl.constexpr, BN: gl.constexpr, STREAM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Stores a partial sum; the last to arrive gets (True, the whole sum)."""
    m = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(m, 1) * BN + gl.expand_dims(n, 0)
    gl.store(work + own_slot.to(gl.int64) * (BM * BN) + inside, acc, cache_modifier=".cg")
    gl.thread_barrier()
    seen = gl.atomic_add(flags + tile, count, sem="acq_rel", scope="gpu")
    gl.thread_barrier()
    is_last = seen + count == needed
    if is_last:
        # In stream-K a share either closes inside a tile (odd slot) or opens inside one (even).
        slot = 2 * first_slot + 1 if STREAM else first_slot
        acc = gl.load(work + slot.to(gl.int64) * (BM * BN) + inside, cache_modifier=".cg")
        for i in range(first_slot + 1, last_slot + 1):
            slot = 2 * i if STREAM else i
            acc += gl.load(work + slot.to(gl.int64) * (BM * BN) + inside, cache_modifier=".cg")
        gl.store(flags + tile, 0)
    return is_last, acc


@gluon.jit
def math_warps(
    cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    a_ring, b_ring, c_ring, empty, ready, tiles, stream_tiles, tiles_m, tiles_n, steps, M, N,
    c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT: gl.constexpr, STREAM: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores this program's share of the tiles."""
    used = gl.to_tensor(0)
    programs = gl.num_programs(0)
    at, end, piece = all_work(stream_tiles, steps, STREAM)
    while (at < end) | (piece < tiles * SPLIT):
        own = piece
        tile, first, count, at, piece = next_work(at, end, piece, steps, SPLIT, STREAM)
        acc, used = multiply(
            a_ring, b_ring, empty, ready, used, count,
            BM, BN, BK, STAGES, A_ROW, B_ROW, layout, acc_type,
        )  # fmt: skip
        is_whole = count == steps
        if STREAM:
            if not is_whole:
                total = stream_tiles * steps
                own = 2 * gl.program_id(0) + (first == 0).to(gl.int32)
                opens = stream_owner(tile * steps, total, programs)
                closes = stream_owner(tile * steps + steps - 1, total, programs)
                is_whole, acc = leave_partial(
                    acc, work, flags, tile, own, opens, closes, count, steps, BM, BN, True, layout
                )
        elif SPLIT > 1:
            base = tile * SPLIT
            is_whole, acc = leave_partial(
                acc, work, flags, tile, own, base, base + SPLIT - 1, 1, SPLIT, BM, BN, False, layout
            )
        if is_whole:
            batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
            finish(
                acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
                c_batch, c_row, c_col, BM, BN, PARTS, BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout,
                out_type,
            )  # fmt: skip
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_ws(
    ad, bd, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    tiles, stream_tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT: gl.constexpr, STREAM: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Cooperative: all math warps share each tile, rows divided among them."""
    a_ring = gl.allocate_shared_memory(ad.dtype, [STAGES] + ad.block_type.shape, ad.layout)
    b_ring = gl.allocate_shared_memory(bd.dtype, [STAGES] + bd.block_type.shape, bd.layout)
    if TMA_STORE:
        c_ring = gl.allocate_shared_memory(cd.dtype, [BUFFERS] + cd.block_type.shape, cd.layout)
    else:
        c_ring = a_ring
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (math_warps, (
                cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
                a_ring, b_ring, c_ring, empty, ready, tiles, stream_tiles, tiles_m, tiles_n, steps,
                M, N, c_batch, c_row, c_col, BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, SPLIT,
                STREAM, PARTS, BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout, acc_type, out_type,
            )),
            (load_warp, (
                ad, bd, a_ring, b_ring, empty, ready, tiles, stream_tiles, tiles_m, tiles_n, steps,
                BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, SPLIT, STREAM,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


@gluon.jit
def pingpong_math(
    cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring, b_ring, c_ring, empty, ready,
    tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    WHO: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    PARTS: gl.constexpr, BUFFERS: gl.constexpr, TMA_STORE: gl.constexpr, SWAP: gl.constexpr,
    SCALE: gl.constexpr, ACT: gl.constexpr, layout: gl.constexpr, acc_type: gl.constexpr,
    out_type: gl.constexpr,
):  # fmt: skip
    """Every second tile of this program: one group stores while the other multiplies."""
    programs = gl.num_programs(0)
    used = gl.to_tensor(0) + WHO * steps
    for tile in range(gl.program_id(0) + WHO * programs, tiles, 2 * programs):
        acc, used = multiply(
            a_ring, b_ring, empty, ready, used, steps,
            BM, BN, BK, STAGES, A_ROW, B_ROW, layout, acc_type,
        )  # fmt: skip
        used += steps
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        finish(
            acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
            c_batch, c_row, c_col, BM, BN, PARTS, BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout,
            out_type,
        )  # fmt: skip
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_pingpong(
    ad, bd, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr,
    tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Two math groups with a tile each, in turns; the order of the copies keeps them apart."""
    a_ring = gl.allocate_shared_memory(ad.dtype, [STAGES] + ad.block_type.shape, ad.layout)
    b_ring = gl.allocate_shared_memory(bd.dtype, [STAGES] + bd.block_type.shape, bd.layout)
    if TMA_STORE:
        shape: gl.constexpr = [BUFFERS] + cd.block_type.shape
        c_ring0 = gl.allocate_shared_memory(cd.dtype, shape, cd.layout)
        c_ring1 = gl.allocate_shared_memory(cd.dtype, shape, cd.layout)
    else:
        c_ring0 = a_ring
        c_ring1 = a_ring
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (pingpong_math, (
                cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring, b_ring, c_ring0, empty,
                ready, tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col, 0, BM, BN, BK,
                STAGES, A_ROW, B_ROW, GROUP_M, PARTS, BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout,
                acc_type, out_type,
            )),
            (pingpong_math, (
                cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring, b_ring, c_ring1, empty,
                ready, tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col, 1, BM, BN, BK,
                STAGES, A_ROW, B_ROW, GROUP_M, PARTS, BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout,
                acc_type, out_type,
            )),
            (load_warp, (
                ad, bd, a_ring, b_ring, empty, ready, tiles, 0, tiles_m, tiles_n, steps,
                BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, 1, False,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
