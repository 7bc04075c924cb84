"""Launches of CUDA kernels for a network's first layer."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.conv.epilogue import OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.stem import CHANNELS, StemConvKernel, patch, smem_bytes
from tilewise.ops.conv.patches import (
    Image,
    cuda_step,
    finishing,
    finishing_pointers,
    geometry,
    images,
    outer_pitches,
    summed,
    walkers,
)
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.usual import FIRST_LAYER, usual_layer
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step, TensorMap


def launch_stem(
    kernel: StemConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step over pixels; for the filter's gradient slices and a second step that adds them."""
    x, y = images(problem, strides, is_aligned)
    pitches = outer_pitches(problem, strides)
    if kernel.is_weight:
        return _weight(kernel, problem, arch, x, y, pitches[OUT])
    return Launch(steps=(_pixels(kernel, problem, arch, x, y, pitches[SECOND], epilogue),))


def representative(kernel: StemConvKernel) -> ConvProblem:
    """A 3x3 layer of stride 2 over images of three channels."""
    return usual_layer(kernel, **FIRST_LAYER)


def _constants(kernel: StemConvKernel, p: ConvProblem) -> dict[str, int | str]:
    return {
        **geometry(p),
        "ELEMENT": p.dtype,
        "IN_CHANNELS": p.c,
        "PAD_W": p.pad_w,
        "TILE_H": kernel.tile_h,
        "TILE_W": kernel.tile_w,
        "STAGES": kernel.stages,
        "BLOCKS": kernel.blocks,
    }


def _rows(kernel: StemConvKernel, p: ConvProblem, x: Image) -> TensorMap:
    """The image as rows of elements."""
    size, (down, across) = element(p.dtype).bytes, patch(kernel, p)
    return TensorMap(
        tensor=x.tensor,
        dtype=p.dtype,
        sizes=(x.w * x.c, x.h, x.n),
        strides=(size * x.row, size * x.pitch),
        box=(across, down, 1),
    )


def _tiles(kernel: StemConvKernel, p: ConvProblem) -> tuple[int, int, int]:
    """Across, down, and in all."""
    across, down = -(-p.out_w // kernel.tile_w), -(-p.out_h // kernel.tile_h)
    return across, down, across * down * p.n


def _pixels(
    kernel: StemConvKernel,
    p: ConvProblem,
    arch: Arch,
    x: Image,
    y: Image,
    filter_pitch: int,
    epilogue: Epilogue,
) -> Step:
    tiles_w, tiles_h, tiles = _tiles(kernel, p)
    columns = -(-p.k // CHANNELS)
    pitch_n, _, pitch_h, pitch_w = y.pitches()
    arguments: dict[str, Argument] = {
        "image": _rows(kernel, p, x),
        "stored": y.map((1, kernel.tile_h, kernel.tile_w, CHANNELS)),
        "weights": Pointer(tensor=SECOND),
        **finishing_pointers(epilogue),
        "filter_pitch": filter_pitch,
        "channels": p.k,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tile_count": tiles,
        "pad_h": p.pad_h,
        "height": y.h,
        "width": y.w,
        "pitch_n": pitch_n,
        "pitch_h": pitch_h,
        "pitch_w": pitch_w,
    }
    return cuda_step(
        "stem",
        "stem",
        arguments,
        _constants(kernel, p) | finishing(epilogue) | {"BACKWARD": 0},
        grid=(columns, walkers(tiles, columns, kernel.blocks, arch), 1),
        threads=32 * (kernel.warps + 1),
        smem_bytes=smem_bytes(kernel, p),
    )


def _weight(
    kernel: StemConvKernel, p: ConvProblem, arch: Arch, x: Image, y: Image, pitch: int
) -> Launch:
    tiles_w, tiles_h, tiles = _tiles(kernel, p)
    columns = -(-p.k // CHANNELS)
    blocks = walkers(tiles, columns, kernel.blocks, arch)
    arguments: dict[str, Argument] = {
        "image": _rows(kernel, p, x),
        "result": y.map((1, kernel.tile_h, kernel.tile_w, CHANNELS)),
        "slices": Scratch(offset=0),
        "slice_size": p.filter_elements,
        "filters": p.k,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tile_count": tiles,
        "pad_h": p.pad_h,
    }
    step = cuda_step(
        "stem_weight",
        "stem_weight",
        arguments,
        _constants(kernel, p) | {"ATOMIC": int(kernel.atomic)},
        grid=(columns, blocks, 1),
        threads=32 * kernel.warps,
        smem_bytes=smem_bytes(kernel, p),
    )
    return summed(step, p, blocks, pitch, is_atomic=kernel.atomic)
