"""Launches of dense CUDA kernels for the gradient of a filter, by im2col, rows or gathering."""

from __future__ import annotations

from dataclasses import replace

from tilewise.core.arch import Arch
from tilewise.ops.conv.epilogue import FIRST, OUT, SECOND
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.kernels.dense_rules import smem_bytes
from tilewise.ops.conv.launch_pieces import (
    check_aligned,
    cuda_source,
    cut,
    im2col_map,
    rows_map,
    sum_kind,
    walk_arguments,
)
from tilewise.ops.conv.patches import Outer, outer_pitches, summed
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.walk import Axis, Walk, forward
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step, TensorMap

LOADERS = {"im2col": 0, "rows": 1, "gather": 2, "taps": 3}
PANEL = 64
"""Channels, and pixels, of what a copy brings."""


def launch_wgrad(
    kernel: DenseConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
) -> Launch:
    """The product over pixels, and the sum of its slices where they are cut."""
    k, p = kernel, problem
    outer = outer_pitches(p, strides)
    check_aligned(k, is_aligned, outer)
    tiles = -(-(p.k // p.g) // k.tile_m) * -(-_columns(k, p) // k.tile_n) * p.g
    steps = -(-p.out_pixels // PANEL)
    if k.persistent:
        grid = min(arch.compute_units * k.blocks, tiles * steps)
        splits = _parts(tiles, steps, grid)
    else:
        splits = cut(tiles, steps, k, arch)
        grid = tiles * splits
    source = _gathered(p, outer) if k.family == "gather" else _maps(k, p, outer)
    return sum_slices(k, p, outer[2], splits, _product(k, p, outer, source, splits, grid))


def sum_slices(
    kernel: DenseConvKernel, problem: ConvProblem, pitch: int, splits: int, product: Step
) -> Launch:
    """The product's step, with what goes before and behind it where its reduction is cut."""
    if splits == 1:
        return Launch(steps=(product,))
    return summed(product, problem, splits, pitch, is_atomic=kernel.atomic)


def _parts(tiles: int, steps: int, blocks: int) -> int:
    """Parts of a tile at most, where blocks share the steps of all tiles evenly."""
    if tiles % blocks == 0:
        return 1
    if blocks % tiles == 0 and steps % (blocks // tiles) == 0:
        return blocks // tiles
    least = tiles * steps // blocks
    return (steps - 2) // least + 2


def _columns(k: DenseConvKernel, p: ConvProblem) -> int:
    """Of the product: entries of a filter, in whole panels where TMA brings them."""
    c = p.c // p.g
    return p.taps * (c if k.family == "gather" else -(-c // PANEL) * PANEL)


def _product(
    k: DenseConvKernel,
    p: ConvProblem,
    outer: Outer,
    source: dict[str, Argument],
    splits: int,
    grid: int,
) -> Step:
    arguments: dict[str, Argument] = {
        **source,
        "result": Pointer(tensor=OUT),
        "partial": Scratch(offset=0) if splits > 1 else Pointer(tensor=OUT),
        "pixels": p.out_pixels,
        "in_channels": p.c // p.g,
        "out_channels": p.k // p.g,
        "groups": p.g,
        "splits": splits,
        "result_pitch": outer[2],
        "slice_elements": p.filter_elements,
        **walk_arguments(p, forward(p)),
    }
    constants: dict[str, int | str] = {
        "ELEMENT": k.dtype,
        "RESULT": p.out_dtype,
        "TILE_M": k.tile_m,
        "TILE_N": k.tile_n,
        "STAGES": k.stages,
        "MATH_GROUPS": k.math_groups,
        "LOADER": LOADERS[k.family],
        "LOAD_WARPS": k.load_warps,
        "SPATIAL": 3 if p.ndim == 3 else 2,
        "SUM": sum_kind(k, splits),
        "BLOCKS": k.blocks,
        "STREAM": int(k.persistent),
    }
    if k.family == "gather":
        constants["VECTOR"] = _vector(p, outer)
    else:
        constants["GRADIENT_ROWS"] = int(_is_dense(p, outer[1]))
        constants["LOADER"] = LOADERS[_loader(k, p, outer)]
    return Step(
        source=cuda_source("wgrad", arguments, constants),
        grid=(grid, 1, 1),
        threads=k.threads,
        smem_bytes=smem_bytes(k),
        arguments=tuple(arguments.values()),
    )


def _is_dense(p: ConvProblem, stride: int) -> bool:
    """Whether the gradient's images lie one behind the other."""
    return p.n == 1 or stride == p.out_d * p.out_h * p.out_w * p.k


def _loader(k: DenseConvKernel, p: ConvProblem, outer: Outer) -> str:
    """Rows of a matrix need images without gaps; im2col walks them with gaps as well."""
    is_dense = p.n == 1 or outer[0] == p.d * p.h * p.w * p.c
    return "im2col" if k.family == "rows" and not is_dense else k.family


def _vector(p: ConvProblem, outer: Outer) -> int:
    """Elements that one copy brings: all lie in one group's channels."""
    sizes = (p.c // p.g, p.k // p.g, *outer[:2])
    return next(v for v in (8, 4, 2, 1) if not any(size % v for size in sizes))


def _gathered(p: ConvProblem, outer: Outer) -> dict[str, Argument]:
    return {
        "dy": Pointer(tensor=SECOND),
        "x": Pointer(tensor=FIRST),
        "image_d": p.d,
        "image_h": p.h,
        "image_w": p.w,
        "image_pitch": p.c,
        "image_stride": outer[0],
        "dy_pitch": p.k,
        "dy_stride": outer[1],
    }


def _maps(k: DenseConvKernel, p: ConvProblem, outer: Outer) -> dict[str, Argument]:
    return {"dy_map": _dy_map(k, p, outer[1]), "x_map": _x_map(k, p, outer)}


def _x_map(k: DenseConvKernel, p: ConvProblem, outer: Outer) -> TensorMap:
    if _loader(k, p, outer) == "rows":
        return rows_map(k, FIRST, channels=p.c, rows=p.in_pixels, box=(PANEL, PANEL))
    return im2col_map(*(k, p, forward(p)), pixels=PANEL, channels=PANEL, stride=outer[0], count=p.c)


def _dy_map(k: DenseConvKernel, p: ConvProblem, stride: int) -> TensorMap:
    """Pixels of the gradient one after the other, over gaps between images where there are any."""
    if _is_dense(p, stride):
        return rows_map(k, SECOND, channels=p.k, rows=p.out_pixels, box=(PANEL, PANEL))
    itself = replace(
        p, direction="bwd_data", y=1, x=1, z=1, stride_d=1, stride_h=1, stride_w=1,
        pad_d=0, pad_h=0, pad_w=0, d=p.out_d, h=p.out_h, w=p.out_w,
    )  # fmt: skip
    made = im2col_map(
        *(k, itself, _every_pixel(p)), pixels=PANEL, channels=PANEL, stride=stride, count=p.k
    )
    return replace(made, tensor=SECOND)


def _every_pixel(p: ConvProblem) -> Walk:
    d, h, w = (
        Axis(size=size, stride=1, corner=0, taps=1, reach=0, tap_first=0, tap_step=0)
        for size in (p.out_d, p.out_h, p.out_w)
    )
    return d, h, w
