"""Launches of CUDA kernels for depthwise convolutions on the matrix units."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.ops.conv.epilogue import OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.depthwise import (
    DepthwiseConvKernel,
    as_rows,
    patch,
    smem_bytes,
    tiles,
    written,
)
from tilewise.ops.conv.patches import (
    Image,
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
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step


def launch_depthwise(
    kernel: DepthwiseConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step over pixels; for the filter's gradient slices and a second step that adds them."""
    x, y = images(problem, strides, is_aligned)
    if problem.ndim == 1:
        x, y = x.as_rows(), y.as_rows()
    rows, pitches = as_rows(problem), outer_pitches(problem, strides)
    if kernel.is_weight:
        return _weight(kernel, rows, arch, x, y, pitches[OUT])
    source, target = (y, x) if problem.direction == "bwd_data" else (x, y)
    return Launch(steps=(_pixels(kernel, rows, source, target, pitches[SECOND], epilogue),))


def representative(kernel: DepthwiseConvKernel) -> ConvProblem:
    """A 3x3 layer."""
    return usual_layer(kernel, c=96, k=96, g=96)


def _constants(kernel: DepthwiseConvKernel, p: ConvProblem) -> dict[str, int | str]:
    return {
        **geometry(p),
        "ELEMENT": p.dtype,
        "TILE_H": kernel.tile_h,
        "TILE_W": kernel.tile_w,
        "CHANNELS": kernel.channels,
        "BLOCKS": kernel.blocks,
    }


def _pixels(
    kernel: DepthwiseConvKernel,
    p: ConvProblem,
    source: Image,
    target: Image,
    filter_pitch: int,
    epilogue: Epilogue,
) -> Step:
    blocks, tiles_w, tiles_h, deep = tiles(kernel, p)
    arguments: dict[str, Argument] = {
        "image": source.map((*patch(kernel, p), kernel.channels)),
        "stored": target.map((*written(kernel, p), kernel.channels)),
        "weights": Pointer(tensor=SECOND),
        **finishing_pointers(epilogue),
        "filter_pitch": filter_pitch,
        "channels": p.c,
        "channel_blocks": blocks,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tiles_d": deep,
        **patch_arguments(p, target),
    }
    constants = _constants(kernel, p) | leads(p) | finishing(epilogue)
    constants["BACKWARD"] = int(p.direction == "bwd_data")
    return cuda_step(
        "depthwise",
        "depthwise",
        arguments,
        constants,
        grid=(blocks * tiles_w * tiles_h * deep * p.n, 1, 1),
        threads=32 * kernel.warps,
        smem_bytes=smem_bytes(kernel, p),
    )


def _weight(
    kernel: DepthwiseConvKernel, p: ConvProblem, arch: Arch, x: Image, y: Image, pitch: int
) -> Launch:
    tiles_w, tiles_h = -(-p.out_w // kernel.tile_w), -(-p.out_h // kernel.tile_h)
    count = p.n * p.out_d * tiles_h * tiles_w
    columns = -(-p.c // kernel.channels)
    blocks = walkers(count, columns * p.z, kernel.blocks, arch)
    arguments: dict[str, Argument] = {
        "image": x.map((*patch(kernel, p), kernel.channels)),
        "result": y.map((1, kernel.tile_h, kernel.tile_w, kernel.channels)),
        "slices": Scratch(offset=0),
        "slice_size": p.filter_elements,
        "channels": p.c,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tiles_d": p.out_d,
        "tile_count": count,
        "pad_d": p.pad_d,
        "pad_h": p.pad_h,
        "pad_w": p.pad_w,
    }
    step = cuda_step(
        "depthwise_weight",
        "depthwise_weight",
        arguments,
        _constants(kernel, p) | {"ATOMIC": int(kernel.atomic), "STAGES": kernel.stages},
        grid=(columns, blocks, p.z),
        threads=32 * kernel.warps,
        smem_bytes=smem_bytes(kernel, p),
    )
    return summed(step, p, blocks, pitch, is_atomic=kernel.atomic)
