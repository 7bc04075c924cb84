"""What the launches of CUDA convolutions have in common: maps, arguments, sums of slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.errors import TensorError
from tilewise.ops.conv.epilogue import (
    FIRST,
    OUT,
    SUMS,
    Epilogue,
)
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.kernels.dense_rules import ROW_BYTES, chunk
from tilewise.ops.conv.patches import Outer, finishing, finishing_pointers
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.usual import usual_layer
from tilewise.ops.conv.walk import DIMS, Walk, source_sizes
from tilewise.ops.launch import Argument, CudaSource, Im2col, Pointer, Scratch, Step, TensorMap

DIRECT, SLICES, ATOMIC = range(3)
"""What becomes of a tile's sums; see `cuda/store.cuh`."""
REDUCE_THREADS = 256
WIDE = ("result_", "image_stride", "filter_stride", "dy_stride", "slice_")
"""How the names of 64-bit arguments begin."""


def check_aligned(kernel: DenseConvKernel, is_aligned: bool, outer: Outer) -> None:
    """Raises where copies cannot reach a tensor; gathering ones are shorter where they must be."""
    if not is_aligned:
        raise TensorError(
            f"{kernel.name} copies 16 bytes at a time, but an address is no multiple of 16; "
            "give tensors that begin at one"
        )
    far = next((step for step in outer[:2] if step % chunk(kernel)), None)
    if kernel.family != "gather" and far is not None:
        raise TensorError(
            f"{kernel.name} copies 16 bytes at a time, but images or filters lie {far} elements "
            f"apart; give tensors where it is a multiple of {chunk(kernel)}"
        )


def im2col_map(
    kernel: DenseConvKernel,
    problem: ConvProblem,
    walk: Walk,
    *,
    pixels: int,
    channels: int,
    stride: int,
    count: int,
) -> TensorMap:
    """The first operand's images of `count` channels as TMA's im2col mode walks them."""
    axes = (walk[2], walk[1], walk[0])[: 3 if problem.ndim == 3 else 2]
    d, h, w = source_sizes(problem)
    extents = (w, h, d)[: len(axes)]
    return TensorMap(
        tensor=FIRST,
        dtype=stored(kernel.dtype),
        sizes=(count, *extents, problem.n),
        strides=_image_strides(kernel, extents, count, stride),
        steps=(1, *(axis.stride for axis in axes), 1),
        swizzle=channels * element(kernel.dtype).bytes,
        im2col=Im2col(
            lower=tuple(axis.corner for axis in axes),
            upper=tuple(axis.upper(n) for axis, n in zip(axes, extents, strict=True)),
            channels=channels,
            pixels=pixels,
        ),
    )


def box_map(
    kernel: DenseConvKernel,
    tensor: int,
    sizes: tuple[int, int, int],
    *,
    images: int,
    channels: int,
    stride: int,
    box: tuple[int, int, int],
    is_3d: bool,
) -> TensorMap:
    """Images of depth, height, width `sizes`, copied in boxes of (channels, width, height)."""
    d, h, w = sizes
    extents = (w, h, d) if is_3d else (w, h)
    return TensorMap(
        tensor=tensor,
        dtype=stored(kernel.dtype),
        sizes=(channels, *extents, images),
        strides=_image_strides(kernel, extents, channels, stride),
        box=(*box, *(1 for _ in extents[1:])),
        swizzle=ROW_BYTES,
    )


def _image_strides(
    kernel: DenseConvKernel, extents: tuple[int, ...], channels: int, stride: int
) -> tuple[int, ...]:
    """Bytes, of all but the channels: packed images, `stride` elements apart."""
    size = element(kernel.dtype).bytes
    inner = (channels * prod(extents[:at]) for at in range(len(extents)))
    return tuple(size * step for step in (*inner, stride))


def rows_map(
    kernel: DenseConvKernel, tensor: int, *, channels: int, rows: int, box: tuple[int, int]
) -> TensorMap:
    """Pixels as rows of a matrix."""
    return TensorMap(
        tensor=tensor,
        dtype=stored(kernel.dtype),
        sizes=(channels, rows),
        strides=(element(kernel.dtype).bytes * channels,),
        box=box,
        swizzle=ROW_BYTES,
    )


def by_group(made: TensorMap, at: int, groups: int) -> TensorMap:
    """The same with dimension `at` cut into one of a group's own and one of the groups.

    What a box reaches beyond the group is zero, then, where it was the next group's.
    """
    strides = (element(made.dtype).bytes, *made.strides)
    own = made.sizes[at] // groups
    return replace(
        made,
        sizes=(*made.sizes[:at], own, groups, *made.sizes[at + 1 :]),
        strides=(*strides[1 : at + 1], own * strides[at], *strides[at + 1 :]),
        box=(*made.box[: at + 1], 1, *made.box[at + 1 :]),
    )


def walk_arguments(problem: ConvProblem, walk: Walk) -> dict[str, Argument]:
    """The numbers of `WALK_PARAMETERS`."""
    p, (d, h, w) = problem, walk
    values: dict[str, Argument] = {
        f"{what}_{dim}": getattr(axis, what)
        for what in ("size", "stride", "corner", "taps", "reach")
        for dim, axis in zip(DIMS, walk, strict=True)
    }
    return values | {
        "tap_first": (d.tap_first * p.y + h.tap_first) * p.x + w.tap_first,
        "tap_d": d.tap_step * p.y * p.x,
        "tap_h": h.tap_step * p.x,
        "tap_w": w.tap_step,
    }


def stored(dtype: str) -> str:
    """The type as memory holds it."""
    return "fp32" if dtype == "tf32" else dtype


def cut(tiles: int, steps: int, kernel: DenseConvKernel, arch: Arch) -> int:
    """Slices of the reduction that fill the device without a further wave."""
    room = kernel.fill * kernel.blocks * arch.compute_units
    return max(1, min(room // max(1, tiles), steps))


def sum_kind(kernel: DenseConvKernel, splits: int) -> int:
    """What becomes of a tile's sums."""
    if splits == 1:
        return DIRECT
    return ATOMIC if kernel.atomic else SLICES


def reduce_step(
    *,
    slices: int,
    rows: int,
    pitch: int,
    sizes: tuple[int, int, int],
    places: Mapping[str, Argument],
    dtype: str,
    epilogue: Epilogue,
) -> Step:
    """Adds slices of [rows, pitch] at the workspace's start up, and finishes the result."""
    vector = 4 if pitch % 4 == 0 else 1
    partial: Argument = Scratch(offset=0) if slices else Pointer(tensor=OUT)
    arguments: dict[str, Argument] = {
        "partial": partial,
        "result": Pointer(tensor=OUT),
        **finishing_pointers(epilogue),
        "slices": slices,
        "rows": rows,
        "pitch": pitch,
        **dict(zip(("size_d", "size_h", "size_w"), sizes, strict=True)),
        **places,
    }
    return Step(
        source=cuda_source(
            "reduce",
            arguments,
            {"RESULT": dtype, "VECTOR": vector, **finishing(epilogue)},
        ),
        grid=(-(-rows * pitch // vector // REDUCE_THREADS), 1, 1),
        threads=REDUCE_THREADS,
        overlaps=slices > 0,
        arguments=tuple(arguments.values()),
    )


def sum_columns_step(rows: int, columns: int) -> Step:
    """Adds rows of sums over pixels at the workspace's start up, into the call's own tensor."""
    arguments: dict[str, Argument] = {
        "partial": Scratch(offset=0),
        "out": Pointer(tensor=SUMS),
        "rows": rows,
        "columns": columns,
    }
    return Step(
        source=cuda_source("sum_columns", arguments, {}),
        grid=(-(-columns // 32), 1, 1),
        threads=1024,
        smem_bytes=1024 + 4096,
        overlaps=True,
        arguments=tuple(arguments.values()),
    )


def cuda_source(
    name: str, arguments: dict[str, Argument], constants: dict[str, int | str]
) -> CudaSource:
    """The kernel called `name`, of the file of that name."""
    return CudaSource(
        file=f"conv/cuda/{name}.cuh",
        function=name,
        signature={word: kind_of(word, value) for word, value in arguments.items()},
        constants=constants,
    )


def kind_of(name: str, value: Argument) -> str:
    """How a kernel's signature declares an argument."""
    if isinstance(value, TensorMap):
        return "map"
    if isinstance(value, Pointer | Scratch):
        return "*"
    return "i64" if name.startswith(WIDE) else "i32"


def representative(kernel: DenseConvKernel) -> ConvProblem:
    """A layer of the usual kind."""
    is_line = kernel.family == "halo" and kernel.is_weight
    lines = kernel.math_groups if is_line else 1 if kernel.family == "rows" else 3
    columns = min(lines, 3) if kernel.family == "rows" else 3
    count = 32 if kernel.family == "taps" else 256
    pads = {"pad_h": lines // 2, "pad_w": columns // 2}
    return usual_layer(kernel, c=count, k=count, y=lines, x=columns, **pads)
