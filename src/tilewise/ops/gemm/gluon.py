# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RUF005, RUF059, SIM102
"""Warp-specialised GEMM for Hopper: one warp copies tiles by TMA, one or two groups multiply.

A tile of C is computed as A[BM, BK] B[BK, BN] steps through a ring of STAGES shared-memory
buffers. `ready` barriers say that a stage has arrived, `empty` ones that it may be overwritten.
The first `whole` tiles are computed whole; with CUT the reduction of each of the others is cut in
`cut` slices, so that few tiles still fill the GPU: equal ones, or two, of which programs without
a tile of their own do the second. Slices leave fp32 partial sums in `work`; whoever arrives last
adds them in a fixed order, so results do not depend on timing.

`T` holds what a kernel is compiled for (`Traits` in `launch_hopper.py`).
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

from tilewise.ops.gluon_names import tma_load, tma_store
from tilewise.ops.gluon_pieces import activate, halves, leave_partial, place


@gluon.jit
def assign(piece, schedule, T: gl.constexpr):
    """Tile, part of it, first step and number of steps of a piece of work.

    Equal slices of the same part of the reduction are neighbours, as they read the same columns of
    A and rows of B at the same time. With `most` there are two unequal parts: programs with a tile
    do the first `most` steps of it, those without one the rest of several tiles in turn.
    """
    CUT: gl.constexpr = T.CUT
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps = schedule
    tile = piece
    part = gl.to_tensor(0)
    first = gl.to_tensor(0)
    count = steps
    if CUT:  # without branches: they would have the assembler wait for each product
        rest = gl.maximum(tiles - whole, 1)
        late = gl.maximum(piece - whole, 0)
        is_cut = piece >= whole
        programs = gl.num_programs(0)
        turn = late // programs
        helper = late - turn * programs - rest
        helps = late >= rest
        inside = gl.where(helps, helper + turn * (programs - rest), late)
        idle = (inside >= rest) | (helps & (helper < 0))
        nth = late // rest
        each = steps // cut
        more = steps - each * cut
        is_two = is_cut & (most > 0)
        part = gl.where(is_two, helps.to(gl.int32), nth)
        tile = piece - nth * rest
        tile = gl.where(is_two, whole + gl.minimum(inside, rest - 1), tile)
        first = gl.where(is_cut, nth * each + gl.minimum(nth, more), 0)
        first = gl.where(is_two, part * most, first)
        count = gl.where(is_cut, each + (nth < more).to(gl.int32), steps)
        share = gl.where(helps, steps - most, most)
        count = gl.where(is_two, gl.where(idle, 0, share), count)
    return tile, part, first, count


@gluon.jit
def copy_steps(maps, rings, filled, tile, first, count, T: gl.constexpr):
    """Copies the operands of `count` steps into the ring; gives the new fill count."""
    STAGES: gl.constexpr = T.STAGES
    BK: gl.constexpr = T.BK
    A_ROW: gl.constexpr = T.A_ROW
    BM: gl.constexpr = T.BM
    B_ROW: gl.constexpr = T.B_ROW
    BN: gl.constexpr = T.BN
    ad, bd = maps
    a_ring, b_ring, empty, ready = rings
    batch, row, col = tile
    for step in range(first, first + count):
        stage = filled % STAGES
        mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
        full = ready.index(stage)
        mbarrier.expect(full, ad.block_type.nbytes + bd.block_type.nbytes)
        k = step * BK
        if A_ROW:
            tma_load(ad, [batch, row * BM, k], full, a_ring.index(stage))
        else:
            tma_load(ad, [batch, k, row * BM], full, a_ring.index(stage))
        if B_ROW:
            tma_load(bd, [batch, k, col * BN], full, b_ring.index(stage))
        else:
            tma_load(bd, [batch, col * BN, k], full, b_ring.index(stage))
        filled += 1
    return filled


@gluon.jit
def load_warp(maps, rings, schedule, T: gl.constexpr):
    """Copies everything this program's math warps will need, in their order."""
    GROUP_M: gl.constexpr = T.GROUP_M
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps = schedule
    filled = gl.to_tensor(0)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        tile, part, first, count = assign(piece, schedule, T)
        at = place(tile, tiles_m, tiles_n, GROUP_M)
        filled = copy_steps(maps, rings, filled, at, first, count, T)


@gluon.jit
def multiply(
    rings, used, count, next_turn, FIRST_ROW: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr
):
    """Adds up `count` steps from the ring; gives the sum and the new use count.

    One product stays in flight while the next is issued; a stage is handed back one step late.
    """
    BN: gl.constexpr = T.BN
    acc_type: gl.constexpr = T.acc_type
    layout: gl.constexpr = T.layout
    STAGES: gl.constexpr = T.STAGES
    A_ROW: gl.constexpr = T.A_ROW
    BM: gl.constexpr = T.BM
    BK: gl.constexpr = T.BK
    B_ROW: gl.constexpr = T.B_ROW
    a_ring, b_ring, empty, ready = rings
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
def finish(acc, result, batch, m0, n0, PARTS: gl.constexpr, T: gl.constexpr):
    """Scales, biases, activates and stores one finished tile, whose corner is (m0, n0)."""
    SCALE: gl.constexpr = T.SCALE
    SWAP: gl.constexpr = T.SWAP
    out_type: gl.constexpr = T.out_type
    TMA_STORE: gl.constexpr = T.TMA_STORE
    BUFFERS: gl.constexpr = T.BUFFERS
    ACT: gl.constexpr = T.ACT
    cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, M, N, strides = result
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
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
                tma_store(cd, [batch, edge, m0], buffer)
            else:
                tma_store(cd, [batch, m0, edge], buffer)
    else:
        rows = gl.expand_dims(m, 1).to(gl.int64) * strides[1]
        cols = gl.expand_dims(n, 0).to(gl.int64) * strides[2]
        inside = gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0)
        gl.store(c_ptr + batch.to(gl.int64) * strides[0] + rows + cols, out, mask=inside)


@gluon.jit
def math_warps(result, rings, partial, schedule, T: gl.constexpr):
    """Multiplies and stores this program's share of the tiles."""
    CUT: gl.constexpr = T.CUT
    BM: gl.constexpr = T.BM
    BN: gl.constexpr = T.BN
    TMA_STORE: gl.constexpr = T.TMA_STORE
    GROUP_M: gl.constexpr = T.GROUP_M
    PARTS: gl.constexpr = T.PARTS
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps = schedule
    work, flags = partial
    used = gl.to_tensor(0)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        tile, part, first, count = assign(piece, schedule, T)
        acc, used = multiply(rings, used, count, None, 0, BM, T)
        is_whole = count > 0
        if CUT:
            if (piece >= whole) & (cut > 1) & (count > 0):
                is_whole, accs = leave_partial(
                    (acc,), work, flags + tile, tile - whole, tiles - whole, part, cut,
                    BM * BN,
                )  # fmt: skip
                acc = accs[0]
        if is_whole:
            batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
            finish(acc, result, batch, row * BM, col * BN, PARTS, T)
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_ws(
    ad, bd, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    T: gl.constexpr,
):  # fmt: skip
    """Cooperative: all math warps share each tile, rows divided among them."""
    STAGES: gl.constexpr = T.STAGES
    TMA_STORE: gl.constexpr = T.TMA_STORE
    BUFFERS: gl.constexpr = T.BUFFERS
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
    strides = (c_batch, c_row, c_col)
    result = (cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, M, N, strides)
    rings = (a_ring, b_ring, empty, ready)
    schedule = (tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps)
    gl.warp_specialize(
        [
            (math_warps, (result, rings, (work, flags), schedule, T)),
            (load_warp, ((ad, bd), rings, schedule, T)),
        ],
        [1],
        [40],
    )


@gluon.jit
def math_group(result, rings, turns, schedule, WHO: gl.constexpr, T: gl.constexpr):
    """One of two groups: with SHARE half the rows of every tile, else every second tile.

    Groups that alternate pass a turn between them: a barrier's phase is a single bit, so a group
    must not look at a stage before the other is done with the round in between.
    """
    BM: gl.constexpr = T.BM
    SHARE: gl.constexpr = T.SHARE
    BN: gl.constexpr = T.BN
    TMA_STORE: gl.constexpr = T.TMA_STORE
    GROUP_M: gl.constexpr = T.GROUP_M
    PARTS: gl.constexpr = T.PARTS
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps = schedule
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
            acc, used = multiply(rings, used, steps, None, FIRST_ROW, ROWS, T)
        else:
            mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
            turn += 1
            acc, used = multiply(rings, used, steps, turns.index(1 - WHO), FIRST_ROW, ROWS, T)
            used += steps
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        if SHARE:
            row = 2 * row + WHO
        finish(acc, result, batch, row * ROWS, col * BN, PARTS, T)
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_two_groups(
    ad, bd, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr,
    tiles, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    T: gl.constexpr,
):  # fmt: skip
    """Two math groups that do not wait for each other: one may store while the other multiplies."""
    STAGES: gl.constexpr = T.STAGES
    TMA_STORE: gl.constexpr = T.TMA_STORE
    BUFFERS: gl.constexpr = T.BUFFERS
    SHARE: gl.constexpr = T.SHARE
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
    strides = (c_batch, c_row, c_col)
    result0 = (cd, c_ring0, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, M, N, strides)
    result1 = (cd, c_ring1, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, M, N, strides)
    rings = (a_ring, b_ring, empty, ready)
    schedule = (tiles, tiles, tiles, 1, 0, tiles_m, tiles_n, steps)
    gl.warp_specialize(
        [
            (math_group, (result0, rings, turns, schedule, 0, T)),
            (math_group, (result1, rings, turns, schedule, 1, T)),
            (load_warp, ((ad, bd), rings, schedule, T)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def load_uneven(ad, bds, rings, schedule, T: gl.constexpr):
    """Copies A and all parts of B for this program's tiles."""
    BM: gl.constexpr = T.BM
    BN: gl.constexpr = T.BN
    BK: gl.constexpr = T.BK
    STAGES: gl.constexpr = T.STAGES
    A_ROW: gl.constexpr = T.A_ROW
    B_ROW: gl.constexpr = T.B_ROW
    GROUP_M: gl.constexpr = T.GROUP_M
    a_ring, b_rings, empty, ready = rings
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps = schedule
    filled = gl.to_tensor(0)
    nbytes: gl.constexpr = (BM + BN) * BK * (ad.dtype.primitive_bitwidth // 8)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        tile, part, first, count = assign(piece, schedule, T)
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        m = row * BM
        for step in range(first, first + count):
            stage = filled % STAGES
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            full = ready.index(stage)
            mbarrier.expect(full, nbytes)
            k = step * BK
            n = col * BN
            if A_ROW:
                tma_load(ad, [batch, m, k], full, a_ring.index(stage))
            else:
                tma_load(ad, [batch, k, m], full, a_ring.index(stage))
            for i in gl.static_range(len(bds)):
                to = b_rings[i].index(stage)
                if B_ROW:
                    tma_load(bds[i], [batch, k, n], full, to)
                    n += bds[i].block_type.shape[2]
                else:
                    tma_load(bds[i], [batch, n, k], full, to)
                    n += bds[i].block_type.shape[1]
            filled += 1


@gluon.jit
def multiply_parts(rings, used, count, accs, T: gl.constexpr):
    """Adds up `count` steps of several products that have A in common."""
    STAGES: gl.constexpr = T.STAGES
    A_ROW: gl.constexpr = T.A_ROW
    BM: gl.constexpr = T.BM
    BK: gl.constexpr = T.BK
    B_ROW: gl.constexpr = T.B_ROW
    a_ring, b_rings, empty, ready = rings
    for step in range(count):
        stage = used % STAGES
        mbarrier.wait(ready.index(stage), (used // STAGES) & 1)
        if A_ROW:
            a = a_ring.index(stage).reshape([BM, BK])
        else:
            a = a_ring.index(stage).reshape([BK, BM]).permute((1, 0))
        sums = ()
        for i in gl.static_range(len(accs)):
            if B_ROW:
                b = b_rings[i].index(stage).reshape([BK, accs[i].shape[1]])
            else:
                b = b_rings[i].index(stage).reshape([accs[i].shape[1], BK]).permute((1, 0))
            sums = sums + (warpgroup_mma(a, b, accs[i], is_async=True),)
        accs = warpgroup_mma_wait(num_outstanding=len(accs), deps=sums)
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=step > 0)
        used += 1
    accs = warpgroup_mma_wait(num_outstanding=0, deps=accs)
    mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=count > 0)
    return accs, used


@gluon.jit
def math_uneven(
    result, rings, partial, schedule, WIDTHS: gl.constexpr, layouts: gl.constexpr, T: gl.constexpr
):
    """Two products per step, with A in common."""
    BM: gl.constexpr = T.BM
    acc_type: gl.constexpr = T.acc_type
    CUT: gl.constexpr = T.CUT
    BN: gl.constexpr = T.BN
    TMA_STORE: gl.constexpr = T.TMA_STORE
    GROUP_M: gl.constexpr = T.GROUP_M
    NARROW: gl.constexpr = T.NARROW
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps = schedule
    work, flags = partial
    used = gl.to_tensor(0)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        tile, part, first, count = assign(piece, schedule, T)
        accs = ()
        for i in gl.static_range(len(WIDTHS)):
            accs = accs + (gl.full([BM, WIDTHS[i]], 0, acc_type, layouts[i]),)
        accs, used = multiply_parts(rings, used, count, accs, T)
        is_whole = count > 0
        if CUT:
            if (piece >= whole) & (cut > 1) & (count > 0):
                is_whole, accs = leave_partial(
                    accs, work, flags + tile, tile - whole, tiles - whole, part, cut,
                    BM * BN,
                )  # fmt: skip
        if is_whole:
            batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
            n = col * BN
            for i in gl.static_range(len(WIDTHS)):
                finish(accs[i], result, batch, row * BM, n, accs[i].shape[1] // NARROW, T)
                n += accs[i].shape[1]
    if TMA_STORE:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_uneven(
    ad, bd, ed, cd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps, M, N, c_batch, c_row, c_col,
    WIDTHS: gl.constexpr, layouts: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Tiles as wide as two powers of two together: 192 or 160 columns often fill a wave where 128
    or 256 leave multiprocessors idle.
    """
    STAGES: gl.constexpr = T.STAGES
    TMA_STORE: gl.constexpr = T.TMA_STORE
    BUFFERS: gl.constexpr = T.BUFFERS
    a_ring = gl.allocate_shared_memory(ad.dtype, [STAGES] + ad.block_type.shape, ad.layout)
    b_ring = gl.allocate_shared_memory(bd.dtype, [STAGES] + bd.block_type.shape, bd.layout)
    e_ring = gl.allocate_shared_memory(ed.dtype, [STAGES] + ed.block_type.shape, ed.layout)
    b_rings = (b_ring, e_ring)
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
    strides = (c_batch, c_row, c_col)
    result = (cd, c_ring, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, M, N, strides)
    rings = (a_ring, b_rings, empty, ready)
    schedule = (tiles, pieces, whole, cut, most, tiles_m, tiles_n, steps)
    gl.warp_specialize(
        [
            (math_uneven, (result, rings, (work, flags), schedule, WIDTHS, layouts, T)),
            (load_uneven, (ad, (bd, ed), rings, schedule, T)),
        ],
        [1],
        [40],
    )
