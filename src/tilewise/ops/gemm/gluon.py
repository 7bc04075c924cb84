# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RET505, RUF005, RUF059, SIM102
"""Warp-specialised GEMM for Hopper: one warp copies tiles by TMA, one or two groups multiply.

A tile of C is computed as A[BM, BK] B[BK, BN] steps through a ring of STAGES shared-memory
buffers. `ready` barriers say that a stage has arrived, `empty` ones that it may be overwritten.
The first `whole` tiles are computed whole; with CUT the reduction of each of the others is cut in
`cut` slices, so that few tiles still fill the GPU. Slices leave fp32 partial sums in `work`;
whoever arrives last adds them in a fixed order, so results do not depend on timing.
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
def assign(piece, tiles, whole, cut, steps, CUT: gl.constexpr):
    """Tile, first step and number of steps of a piece of work.

    Slices of the same part of the reduction are neighbours, as they read the same columns of A
    and rows of B at the same time.
    """
    tile = piece
    first = gl.to_tensor(0)
    count = steps
    if CUT:
        rest = tiles - whole
        part = gl.maximum(piece - whole, 0) // gl.maximum(rest, 1)
        is_cut = piece >= whole
        each = steps // cut
        more = steps - each * cut
        tile = gl.where(is_cut, piece - part * rest, piece)
        first = gl.where(is_cut, part * each + gl.minimum(part, more), 0)
        count = gl.where(is_cut, each + (part < more).to(gl.int32), steps)
    return tile, first, count


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
    ad, bd, a_ring, b_ring, empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Copies everything this program's math warps will need, in their order."""
    filled = gl.to_tensor(0)
    for piece in range(gl.program_id(0), whole + (tiles - whole) * cut, gl.num_programs(0)):
        tile, first, count = assign(piece, tiles, whole, cut, steps, CUT)
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        filled = copy_steps(
            ad, bd, a_ring, b_ring, empty, ready, filled, batch, row, col, first, count,
            BM, BN, BK, STAGES, A_ROW, B_ROW,
        )  # fmt: skip


@gluon.jit
def multiply(
    a_ring, b_ring, empty, ready, used, count, next_turn,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    FIRST_ROW: gl.constexpr, ROWS: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr,
    layout: gl.constexpr, acc_type: gl.constexpr,
):  # fmt: skip
    """Adds up `count` steps from the ring; gives the sum and the new use count.

    One product stays in flight while the next is issued; a stage is handed back one step late.
    """
    acc = gl.zeros((ROWS, BN), dtype=acc_type, layout=layout)
    for step in range(count):
        stage = used % STAGES
        mbarrier.wait(ready.index(stage), (used // STAGES) & 1)
        if A_ROW:
            a = a_ring.index(stage).reshape([BM, BK])
        else:
            a = a_ring.index(stage).reshape([BK, BM]).permute((1, 0))
        if ROWS < BM:
            a = a.slice(FIRST_ROW, ROWS, dim=0)
        if B_ROW:
            b = b_ring.index(stage).reshape([BK, BN])
        else:
            b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=step > 0)
        used += 1
    if next_turn is not None:
        mbarrier.arrive(next_turn, count=1)
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
    acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, m0, n0, M, N,
    c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Scales, biases, activates and stores one finished tile, whose corner is (m0, n0)."""
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
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
            tma.store_wait(pendings=BUFFERS - 1 if i else 0)
            if SWAP:
                buffer.reshape([BN // PARTS, BM]).permute((1, 0)).store(parts[i])
            else:
                buffer.reshape([BM, BN // PARTS]).store(parts[i])
            fence_async_shared()
            edge = n0 + i * (BN // PARTS)
            if SWAP:
                tma.async_copy_shared_to_global(cd, [batch, edge, m0], buffer)
            else:
                tma.async_copy_shared_to_global(cd, [batch, m0, edge], buffer)
    else:
        rows = gl.expand_dims(m, 1).to(gl.int64) * c_row
        cols = gl.expand_dims(n, 0).to(gl.int64) * c_col
        inside = gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0)
        gl.store(c_ptr + batch.to(gl.int64) * c_batch + rows + cols, out, mask=inside)


@gluon.jit
def slot_addresses(work, slot, SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
                   START: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Where a partial sum of a tile of SIZE elements is kept, from element START on."""
    m = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(m, 1) * BN + gl.expand_dims(n, 0) + START
    return work + slot.to(gl.int64) * SIZE + inside


@gluon.jit
def arrive_last(flag, cut):
    """Announces a stored partial sum; whether all the others had been announced before."""
    gl.thread_barrier()
    is_last = gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu") == cut - 1
    gl.thread_barrier()
    return is_last


@gluon.jit
def add_up(at, jump, cut):
    """The sum of `cut` partial sums, in their order."""
    total = gl.load(at, cache_modifier=".cg")
    for i in range(1, cut):
        total += gl.load(at + i * jump, cache_modifier=".cg")
    return total


@gluon.jit
def leave_partial(
    acc, work, flag, first_slot, slots_apart, part, cut,
    BM: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Stores a partial sum; the last to arrive gets (True, the whole sum)."""
    at = slot_addresses(work, first_slot, BM * BN, BM, BN, 0, layout)
    jump = slots_apart.to(gl.int64) * (BM * BN)
    gl.store(at + part * jump, acc, cache_modifier=".cg")
    is_last = arrive_last(flag, cut)
    if is_last:
        acc = add_up(at, jump, cut)
        gl.store(flag, 0)
    return is_last, acc


@gluon.jit
def leave_two_partials(
    acc, extra, work, flag, first_slot, slots_apart, part, cut,
    BM: gl.constexpr, BN: gl.constexpr, EN: gl.constexpr, layout: gl.constexpr,
    e_layout: gl.constexpr,
):  # fmt: skip
    """The same for a tile in two pieces."""
    SIZE: gl.constexpr = BM * (BN + EN)
    at = slot_addresses(work, first_slot, SIZE, BM, BN, 0, layout)
    e_at = slot_addresses(work, first_slot, SIZE, BM, EN, BM * BN, e_layout)
    jump = slots_apart.to(gl.int64) * SIZE
    gl.store(at + part * jump, acc, cache_modifier=".cg")
    gl.store(e_at + part * jump, extra, cache_modifier=".cg")
    is_last = arrive_last(flag, cut)
    if is_last:
        acc = add_up(at, jump, cut)
        extra = add_up(e_at, jump, cut)
        gl.store(flag, 0)
    return is_last, acc, extra


@gluon.jit
def math_warps(
    cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    a_ring, b_ring, c_ring, empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps, M, N,
    c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    CUT: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores this program's share of the tiles."""
    used = gl.to_tensor(0)
    for piece in range(gl.program_id(0), whole + (tiles - whole) * cut, gl.num_programs(0)):
        tile, first, count = assign(piece, tiles, whole, cut, steps, CUT)
        acc, used = multiply(
            a_ring, b_ring, empty, ready, used, count, None,
            BM, BN, BK, STAGES, 0, BM, A_ROW, B_ROW, layout, acc_type,
        )  # fmt: skip
        is_whole = piece >= 0
        if CUT:
            if (piece >= whole) & (cut > 1):
                rest = tiles - whole
                is_whole, acc = leave_partial(
                    acc, work, flags + tile, tile - whole, rest, (piece - whole) // rest, cut,
                    BM, BN, layout,
                )  # fmt: skip
        if is_whole:
            batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
            finish(
                acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row * BM,
                col * BN, M, N, c_batch, c_row, c_col, BM, BN, PARTS, BUFFERS, TMA_STORE, SWAP,
                SCALE, ACT, layout, out_type,
            )  # fmt: skip
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_ws(
    ad, bd, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    tiles, whole, cut, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    CUT: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr,
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
                a_ring, b_ring, c_ring, empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps,
                M, N, c_batch, c_row, c_col, BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, CUT,
                PARTS, BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout, acc_type, out_type,
            )),
            (load_warp, (
                ad, bd, a_ring, b_ring, empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps,
                BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, CUT,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


@gluon.jit
def math_group(
    cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring, b_ring, c_ring, empty, ready, turns,
    tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    WHO: gl.constexpr, SHARE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr,
    PARTS: gl.constexpr, BUFFERS: gl.constexpr, TMA_STORE: gl.constexpr, SWAP: gl.constexpr,
    SCALE: gl.constexpr, ACT: gl.constexpr, layout: gl.constexpr, acc_type: gl.constexpr,
    out_type: gl.constexpr,
):  # fmt: skip
    """One of two groups: with SHARE half the rows of every tile, else every second tile.

    Groups that alternate pass a turn between them: a barrier's phase is a single bit, so a group
    must not look at a stage before the other is done with the round in between.
    """
    programs = gl.num_programs(0)
    ROWS: gl.constexpr = BM // 2 if SHARE else BM
    FIRST_ROW: gl.constexpr = WHO * ROWS if SHARE else 0
    if SHARE:
        used = gl.to_tensor(0)
        start = gl.program_id(0)
        stride = programs
    else:
        used = gl.to_tensor(0) + WHO * steps
        start = gl.program_id(0) + WHO * programs
        stride = 2 * programs
    turn = gl.to_tensor(0)
    for tile in range(start, tiles, stride):
        if SHARE:
            acc, used = multiply(
                a_ring, b_ring, empty, ready, used, steps, None,
                BM, BN, BK, STAGES, FIRST_ROW, ROWS, A_ROW, B_ROW, layout, acc_type,
            )  # fmt: skip
        else:
            mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
            turn += 1
            acc, used = multiply(
                a_ring, b_ring, empty, ready, used, steps, turns.index(1 - WHO),
                BM, BN, BK, STAGES, FIRST_ROW, ROWS, A_ROW, B_ROW, layout, acc_type,
            )  # fmt: skip
            used += steps
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        if SHARE:
            row = 2 * row + WHO
        finish(
            acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row * ROWS,
            col * BN, M, N, c_batch, c_row, c_col, ROWS, BN, PARTS, BUFFERS, TMA_STORE, SWAP, SCALE,
            ACT, layout, out_type,
        )  # fmt: skip
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_two_groups(
    ad, bd, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr,
    tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr, SHARE: gl.constexpr,
    PARTS: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Two math groups that do not wait for each other: one may store while the other multiplies."""
    a_ring = gl.allocate_shared_memory(ad.dtype, [STAGES] + ad.block_type.shape, ad.layout)
    b_ring = gl.allocate_shared_memory(bd.dtype, [STAGES] + bd.block_type.shape, bd.layout)
    if TMA_STORE:
        c_shape: gl.constexpr = [BUFFERS] + cd.block_type.shape
        c_ring0 = gl.allocate_shared_memory(cd.dtype, c_shape, cd.layout)
        c_ring1 = gl.allocate_shared_memory(cd.dtype, c_shape, cd.layout)
    else:
        c_ring0 = a_ring
        c_ring1 = a_ring
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2 if SHARE else 1)
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (math_group, (
                cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring, b_ring, c_ring0, empty,
                ready, turns, tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
                0, SHARE, BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, PARTS, BUFFERS, TMA_STORE,
                SWAP, SCALE, ACT, layout, acc_type, out_type,
            )),
            (math_group, (
                cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring, b_ring, c_ring1, empty,
                ready, turns, tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
                1, SHARE, BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, PARTS, BUFFERS, TMA_STORE,
                SWAP, SCALE, ACT, layout, acc_type, out_type,
            )),
            (load_warp, (
                ad, bd, a_ring, b_ring, empty, ready, tiles, tiles, 1, tiles_m, tiles_n, steps,
                BM, BN, BK, STAGES, A_ROW, B_ROW, GROUP_M, False,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def load_uneven(
    ad, bd, ed, a_ring, b_ring, e_ring, empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps,
    BM: gl.constexpr, BN: gl.constexpr, EN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Copies A and both parts of B for this program's tiles."""
    filled = gl.to_tensor(0)
    for piece in range(gl.program_id(0), whole + (tiles - whole) * cut, gl.num_programs(0)):
        tile, first, count = assign(piece, tiles, whole, cut, steps, CUT)
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        m = row * BM
        n = col * (BN + EN)
        for step in range(first, first + count):
            stage = filled % STAGES
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            full = ready.index(stage)
            mbarrier.expect(
                full, ad.block_type.nbytes + bd.block_type.nbytes + ed.block_type.nbytes
            )
            k = step * BK
            if A_ROW:
                tma.async_copy_global_to_shared(ad, [batch, m, k], full, a_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(ad, [batch, k, m], full, a_ring.index(stage))
            if B_ROW:
                tma.async_copy_global_to_shared(bd, [batch, k, n], full, b_ring.index(stage))
                tma.async_copy_global_to_shared(ed, [batch, k, n + BN], full, e_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(bd, [batch, n, k], full, b_ring.index(stage))
                tma.async_copy_global_to_shared(ed, [batch, n + BN, k], full, e_ring.index(stage))
            filled += 1


@gluon.jit
def math_uneven(
    cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags, a_ring, b_ring, e_ring, c_ring,
    empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, EN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr,
    NARROW: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, e_layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Two products per step, with A in common."""
    used = gl.to_tensor(0)
    for piece in range(gl.program_id(0), whole + (tiles - whole) * cut, gl.num_programs(0)):
        tile, first, count = assign(piece, tiles, whole, cut, steps, CUT)
        acc = gl.zeros((BM, BN), dtype=acc_type, layout=layout)
        extra = gl.zeros((BM, EN), dtype=acc_type, layout=e_layout)
        for step in range(count):
            stage = used % STAGES
            mbarrier.wait(ready.index(stage), (used // STAGES) & 1)
            if A_ROW:
                a = a_ring.index(stage).reshape([BM, BK])
            else:
                a = a_ring.index(stage).reshape([BK, BM]).permute((1, 0))
            if B_ROW:
                b = b_ring.index(stage).reshape([BK, BN])
                e = e_ring.index(stage).reshape([BK, EN])
            else:
                b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
                e = e_ring.index(stage).reshape([EN, BK]).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            extra = warpgroup_mma(a, e, extra, is_async=True)
            acc, extra = warpgroup_mma_wait(num_outstanding=2, deps=(acc, extra))
            mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=step > 0)
            used += 1
        acc, extra = warpgroup_mma_wait(num_outstanding=0, deps=(acc, extra))
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=count > 0)
        is_whole = piece >= 0
        if CUT:
            if (piece >= whole) & (cut > 1):
                rest = tiles - whole
                is_whole, acc, extra = leave_two_partials(
                    acc, extra, work, flags + tile, tile - whole, rest, (piece - whole) // rest,
                    cut, BM, BN, EN, layout, e_layout,
                )  # fmt: skip
        if is_whole:
            batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
            n = col * (BN + EN)
            finish(
                acc, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row * BM, n,
                M, N, c_batch, c_row, c_col, BM, BN, BN // NARROW, BUFFERS, TMA_STORE, SWAP, SCALE,
                ACT, layout, out_type,
            )  # fmt: skip
            finish(
                extra, cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row * BM,
                n + BN, M, N, c_batch, c_row, c_col, BM, EN, EN // NARROW, BUFFERS, TMA_STORE,
                SWAP, SCALE, ACT, e_layout, out_type,
            )  # fmt: skip
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_uneven(
    ad, bd, ed, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    tiles, whole, cut, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    BM: gl.constexpr, BN: gl.constexpr, EN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr,
    NARROW: gl.constexpr, BUFFERS: gl.constexpr,
    TMA_STORE: gl.constexpr, SWAP: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    layout: gl.constexpr, e_layout: gl.constexpr, acc_type: gl.constexpr, out_type: gl.constexpr,
):  # fmt: skip
    """Tiles BN + EN wide, both powers of two: 192 or 160 columns often fill a wave where 128 or
    256 leave multiprocessors idle.
    """
    a_ring = gl.allocate_shared_memory(ad.dtype, [STAGES] + ad.block_type.shape, ad.layout)
    b_ring = gl.allocate_shared_memory(bd.dtype, [STAGES] + bd.block_type.shape, bd.layout)
    e_ring = gl.allocate_shared_memory(ed.dtype, [STAGES] + ed.block_type.shape, ed.layout)
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
            (math_uneven, (
                cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags, a_ring, b_ring,
                e_ring, c_ring, empty, ready, tiles, whole, cut, tiles_m, tiles_n, steps, M, N,
                c_batch, c_row, c_col, BM, BN, EN, BK, STAGES, A_ROW, B_ROW, GROUP_M, CUT, NARROW,
                BUFFERS, TMA_STORE, SWAP, SCALE, ACT, layout, e_layout, acc_type, out_type,
            )),
            (load_uneven, (
                ad, bd, ed, a_ring, b_ring, e_ring, empty, ready, tiles, whole, cut, tiles_m,
                tiles_n, steps, BM, BN, EN, BK, STAGES, A_ROW, B_ROW, GROUP_M, CUT,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
