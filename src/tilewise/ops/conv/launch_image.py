"""Launches of CUDA kernels for the gradient of a network's image."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.ops.conv.epilogue import OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.image import ImageConvKernel, chunk, patch, smem_bytes
from tilewise.ops.conv.patches import (
    corners,
    cuda_step,
    finishing,
    finishing_pointers,
    geometry,
    images,
    leads,
    outer_pitches,
    walkers,
)
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.usual import FIRST_LAYER, usual_layer
from tilewise.ops.launch import Argument, Launch, Pointer


def launch_image(
    kernel: ImageConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step over all periods of the image."""
    p = problem
    x, y = images(p, strides, is_aligned, chunks=(2, 16))
    (corner_h, places_h), (corner_w, places_w) = corners(p, "h"), corners(p, "w")
    tiles_w, tiles_h = -(-places_w // kernel.tile_w), -(-places_h // kernel.tile_h)
    tiles = p.n * tiles_h * tiles_w
    pitch_n, _, pitch_h, pitch_w = x.pitches()
    arguments: dict[str, Argument] = {
        "gradient": y.map((1, *patch(kernel, p), chunk(p))),
        "weights": Pointer(tensor=SECOND),
        "result_image": Pointer(tensor=OUT),
        **finishing_pointers(epilogue),
        "filter_pitch": outer_pitches(p, strides)[SECOND],
        "channels": p.k,
        "tiles_w": tiles_w,
        "tiles_h": tiles_h,
        "tile_count": tiles,
        "corner_h": corner_h,
        "corner_w": corner_w,
        "height": p.h,
        "width": p.w,
        "pitch_n": pitch_n,
        "pitch_h": pitch_h,
        "pitch_w": pitch_w,
    }
    constants = {
        **geometry(p),
        **leads(p),
        **finishing(epilogue),
        "ELEMENT": p.dtype,
        "IN_CHANNELS": p.c,
        "CHUNK": chunk(p),
        "CHUNKS": -(-p.k // chunk(p)),
        "TILE_H": kernel.tile_h,
        "TILE_W": kernel.tile_w,
        "STAGES": kernel.stages,
        "BLOCKS": kernel.blocks,
        "BACKWARD": 1,
    }
    step = cuda_step(
        "image",
        "image",
        arguments,
        constants,
        grid=(walkers(tiles, 1, kernel.blocks, arch), 1, 1),
        threads=32 * (kernel.warps + 1),
        smem_bytes=smem_bytes(kernel, p),
    )
    return Launch(steps=(step,))


def representative(kernel: ImageConvKernel) -> ConvProblem:
    """A 3x3 layer of stride 2 over images of three channels."""
    return usual_layer(kernel, **FIRST_LAYER)
