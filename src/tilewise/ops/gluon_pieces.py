# SPDX-License-Identifier: MIT
# The kernel languages know branches on constants, but not every form that ruff prefers.
# ruff: noqa: RET505, RUF005, SIM102
"""Pieces of Gluon kernels that ops share: the order of tiles, activations, partial sums.

Slices of a reduction leave fp32 partial sums in memory; whoever arrives last adds them in a fixed
order, so results do not depend on timing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.ops.gluon_names import barrier


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
def activate(x, ACT: gl.constexpr):
    if ACT == "relu":
        return gl.where(x < 0.0, 0.0, x)  # NaN stays
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
def in_line(x):
    """A tile in a line, in the order of its registers: 16 bytes of a thread, then the next one's.

    Products leave a thread two neighbours in each of two rows eight apart. Partial sums are read
    as they were written, so their order is free, and this one fills whole lines of the cache.
    """
    BM: gl.constexpr = x.shape[0]
    BN: gl.constexpr = x.shape[1]
    x = x.reshape([BM // 16, 2, 8, BN // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    return x.reshape([BM * BN])


@gluon.jit
def in_rows(x, like):
    """A line as the tile that `like` is."""
    BM: gl.constexpr = like.shape[0]
    BN: gl.constexpr = like.shape[1]
    x = x.reshape([BM // 16, BN // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return gl.convert_layout(x.reshape([BM, BN]), like.type.layout, assert_trivial=True)


@gluon.jit
def arrive_last(flag, cut):
    """Announces a stored partial sum; whether all the others had been announced before."""
    barrier()
    is_last = gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu") == cut - 1
    barrier()
    return is_last


@gluon.jit
def store_partials(accs, slot):
    for i in gl.static_range(len(accs)):
        line = in_line(accs[i])
        at = slot + gl.arange(0, line.shape[0], layout=line.type.layout)
        gl.store(at, line, cache_modifier=".cg")
        slot += line.shape[0]


@gluon.jit
def add_other(accs, slot):
    """The sum of what is at hand and a partial sum."""
    sums = ()
    for i in gl.static_range(len(accs)):
        line = in_line(accs[i])
        at = slot + gl.arange(0, line.shape[0], layout=line.type.layout)
        sums = sums + (in_rows(line + gl.load(at, cache_modifier=".cg"), accs[i]),)
        slot += line.shape[0]
    return sums


@gluon.jit
def add_all(like, slot, jump, cut):
    """The sum of `cut` partial sums, in their order."""
    sums = ()
    for i in gl.static_range(len(like)):
        line = in_line(like[i])
        at = slot + gl.arange(0, line.shape[0], layout=line.type.layout)
        total = gl.load(at, cache_modifier=".cg")
        for _ in range(1, cut):
            at += jump
            total += gl.load(at, cache_modifier=".cg")
        sums = sums + (in_rows(total, like[i]),)
        slot += line.shape[0]
    return sums


@gluon.jit
def leave_partial(accs, work, flag, first_slot, slots_apart, part, cut, SIZE: gl.constexpr):
    """Stores the partial sum of a tile in pieces; the last to arrive gets (True, the whole sum).

    The second of two takes its own from registers, and does not store it if it comes late enough:
    two numbers give the same sum in either order.
    """
    slot = work + first_slot.to(gl.int64) * SIZE
    jump = slots_apart.to(gl.int64) * SIZE
    is_last = cut < 0
    # Storing less takes no longer than looking; taller tiles would spill.
    if SIZE >= 8192 and accs[0].shape[0] <= 128:
        if cut == 2:
            is_last = gl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 1
            barrier()
    if not is_last:
        store_partials(accs, slot + part * jump)
        is_last = arrive_last(flag, cut)
    if is_last:
        if cut == 2:
            accs = add_other(accs, slot + (1 - part) * jump)
        else:
            accs = add_all(accs, slot, jump, cut)
        gl.store(flag, 0)
    return is_last, accs
