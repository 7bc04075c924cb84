"""Launches of CUDA kernels for convolutions with few channels a group."""

from __future__ import annotations

from dataclasses import replace

from tilewise.core.arch import Arch
from tilewise.ops.conv.epilogue import OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.grouped import (
    GroupedConvKernel,
    Slots,
    patch,
    read_group,
    smem_bytes,
    written,
    written_group,
)
from tilewise.ops.conv.patches import (
    Image,
    corners,
    cuda_step,
    finishing,
    finishing_pointers,
    geometry,
    images,
    leads,
    outer_pitches,
    patch_arguments,
    summed,
    walkers,
)
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.usual import usual_layer
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step, TensorMap


def launch_grouped(
    kernel: GroupedConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step over pixels; for the filter's gradient slices and a second step that adds them."""
    if kernel.is_weight:
        return _weight(kernel, problem, arch, strides, is_aligned)
    return Launch(steps=(_pixels(kernel, problem, arch, strides, is_aligned, epilogue),))


def representative(kernel: GroupedConvKernel) -> ConvProblem:
    """A 3x3 layer of groups that share products, or of groups that need not."""
    count, smallest = (384, 32) if kernel.family == "padded" else (256, 64)
    return usual_layer(kernel, c=count, k=count, g=smallest if kernel.spreads_nonfinite else 16)


def _constants(kernel: GroupedConvKernel, p: ConvProblem) -> dict[str, int | str]:
    return {
        **geometry(p),
        "ELEMENT": p.dtype,
        "READ_GROUP": read_group(p),
        "WRITTEN_GROUP": written_group(p),
        "UNITS": kernel.slots(p).units,
        "MERGED": kernel.slots(p).merged,
        "TILE_H": kernel.tile_h,
        "TILE_W": kernel.tile_w,
        "STAGES": kernel.stages,
        "BLOCKS": kernel.blocks,
    }


def _map(image: Image, slots: Slots, unit: int, box: tuple[int, int, int, int]) -> TensorMap:
    """Copies of `box` (depth, height, width, channels); where units are padded, of each of a block.

    The channels of a unit and the units are dimensions, then, and that of the depth, one, is none.
    """
    made = image.map(box)
    if not slots.units:
        return made
    deep, down, across, channels = box
    w, h, _, n = made.strides
    return replace(
        made,
        sizes=(unit, image.w, image.c // unit, image.h, image.n),
        strides=(w, unit * w // image.c, h, n),
        box=(channels, across, slots.units, down, deep),
    )


def _pixels(
    kernel: GroupedConvKernel,
    p: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Step:
    x, y = images(p, strides, is_aligned)
    source, target = (y, x) if p.direction == "bwd_data" else (x, y)
    deep, down, across = (corners(p, dim)[1] for dim in "dhw")
    tiles_w, tiles_h = -(-across // kernel.tile_w), -(-down // kernel.tile_h)
    tiles = p.n * deep * tiles_h * tiles_w
    slots = kernel.slots(p)
    columns = slots.columns
    arguments: dict[str, Argument] = {
        "image": _map(source, slots, slots.read_unit, (*patch(kernel, p), slots.read)),
        "stored": _map(target, slots, slots.written_unit, (*written(kernel, p), slots.written)),
        "weights": Pointer(tensor=SECOND),
        **finishing_pointers(epilogue),
        "filter_pitch": outer_pitches(p, strides)[SECOND],
        "channels_written": target.c,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tiles_d": deep,
        "tile_count": tiles,
        **patch_arguments(p, target),
    }
    constants = _constants(kernel, p) | leads(p) | finishing(epilogue)
    constants["BACKWARD"] = int(p.direction == "bwd_data")
    return cuda_step(
        "grouped",
        "grouped",
        arguments,
        constants,
        grid=(columns, walkers(tiles, columns, kernel.blocks, arch), 1),
        threads=32 * (kernel.warps + 1),
        smem_bytes=smem_bytes(kernel, p),
    )


def _weight(
    kernel: GroupedConvKernel,
    p: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
) -> Launch:
    x, y = images(p, strides, is_aligned)
    tiles_w, tiles_h = -(-p.out_w // kernel.tile_w), -(-p.out_h // kernel.tile_h)
    tiles = p.n * p.out_d * tiles_h * tiles_w
    slots = kernel.slots(p)
    columns = slots.columns
    blocks = walkers(tiles, columns * p.z, kernel.blocks, arch)
    arguments: dict[str, Argument] = {
        "image": _map(x, slots, slots.read_unit, (*patch(kernel, p), slots.read)),
        "result": _map(
            y, slots, slots.written_unit, (1, kernel.tile_h, kernel.tile_w, slots.written)
        ),
        "slices": Scratch(offset=0),
        "slice_size": p.filter_elements,
        "filter_count": p.k,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tiles_d": p.out_d,
        "tile_count": tiles,
        "pad_d": p.pad_d,
        "pad_h": p.pad_h,
        "pad_w": p.pad_w,
    }
    step = cuda_step(
        "grouped_weight",
        "grouped_weight",
        arguments,
        _constants(kernel, p) | {"ATOMIC": int(kernel.atomic)},
        grid=(columns, blocks, p.z),
        threads=32 * kernel.warps,
        smem_bytes=smem_bytes(kernel, p),
    )
    return summed(step, p, blocks, outer_pitches(p, strides)[OUT], is_atomic=kernel.atomic)
