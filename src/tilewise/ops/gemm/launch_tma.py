"""Launches of the Triton kernels that copy tiles with Hopper's tensor memory accelerator."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.gemm.arguments import (
    Arguments,
    C,
    Epilogue,
    View,
    accumulation,
    give_result,
    one_step,
    source,
    tile_constants,
)
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel
from tilewise.ops.gemm.launch_hopper import box_of, map_of, require_alignment
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import TRITON_TYPES, Launch, Pointer


def tma(
    kernel: GpuGemmKernel, p: GemmProblem, view: View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    require_alignment(aligned)
    args = Arguments(element(p.dtype).bytes)
    kind = TRITON_TYPES[p.dtype]
    a_row, b_row = view.a_strides[2] == 1, view.b_strides[2] == 1
    a_box = [1, *box_of(kernel.tile_m, kernel.tile_k, a_row)]
    b_box = [1, *box_of(kernel.tile_k, kernel.tile_n, b_row)]
    a = map_of(view.a, "A", view.a_strides, (p.batch, view.m, view.k), p.dtype)
    b = map_of(view.b, "B", view.b_strides, (p.batch, view.k, view.n), p.dtype)
    args.give("ad", f"tensordesc<{kind}{a_box}>", a)
    args.give("bd", f"tensordesc<{kind}{b_box}>", b)
    args.give("c_ptr", f"*{TRITON_TYPES[p.out_dtype]}", Pointer(tensor=C), 16)
    give_result(args, view, p, e)
    rows, cols = kernel.tiles(p)
    tiles = rows * cols * p.batch
    args.size("tiles", tiles)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    args.size("steps", -(-p.k // kernel.tile_k))
    args.size("M", view.m, view.c_strides[1] == 1)
    args.size("N", view.n, view.c_strides[2] == 1)
    args.batch_stride("c_batch", view.c_strides[0])
    args.stride("c_row", view.c_strides[1])
    args.stride("c_col", view.c_strides[2])
    args.constants |= {"A_ROW": a_row, "B_ROW": b_row}
    args.constants |= tile_constants(kernel) | accumulation(kernel)
    return one_step(
        args, source(args, "gemm_tma", kernel), (min(tiles, arch.compute_units * kernel.blocks), 1)
    )
