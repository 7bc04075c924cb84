"""Launches of the kernels that copy tiles with Hopper's tensor memory accelerator."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.sizes import cheapest, either
from tilewise.errors import TensorError
from tilewise.ops.gemm.arguments import (
    Arguments,
    C,
    Epilogue,
    Strides,
    View,
    give_result,
    give_workspace,
    one_step,
    source,
    tile_constants,
)
from tilewise.ops.gemm.kernels.specialised import (
    SpecialisedGemmKernel,
    TwoGroupGemmKernel,
    staging,
)
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import TRITON_TYPES, Launch, Pointer, TensorMap, Word

MOST_SLICES = 16
HELP_STEPS = 8.0
"""What a helper's partial sum takes to leave and again to add, in steps of the reduction: tiles of
128x192 took 5 and 7 on the H200, smaller ones, whose steps are shorter, up to 8."""
SHORTEST_CUT = 4
"""Reductions of fewer steps are not cut to fill the last wave."""


class Handout(NamedTuple):
    """How work is handed out: the first `whole` tiles whole, the others in `slices`.

    With `most` there are two, and programs that have a tile do so many steps of it.
    """

    programs: int
    pieces: int
    whole: int
    slices: int
    most: int = 0


class Traits(NamedTuple):
    """What a warp-specialised kernel is compiled for."""

    BM: int
    BN: int
    BK: int
    GROUP_M: int
    STAGES: int
    A_ROW: bool
    """Whether A lies along K, and B along N."""
    B_ROW: bool
    TMA_STORE: bool
    BUFFERS: int
    """Pieces of a finished tile that are on their way at once."""
    SWAP: bool
    SCALE: str
    ACT: str
    acc_type: Word
    out_type: Word
    layout: Word | None = None
    """Of a tile, where it is not of several parts side by side."""
    PARTS: int = 1
    """Pieces in which a tile is stored."""
    NARROW: int = 0
    """The width of such a piece, where parts differ in width."""
    CUT: bool = False
    """Whether reductions may be cut."""
    SHARE: bool = False
    """Whether two groups share each tile, rather than take every second one."""


def box_of(rows: int, cols: int, along_rows: bool) -> tuple[int, int]:
    return (rows, cols) if along_rows else (cols, rows)


def _equal_slices(size: int, rest: int, steps: int, room: int) -> tuple[float, int]:
    """Cost and number of the slices in which tiles of `size` of a last wave are done soonest.

    Leaving a partial sum and adding one up take 5 and 7 steps for tiles of 128x192 on the H200,
    about 2 for the smallest.
    """
    share = size / (128 * 192)
    leave, add = 2.0 + 3.0 * share, 1.7 + 5.3 * share

    def cost(slices: int) -> float:
        added: int = either(slices > 2, slices, 1)  # the second of two has its own at hand
        return -(-rest * slices // room) * (steps / slices + leave) + add * added

    return cheapest(2, min(MOST_SLICES, steps // 2), cost)


def _helped(rest: int, steps: int, room: int) -> tuple[float, int, int]:
    """Cost, tiles per helper and steps not left to helpers, of two unequal slices.

    Helpers are the programs without a tile in the last wave; each does the end of several.
    """
    turns = -(-rest // (room - rest))
    most = min(steps - 1, round(turns * (steps + HELP_STEPS) / (turns + 1)))
    return most + 2 * HELP_STEPS, turns, most


def _cut_plan(kernel: SpecialisedGemmKernel, tiles: int, steps: int, arch: Arch) -> Handout:
    room = arch.compute_units * kernel.blocks
    rest = tiles % room
    slices, whole = kernel.split_k, tiles if kernel.split_k == 1 else 0
    if kernel.fill and rest and steps >= SHORTEST_CUT:
        whole = tiles - rest
        cost, slices = _equal_slices(kernel.tile_m * kernel.tile_n, rest, steps, room)
        helped_cost, turns, most = _helped(rest, steps, room)
        if helped_cost < min(cost, steps):
            programs = room if whole or turns > 1 else 2 * rest
            return Handout(programs, whole + turns * programs, whole, 2, most)
        if cost >= steps:
            slices, whole = 1, tiles
    pieces = whole + (tiles - whole) * slices
    return Handout(min(room, pieces), pieces, whole, slices)


def map_of(
    tensor: int, name: str, strides: Strides, sizes: tuple[int, int, int], dtype: str
) -> TensorMap:
    """Over [batch, outer, contiguous]; what TMA cannot address is refused."""
    batch, rows, cols = sizes
    size = element(dtype).bytes
    by_rows = strides[2] == 1
    if not by_rows and strides[1] != 1:
        raise TensorError(f"{name} has strides {strides[1:]}; TMA needs one of them to be 1")
    outer, inner, pitch = (rows, cols, strides[1]) if by_rows else (cols, rows, strides[2])
    jump = strides[0] if batch > 1 else outer * pitch
    if pitch * size % 16 or jump * size % 16 or pitch < inner:
        raise TensorError(
            f"{name} has strides {strides} of {size}-byte elements; TMA needs multiples of 16 bytes"
        )
    return TensorMap(
        tensor=tensor,
        dtype=dtype,
        sizes=(inner, outer, batch),
        strides=(pitch * size, jump * size),
    )


def require_alignment(aligned: bool) -> None:
    if not aligned:
        raise TensorError("TMA needs addresses that are multiples of 16 bytes")


def _descriptor(kind: str, box: tuple[int, ...]) -> str:
    return f"tensordesc<{kind}{list(box)}>"


def specialised(
    kernel: SpecialisedGemmKernel,
    p: GemmProblem,
    view: View,
    arch: Arch,
    aligned: bool,
    e: Epilogue,
) -> Launch:
    require_alignment(aligned)
    args = Arguments(element(p.dtype).bytes)
    _specialised_operands(args, kernel, p, view)
    _specialised_result(args, kernel, p, view, arch, e)
    rows, cols = kernel.tiles(p)
    tiles, steps = rows * cols * p.batch, -(-p.k // kernel.tile_k)
    plan = _cut_plan(kernel, tiles, steps, arch)
    total, zeroed = _specialised_work(args, kernel, tiles, plan)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    args.size("steps", steps)
    args.size("M", view.m)
    args.size("N", view.n)
    _specialised_strides(args, view)
    args.constants |= {"STAGES": kernel.stages}
    args.constants |= tile_constants(kernel) | _layout_constants(kernel, p)
    known = [name for name in Traits._fields if name in args.constants]
    args.constants["T"] = Traits(**{name: args.constants.pop(name) for name in known})
    made = source(
        args, _specialised_function(kernel), kernel, gluon=True, maxnreg=_register_cap(kernel)
    )
    return one_step(args, made, (plan.programs, 1), total, zeroed)


def _specialised_operands(
    args: Arguments, kernel: SpecialisedGemmKernel, p: GemmProblem, view: View
) -> None:
    """Maps of A and B; tiles as wide as two powers of two read B in two boxes."""
    a = map_of(view.a, "A", view.a_strides, (p.batch, view.m, view.k), p.dtype)
    b = map_of(view.b, "B", view.b_strides, (p.batch, view.k, view.n), p.dtype)
    a_row, b_row = view.a_strides[2] == 1, view.b_strides[2] == 1
    if element(p.dtype).bytes != 2 and (not a_row or b_row):
        raise TensorError(f"in {p.dtype} warpgroup products need both operands along K")
    kind = TRITON_TYPES[p.dtype]
    wide, extra = kernel.columns
    args.give("ad", _descriptor(kind, (1, *box_of(kernel.tile_m, kernel.tile_k, a_row))), a)
    args.give("bd", _descriptor(kind, (1, *box_of(kernel.tile_k, wide, b_row))), b)
    if extra:
        args.give("ed", _descriptor(kind, (1, *box_of(kernel.tile_k, extra, b_row))), b)
    args.constants |= {"A_ROW": a_row, "B_ROW": b_row}


def _specialised_work(
    args: Arguments, kernel: SpecialisedGemmKernel, tiles: int, plan: Handout
) -> tuple[int, int]:
    """Arguments of how tiles are handed out; the workspace's bytes and how many must be zero."""
    if isinstance(kernel, TwoGroupGemmKernel):
        args.size("tiles", tiles)
        args.constants["SHARE"] = kernel.family == "duo"
        return 0, 0
    slots = (tiles - plan.whole) * plan.slices if plan.slices > 1 else 0
    is_cut = kernel.fill or kernel.split_k > 1
    slot_bytes = 4 * kernel.tile_m * kernel.tile_n
    # Kernels that may cut take the addresses even where this problem needs none.
    needs = give_workspace(args, kernel, tiles, max(slots, is_cut), slot_bytes)
    args.size("tiles", tiles)
    args.size("pieces", plan.pieces)
    args.size("whole", plan.whole)
    args.size("cut", plan.slices)
    args.size("most", plan.most)
    args.constants["CUT"] = is_cut
    return needs


def _specialised_function(kernel: SpecialisedGemmKernel) -> str:
    if isinstance(kernel, TwoGroupGemmKernel):
        return "gemm_two_groups"
    return "gemm_uneven" if kernel.columns[1] else "gemm_ws"


def _specialised_result(
    args: Arguments,
    kernel: SpecialisedGemmKernel,
    p: GemmProblem,
    view: View,
    arch: Arch,
    e: Epilogue,
) -> None:
    """Through shared memory and TMA where C allows it, else from registers."""
    out, size = TRITON_TYPES[p.out_dtype], element(p.out_dtype).bytes
    room = staging(kernel, size, arch)
    batch, row, col = view.c_strides
    strides = (batch, col, row) if view.is_swapped else (batch, row, col)
    rows, cols = (view.n, view.m) if view.is_swapped else (view.m, view.n)
    descriptor = None
    if room and strides[2] == 1:
        try:
            descriptor = map_of(C, "C", strides, (p.batch, rows, cols), p.out_dtype)
        except TensorError:
            descriptor = None
    parts, buffers = room if room and descriptor else (1, 1)
    if descriptor:
        narrow, tall = kernel.tile_n // parts, kernel.tile_m
        tall //= kernel.groups
        box = (1, narrow, tall) if view.is_swapped else (1, tall, narrow)
        args.give("cd", _descriptor(out, box), descriptor)
        args.constants["c_ptr"] = None
    else:
        args.constants["cd"] = None
        args.give("c_ptr", f"*{out}", Pointer(tensor=C))
    args.constants |= {"TMA_STORE": descriptor is not None, "BUFFERS": buffers}
    extra = kernel.columns[1]
    if extra:
        args.constants["NARROW"] = kernel.tile_n // parts if descriptor else extra
    else:
        args.constants["PARTS"] = parts
    give_result(args, view, p, e)


def _specialised_strides(args: Arguments, view: View) -> None:
    names = ("c_batch", "c_row", "c_col")
    if args.constants["TMA_STORE"]:
        args.constants |= dict.fromkeys(names, 0)
        return
    for name, stride in zip(names, view.c_strides, strict=True):
        if stride in (0, 1):
            args.constants[name] = stride
        else:
            args.give(name, "i64", stride)


def _layout_constants(kernel: SpecialisedGemmKernel, p: GemmProblem) -> dict[str, Any]:
    def layout(columns: int) -> Word:
        return Word(
            name="NVMMADistributedLayout",
            arguments=(
                ("version", (3, 0)),
                ("warps_per_cta", (kernel.warps, 1)),
                ("instr_shape", (16, min(columns, 256), 32 // element(p.dtype).bytes)),
            ),
        )

    kinds = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int32": "int32"}
    wide, extra = kernel.columns
    both = {"WIDTHS": (wide, extra), "layouts": (layout(wide), layout(extra))}
    return {
        **(both if extra else {"layout": layout(wide)}),
        "acc_type": Word(name="int32" if p.dtype == "int8" else "float32"),
        "out_type": Word(name=kinds[p.out_dtype]),
    }


def _register_cap(kernel: SpecialisedGemmKernel) -> int | None:
    """Registers per thread at launch; math warps then take over what the load warp gives up.

    The load warp counts as four, so a block of w math warps launches w + 4.
    """
    if isinstance(kernel, TwoGroupGemmKernel) or kernel.warps > 4:
        return 168
    return {1: None, 2: 128, 3: 80, 4: 64}[kernel.blocks]
