"""What a GPU GEMM kernel is compiled from and called with, for one problem and set of strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import Kernel
from tilewise.core.sizes import cheapest
from tilewise.ops.gemm.arguments import (
    A_SCALE,
    B_SCALE,
    A,
    Arguments,
    B,
    C,
    Epilogue,
    Strides,
    View,
    accumulation,
    give_result,
    give_workspace,
    one_step,
    source,
    tile_constants,
)
from tilewise.ops.gemm.kernels.gemv import GemvKernel
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel
from tilewise.ops.gemm.kernels.pointer import PointerGemmKernel
from tilewise.ops.gemm.kernels.smallk import SmallKGemmKernel
from tilewise.ops.gemm.kernels.specialised import TwoGroupGemmKernel, WsGemmKernel
from tilewise.ops.gemm.kernels.tma import TmaGemmKernel
from tilewise.ops.gemm.launch_hopper import specialised
from tilewise.ops.gemm.launch_tma import tma
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import Launch, Pointer, triton_type

__all__ = ["Epilogue", "default_strides", "launch", "representative", "strides_of"]


def default_strides(problem: GemmProblem) -> tuple[Strides, Strides, Strides]:
    """Of dense A, B and C in the problem's layout."""
    p = problem

    def dense(order: str, rows: int, cols: int) -> Strides:
        batch = rows * cols if p.batch > 1 else 0
        return (batch, cols, 1) if order == "r" else (batch, 1, rows)

    order = p.layout
    return dense(order[0], p.m, p.k), dense(order[1], p.k, p.n), dense(order[2], p.m, p.n)


def strides_of(problem: GemmProblem, shapes: Any) -> tuple[Strides, Strides, Strides]:
    """Normalised strides: those of sizes of one, which mean nothing, become the default ones."""
    p = problem
    extents = ((p.batch, p.m, p.k), (p.batch, p.k, p.n), (p.batch, p.m, p.n))
    result = []
    for given, extent, usual in zip(shapes, extents, default_strides(problem), strict=True):
        full = (0, *given) if len(given) == 2 else tuple(given)
        result.append(
            tuple(u if e == 1 else s for s, e, u in zip(full, extent, usual, strict=True))
        )
    return tuple(result)  # type: ignore[return-value]  # three operands in, three out


def representative(kernel: GpuGemmKernel) -> GemmProblem:
    """A problem of the usual kind for this kernel, to compile ahead of time for."""
    return kernel.usual


def launch(
    kernel: GpuGemmKernel,
    problem: GemmProblem,
    arch: Arch,
    *,
    strides: tuple[Strides, Strides, Strides] | None = None,
    is_aligned: bool = True,
    epilogue: Epilogue | None = None,
) -> Launch:
    """The kernel's source, grid and arguments.

    `is_aligned` says that every address is a multiple of 16 bytes.
    """
    view = _view(kernel, problem, strides or default_strides(problem))
    build = _BUILDERS[type(kernel)]
    return build(kernel, problem, view, arch, is_aligned, epilogue or Epilogue())


def _view(
    kernel: GpuGemmKernel, problem: GemmProblem, strides: tuple[Strides, Strides, Strides]
) -> View:
    p, (a, b, c) = problem, strides
    if not kernel.swaps(p):
        return View(p.m, p.n, p.k, A, B, a, b, c, A_SCALE, B_SCALE, False)
    flip = [(batch, col, row) for batch, row, col in (b, a, c)]
    return View(p.n, p.m, p.k, B, A, flip[0], flip[1], flip[2], B_SCALE, A_SCALE, True)


def _begun(view: View, p: GemmProblem, arch: Arch, aligned: bool, e: Epilogue) -> Arguments:
    """Operands, result, and what is done to it."""
    args, kind = Arguments(element(p.dtype).bytes), triton_type(p.dtype, arch)
    args.give("a_ptr", f"*{kind}", Pointer(tensor=view.a), 16 * aligned)
    args.give("b_ptr", f"*{kind}", Pointer(tensor=view.b), 16 * aligned)
    args.give("c_ptr", f"*{triton_type(p.out_dtype, arch)}", Pointer(tensor=C), 16 * aligned)
    give_result(args, view, p, e)
    return args


def _all_strides(args: Arguments, view: View, wide: bool = False) -> None:
    for name, strides in (("a", view.a_strides), ("b", view.b_strides), ("c", view.c_strides)):
        args.batch_stride(f"{name}_batch", strides[0])
        args.stride(f"{name}_row", strides[1], wide)
        args.stride(f"{name}_col", strides[2], wide)


def _give_view(args: Arguments, kernel: GpuGemmKernel, view: View, arch: Arch) -> None:
    """Sizes, strides, and which of them a kernel is compiled for."""
    a_col, b_row = view.a_strides[1] == 1, view.b_strides[2] == 1
    args.size("M", view.m, a_col or view.c_strides[1] == 1)
    args.size("N", view.n, b_row or view.c_strides[2] == 1)
    args.size("K", view.k, view.a_strides[2] == 1 or view.b_strides[1] == 1)
    _all_strides(args, view)
    args.constants |= {
        "AMD": arch.vendor == "amd",
        "A_COL": a_col and view.a_strides[2] != 1,
        "B_ROW": b_row and view.b_strides[1] != 1,
        "EVEN_K": view.k % kernel.tile_k == 0,
        **tile_constants(kernel),
        **accumulation(kernel),
    }


def _pointer(
    kernel: GpuGemmKernel, p: GemmProblem, view: View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    if kernel.family == "streamk":
        return _streamk(kernel, p, view, arch, aligned, e)
    args = _begun(view, p, arch, aligned, e)
    rows, cols = kernel.tiles(p)
    tiles = rows * cols * p.batch
    slots = tiles * (kernel.split_k if not kernel.atomic else 1) if kernel.split_k > 1 else 0
    total, zeroed = give_workspace(args, kernel, tiles, slots, 4 * kernel.tile_m * kernel.tile_n)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    _give_view(args, kernel, view, arch)
    args.constants |= {"SPLIT": kernel.split_k, "ATOMIC": kernel.atomic}
    return one_step(
        args, source(args, "gemm_pointer", kernel), (tiles * kernel.split_k, 1), total, zeroed
    )


def _stream_plan(kernel: GpuGemmKernel, tiles: int, steps: int, arch: Arch) -> tuple[int, int]:
    """(programs, tiles that are shared out by steps): the last wave and the one before it."""
    programs = min(arch.compute_units * kernel.blocks, tiles * steps)
    remainder = tiles % programs
    if not remainder:
        return programs, 0
    return programs, tiles if tiles < programs else programs + remainder


def _streamk(
    kernel: GpuGemmKernel, p: GemmProblem, view: View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    args = _begun(view, p, arch, aligned, e)
    rows, cols = kernel.tiles(p)
    tiles = rows * cols * p.batch
    programs, shared = _stream_plan(kernel, tiles, -(-p.k // kernel.tile_k), arch)
    slot_bytes = 4 * kernel.tile_m * kernel.tile_n
    total, zeroed = give_workspace(args, kernel, tiles, 2 * programs, slot_bytes)
    args.size("tiles", tiles)
    args.size("stream_tiles", shared)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    _give_view(args, kernel, view, arch)
    return one_step(args, source(args, "gemm_streamk", kernel), (programs, 1), total, zeroed)


def _shares(rows: int, strips: int, room: int) -> int:
    """Among how many programs the rows of a strip are dealt out, to be done soonest.

    Beginning a strip is taken to cost as much as one of its tiles.
    """

    def cost(shares: int) -> int:
        return -(-strips * shares // room) * (-(-rows // shares) + 1)

    most: int = cheapest(1, min(rows, max(1, 4 * room // strips)), cost)[1]
    return most


def _smallk(
    kernel: GpuGemmKernel, p: GemmProblem, view: View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    args = _begun(view, p, arch, aligned, e)
    rows, cols = kernel.tiles(p)
    strips = cols * p.batch
    shares = _shares(rows, strips, arch.compute_units * kernel.blocks)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    args.size("shares", shares)
    _give_view(args, kernel, view, arch)
    for unused in ("AMD", "GROUP_M"):
        del args.constants[unused]
    return one_step(args, source(args, "gemm_smallk", kernel), (strips * shares, 1))


def _gemv(
    kernel: GpuGemmKernel, p: GemmProblem, view: View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    args = _begun(view, p, arch, aligned, e)
    tiles = -(-view.m // kernel.tile_m)
    slots = tiles * kernel.split_k * p.batch if kernel.split_k > 1 else 0
    total, zeroed = give_workspace(args, kernel, tiles * p.batch, slots, 4 * kernel.tile_m * view.n)
    args.size("M", view.m, view.a_strides[1] == 1)
    args.size("K", view.k, view.a_strides[2] == 1 or view.b_strides[1] == 1)
    _all_strides(args, view, wide=True)
    args.constants |= {
        "VECTORS": view.n,
        "BM": kernel.tile_m,
        "BK": kernel.tile_k,
        "SPLIT": kernel.split_k,
        "AMD": arch.vendor == "amd",
    }
    return one_step(
        args, source(args, "gemv", kernel), (tiles * kernel.split_k, p.batch), total, zeroed
    )


_BUILDERS: dict[type[Kernel], Callable[..., Launch]] = {
    PointerGemmKernel: _pointer,
    GemvKernel: _gemv,
    SmallKGemmKernel: _smallk,
    TmaGemmKernel: tma,
    WsGemmKernel: specialised,
    TwoGroupGemmKernel: specialised,
}
