# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RET505, RUF005
"""GEMM kernels in Triton: pointer loads for any stride and any GPU, TMA for Hopper.

Strides are in elements. A row-major operand has a constant 1 as its column stride, which is what
lets the compiler load 16 bytes at a time. Cut tiles (SPLIT > 1, stream-K) leave fp32 partial sums
in `work`; whoever arrives last at a tile adds them in a fixed order, or, with ATOMIC, reads the
sum that the others have added up in memory.
"""

import triton
import triton.language as tl

from tilewise.ops.triton_pieces import activate, place


@triton.jit
def share(steps, SPLIT: tl.constexpr, part):
    """First step and number of steps of one of SPLIT slices."""
    each = steps // SPLIT
    more = steps - each * SPLIT
    return part * each + tl.minimum(part, more), each + (part < more).to(tl.int32)


@triton.jit
def multiply(
    a_ptr, b_ptr, batch, row, col, first, count, M, N, K,
    a_batch, a_row, a_col, b_batch, b_row, b_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_COL: tl.constexpr,
    B_ROW: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of `count` steps of one tile.

    Rows past the end are clamped where rows are far apart in memory, and masked where they are
    neighbours, as clamping would break up wide loads. What is read too much is never stored.
    """
    m = row * BM + tl.arange(0, BM)
    n = col * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if not A_COL:
        m = tl.minimum(m, M - 1)
    if B_ROW:
        n_safe = n
    else:
        n_safe = tl.minimum(n, N - 1)
    start = first.to(tl.int64) * BK
    a_at = a_ptr + batch.to(tl.int64) * a_batch + start * a_col
    b_at = b_ptr + batch.to(tl.int64) * b_batch + start * b_row
    a_ptrs = a_at + (m.to(tl.int64) * a_row)[:, None] + (k * a_col)[None, :]
    b_ptrs = b_at + (k * b_row)[:, None] + (n_safe.to(tl.int64) * b_col)[None, :]
    acc = tl.zeros((BM, BN), dtype=ACC)
    for step in range(first, first + count):
        if EVEN_K and not A_COL:
            a = tl.load(a_ptrs)
        elif EVEN_K:
            a = tl.load(a_ptrs, mask=(m < M)[:, None], other=0.0)
        elif A_COL:
            a = tl.load(a_ptrs, mask=(m < M)[:, None] & (k < K - step * BK)[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=(k < K - step * BK)[None, :], other=0.0)
        if EVEN_K and not B_ROW:
            b = tl.load(b_ptrs)
        elif EVEN_K:
            b = tl.load(b_ptrs, mask=(n < N)[None, :], other=0.0)
        elif B_ROW:
            b = tl.load(b_ptrs, mask=(n < N)[None, :] & (k < K - step * BK)[:, None], other=0.0)
        else:
            b = tl.load(b_ptrs, mask=(k < K - step * BK)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        a_ptrs += BK * a_col
        b_ptrs += BK * b_row
    return acc


@triton.jit
def adjust(
    acc, bias_ptr, a_scale_ptr, b_scale_ptr, m, n, M, N,
    SWAP: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The tile after scales, bias and activation."""
    if SCALE == "tensor":
        acc = acc * (tl.load(a_scale_ptr) * tl.load(b_scale_ptr))
    elif SCALE == "row":
        acc = acc * tl.load(a_scale_ptr + m, mask=m < M, other=0.0)[:, None]
        acc = acc * tl.load(b_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if bias_ptr is not None:
        if SWAP:
            acc = acc + tl.load(bias_ptr + m, mask=m < M, other=0.0)[:, None].to(tl.float32)
        else:
            acc = acc + tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    return activate(acc, ACT)


@triton.jit
def finish(
    acc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N, c_batch, c_row, c_col,
    BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, SCALE: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """Scales, biases, activates and stores one finished tile."""
    m = row * BM + tl.arange(0, BM)
    n = col * BN + tl.arange(0, BN)
    out = adjust(acc, bias_ptr, a_scale_ptr, b_scale_ptr, m, n, M, N, SWAP, SCALE, ACT)
    at = c_ptr + batch.to(tl.int64) * c_batch
    ptrs = at + (m.to(tl.int64) * c_row)[:, None] + (n.to(tl.int64) * c_col)[None, :]
    tl.store(ptrs, out.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def settle(AMD: tl.constexpr):
    """A barrier after which every thread's accesses to memory are done, not only begun.

    AMD's barrier leaves stores in flight, and what thread 0 releases afterwards is its own wave's.
    """
    if AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=s,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def leave_partial(
    acc, work, flags, tile, own_slot, first_slot, last_slot, count, needed,
    BM: tl.constexpr, BN: tl.constexpr, STREAM: tl.constexpr, ATOMIC: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """Stores a partial sum; the last to arrive gets (True, the whole sum)."""
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    if ATOMIC:
        tl.atomic_add(work + tile.to(tl.int64) * (BM * BN) + inside, acc, sem="relaxed")
    else:
        tl.store(work + own_slot.to(tl.int64) * (BM * BN) + inside, acc, cache_modifier=".cg")
    settle(AMD)
    seen = tl.atomic_add(flags + tile, count, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = seen + count == needed
    if is_last:
        if ATOMIC:
            # The sum goes back to zero so that the next launch finds it so.
            at = work + tile.to(tl.int64) * (BM * BN) + inside
            acc = tl.load(at, cache_modifier=".cg")
            settle(AMD)
            tl.store(at, tl.zeros((BM, BN), dtype=acc.dtype))
        else:
            # In stream-K a share closes inside a tile (odd slot) or opens inside one (even).
            slot = 2 * first_slot + 1 if STREAM else first_slot
            acc = tl.load(work + slot.to(tl.int64) * (BM * BN) + inside, cache_modifier=".cg")
            for i in range(first_slot + 1, last_slot + 1):
                slot = 2 * i if STREAM else i
                acc += tl.load(work + slot.to(tl.int64) * (BM * BN) + inside, cache_modifier=".cg")
        tl.store(flags + tile, 0)
    return is_last, acc


@triton.jit
def gemm_pointer(
    a_ptr, b_ptr, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    tiles_m, tiles_n, M, N, K, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr, ATOMIC: tl.constexpr, A_COL: tl.constexpr, B_ROW: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """One tile, or one of SPLIT slices of its reduction, per program."""
    piece = tl.program_id(0)
    tile = piece // SPLIT
    first, count = share(tl.cdiv(K, BK), SPLIT, piece - tile * SPLIT)
    batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
    acc = multiply(
        a_ptr, b_ptr, batch, row, col, first, count, M, N, K, a_batch, a_row, a_col,
        b_batch, b_row, b_col, BM, BN, BK, A_COL, B_ROW, EVEN_K, ACC, PRECISION,
    )  # fmt: skip
    if SPLIT > 1:
        base = tile * SPLIT
        is_whole, acc = leave_partial(
            acc, work, flags, tile, piece, base, base + SPLIT - 1, 1, SPLIT, BM, BN, False, ATOMIC,
            AMD,
        )  # fmt: skip
        if is_whole:
            finish(
                acc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
                c_batch, c_row, c_col, BM, BN, SWAP, SCALE, ACT,
            )  # fmt: skip
    else:
        finish(
            acc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
            c_batch, c_row, c_col, BM, BN, SWAP, SCALE, ACT,
        )  # fmt: skip


@triton.jit
def stream_start(program, total_steps, programs):
    """Where a stream-K program's share begins."""
    each = total_steps // programs
    return program * each + tl.minimum(program, total_steps - each * programs)


@triton.jit
def stream_owner(step, total_steps, programs):
    """The stream-K program that a step belongs to."""
    each = total_steps // programs
    more = total_steps - each * programs
    border = more * (each + 1)
    late = more + (step - border) // tl.maximum(each, 1)
    return tl.where(step < border, step // (each + 1), late)


@triton.jit
def gemm_streamk(
    a_ptr, b_ptr, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags, tiles, stream_tiles,
    tiles_m, tiles_n, M, N, K, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    A_COL: tl.constexpr, B_ROW: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    SCALE: tl.constexpr, ACT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """Equal shares of all steps of the first `stream_tiles` tiles, then whole tiles."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    steps = tl.cdiv(K, BK)
    total = stream_tiles * steps
    at = stream_start(program, total, programs)
    end = stream_start(program + 1, total, programs)
    piece = stream_tiles + program
    while (at < end) | (piece < tiles):
        streaming = at < end
        tile = tl.where(streaming, at // steps, piece)
        first = tl.where(streaming, at - tile * steps, 0)
        count = tl.where(streaming, tl.minimum(steps - first, end - at), steps)
        at += tl.where(streaming, count, 0)
        piece += tl.where(streaming, 0, programs)
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        acc = multiply(
            a_ptr, b_ptr, batch, row, col, first, count, M, N, K, a_batch, a_row, a_col,
            b_batch, b_row, b_col, BM, BN, BK, A_COL, B_ROW, EVEN_K, ACC, PRECISION,
        )  # fmt: skip
        is_whole = count == steps
        if not is_whole:
            own = 2 * program + (first == 0).to(tl.int32)
            opens = stream_owner(tile * steps, total, programs)
            closes = stream_owner(tile * steps + steps - 1, total, programs)
            is_whole, acc = leave_partial(
                acc, work, flags, tile, own, opens, closes, count, steps, BM, BN, True, False, AMD
            )
        if is_whole:
            finish(
                acc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
                c_batch, c_row, c_col, BM, BN, SWAP, SCALE, ACT,
            )  # fmt: skip


@triton.jit
def copy_tile(
    d, batch, outer, step, ROWS: tl.constexpr, BK: tl.constexpr, ALONG_K: tl.constexpr
):  # fmt: skip
    """A [ROWS, BK] tile by TMA, from memory where it lies along K or across it."""
    if ALONG_K:
        return d.load([batch, outer * ROWS, step * BK]).reshape(ROWS, BK)
    else:
        return d.load([batch, step * BK, outer * ROWS]).reshape(BK, ROWS).T


@triton.jit
def gemm_tma(
    ad, bd, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, tiles, tiles_m, tiles_n, steps, M, N,
    c_batch, c_row, c_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, SWAP: tl.constexpr, SCALE: tl.constexpr,
    ACT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs that load by TMA, every warp multiplying."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, row, col = place(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BM, BN), dtype=ACC)
        for step in range(steps):
            a = copy_tile(ad, batch, row, step, BM, BK, A_ROW)
            b = copy_tile(bd, batch, col, step, BN, BK, not B_ROW)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION, out_dtype=ACC)
        finish(
            acc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
            c_batch, c_row, c_col, BM, BN, SWAP, SCALE, ACT,
        )  # fmt: skip


@triton.jit
def load_whole(
    ptr, batch, outer, extent, K, batch_stride, outer_stride, k_stride,
    ROWS: tl.constexpr, BK: tl.constexpr, ALONG_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A [ROWS, BK] tile with all of K through pointers; see `multiply` about rows past the end."""
    r = outer * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    at = ptr + batch.to(tl.int64) * batch_stride + (k * k_stride)[None, :]
    if ALONG_K:
        at += (tl.minimum(r, extent - 1).to(tl.int64) * outer_stride)[:, None]
        if EVEN_K:
            return tl.load(at)
        else:
            return tl.load(at, mask=(k < K)[None, :], other=0.0)
    else:
        at += (r.to(tl.int64) * outer_stride)[:, None]
        if EVEN_K:
            return tl.load(at, mask=(r < extent)[:, None], other=0.0)
        else:
            return tl.load(at, mask=(r < extent)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def gemm_smallk(
    a_ptr, b_ptr, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr,
    tiles_m, tiles_n, shares, M, N, K, a_batch, a_row, a_col, b_batch, b_row, b_col,
    c_batch, c_row, c_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_COL: tl.constexpr,
    B_ROW: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, SCALE: tl.constexpr,
    ACT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All of K in one step: a tile of B stays while tiles of A stream past and C streams out.

    The rows of a strip of C are dealt out to `shares` programs; all walk down A together.
    """
    program = tl.program_id(0)
    strip = program // shares
    batch = strip // tiles_n
    col = strip - batch * tiles_n
    b = load_whole(b_ptr, batch, col, N, K, b_batch, b_col, b_row, BN, BK, not B_ROW, EVEN_K)
    for row in range(program - strip * shares, tiles_m, shares):
        a = load_whole(a_ptr, batch, row, M, K, a_batch, a_row, a_col, BM, BK, not A_COL, EVEN_K)
        acc = tl.dot(a, b.T, input_precision=PRECISION, out_dtype=ACC)
        finish(
            acc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, row, col, M, N,
            c_batch, c_row, c_col, BM, BN, SWAP, SCALE, ACT,
        )  # fmt: skip


@triton.jit
def gemv_store(
    total, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, m, vector, M, c_row, c_col,
    SWAP: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    if SCALE == "tensor":
        total = total * (tl.load(a_scale_ptr) * tl.load(b_scale_ptr))
    elif SCALE == "row":
        total = total * tl.load(a_scale_ptr + m, mask=m < M, other=0.0)
        total = total * tl.load(b_scale_ptr + vector)
    if bias_ptr is not None:
        if SWAP:
            total = total + tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)
        else:
            total = total + tl.load(bias_ptr + vector).to(tl.float32)
    out = activate(total, ACT).to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + m.to(tl.int64) * c_row + vector * c_col, out, mask=m < M)


@triton.jit
def gemv_sums(
    rows, x_ptr, m, first, count, M, K, a_col, b_row, b_col,
    VECTORS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows times each vector over `count` steps.

    Products are added lane by lane and folded once at the end: the loop is loads and FMAs only.
    """
    lane = tl.arange(0, BK)
    accs = ()
    for _ in tl.static_range(VECTORS):
        accs = accs + (tl.zeros((BM, BK), dtype=tl.float32),)
    for step in range(first, first + count):
        k = step * BK + lane
        inside = (m < M)[:, None] & (k < K)[None, :]
        a = tl.load(rows + (k * a_col)[None, :], mask=inside, other=0.0).to(tl.float32)
        more = ()
        for i in tl.static_range(VECTORS):
            x = tl.load(x_ptr + i * b_col + k * b_row, mask=k < K, other=0.0).to(tl.float32)
            more = more + (accs[i] + a * x[None, :],)
        accs = more
    sums = ()
    for i in tl.static_range(VECTORS):
        sums = sums + (tl.sum(accs[i], 1),)
    return sums


@triton.jit
def gemv_partial(sums, work, flag, part, SPLIT: tl.constexpr, BM: tl.constexpr, AMD: tl.constexpr):
    """Leaves partial sums; the last to arrive gets (True, the whole sums)."""
    VECTORS: tl.constexpr = len(sums)
    own = work + part * (VECTORS * BM)
    for i in tl.static_range(VECTORS):
        tl.store(own + i * BM, sums[i], cache_modifier=".cg")
    settle(AMD)
    is_whole = tl.atomic_add(flag, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    tl.debug_barrier()
    if is_whole:
        totals = ()
        for _ in tl.static_range(VECTORS):
            totals = totals + (tl.zeros((BM,), dtype=tl.float32),)
        for nth in range(SPLIT):
            at = work + nth * (VECTORS * BM)
            more = ()
            for i in tl.static_range(VECTORS):
                more = more + (totals[i] + tl.load(at + i * BM, cache_modifier=".cg"),)
            totals = more
        sums = totals
        tl.store(flag, 0)
    return is_whole, sums


@triton.jit
def gemv(
    a_ptr, b_ptr, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, work, flags,
    M, K, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col,
    VECTORS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """A tall matrix times one to four vectors, at the speed of memory."""
    piece = tl.program_id(0)
    tile = piece // SPLIT
    part = piece - tile * SPLIT
    batch = tl.program_id(1).to(tl.int64)
    first, count = share(tl.cdiv(K, BK), SPLIT, part)
    m = tile * BM + tl.arange(0, BM)
    rows = a_ptr + batch * a_batch + (m.to(tl.int64) * a_row)[:, None]
    sums = gemv_sums(
        rows, b_ptr + batch * b_batch, m, first, count, M, K, a_col, b_row, b_col, VECTORS, BM, BK
    )
    is_whole = True
    if SPLIT > 1:
        nth = batch * (tl.num_programs(0) // SPLIT) + tile
        work += nth * (SPLIT * VECTORS * BM) + tl.arange(0, BM)
        is_whole, sums = gemv_partial(sums, work, flags + nth, part, SPLIT, BM, AMD)
    if is_whole:
        for i in tl.static_range(VECTORS):
            gemv_store(
                sums[i], c_ptr + batch * c_batch, bias_ptr, a_scale_ptr, b_scale_ptr, m, i, M,
                c_row, c_col, SWAP, SCALE, ACT,
            )  # fmt: skip
