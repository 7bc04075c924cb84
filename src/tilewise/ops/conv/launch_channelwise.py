"""Launches of CUDA kernels for depthwise convolutions without matrix units."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.errors import TensorError
from tilewise.ops.conv.epilogue import OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.channelwise import CHANNELS, ChannelwiseConvKernel, smem_bytes
from tilewise.ops.conv.patches import (
    MOST_BLOCKS,
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
from tilewise.ops.conv.usual import usual_layer
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step


def launch_channelwise(
    kernel: ChannelwiseConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step over pixels; for the filter's gradient slices and a second step that adds them."""
    x, y = images(problem, strides, is_aligned, chunks=(4, 4))
    if any(image.pitch % 2 for image in (x, y)):
        raise TensorError("channels are read two by two; images must lie an even number apart")
    if kernel.is_weight:
        return _weight(kernel, problem, arch, x, y, outer_pitches(problem, strides)[OUT])
    source, target = (y, x) if problem.direction == "bwd_data" else (x, y)
    pitch = outer_pitches(problem, strides)[SECOND]
    return Launch(steps=(_pixels(kernel, problem, arch, source, target, pitch, epilogue),))


def representative(kernel: ChannelwiseConvKernel) -> ConvProblem:
    """A 3x3 layer."""
    return usual_layer(kernel, c=96, k=96, g=96)


def _constants(kernel: ChannelwiseConvKernel, p: ConvProblem) -> dict[str, int | str]:
    return {
        **geometry(p),
        "ELEMENT": p.dtype,
        "STRIP": kernel.strip,
        "WARPS": kernel.warps,
        "BLOCKS": kernel.blocks,
    }


def _places(p: ConvProblem, source: Image, target: Image) -> dict[str, Argument]:
    """Sizes and pitches of what is read and of the pixels that are walked over."""
    read = dict(zip(("n", "d", "h", "w"), source.pitches(), strict=True))
    walked = dict(zip(("n", "d", "h", "w"), target.pitches(), strict=True))
    return {
        "channels": p.c,
        "images": p.n,
        "pad_d": p.pad_d,
        "pad_h": p.pad_h,
        "pad_w": p.pad_w,
        "read_d": source.d,
        "read_h": source.h,
        "read_w": source.w,
        **{f"pitch_read_{dim}": pitch for dim, pitch in read.items()},
        "depth": target.d,
        "height": target.h,
        "width": target.w,
        **{f"pitch_{dim}": pitch for dim, pitch in walked.items()},
    }


def _walkers(kernel: ChannelwiseConvKernel, target: Image, columns: int, arch: Arch) -> int:
    """Blocks that share the strips of all rows."""
    strips = target.n * target.d * target.h * (-(-target.w // kernel.strip) + 1)
    tiles = -(-strips // kernel.warps)
    return min(MOST_BLOCKS, walkers(tiles, columns, kernel.blocks, arch))


def _pixels(
    kernel: ChannelwiseConvKernel,
    p: ConvProblem,
    arch: Arch,
    source: Image,
    target: Image,
    filter_pitch: int,
    epilogue: Epilogue,
) -> Step:
    columns = -(-p.c // CHANNELS)
    arguments: dict[str, Argument] = {
        "source": Pointer(tensor=source.tensor),
        "weights": Pointer(tensor=SECOND),
        "result": Pointer(tensor=OUT),
        **finishing_pointers(epilogue),
        "filter_pitch": filter_pitch,
        **_places(p, source, target),
    }
    constants = _constants(kernel, p) | finishing(epilogue)
    constants["BACKWARD"] = int(p.direction == "bwd_data")
    return cuda_step(
        "channelwise",
        "channelwise",
        arguments,
        constants,
        grid=(columns, _walkers(kernel, target, columns, arch), 1),
        threads=32 * kernel.warps,
        smem_bytes=smem_bytes(kernel, p),
    )


def _weight(
    kernel: ChannelwiseConvKernel, p: ConvProblem, arch: Arch, x: Image, y: Image, pitch: int
) -> Launch:
    columns, rows = -(-p.c // CHANNELS), p.z * p.y
    blocks = _walkers(kernel, y, columns * rows, arch)
    arguments: dict[str, Argument] = {
        "image": Pointer(tensor=x.tensor),
        "result": Pointer(tensor=y.tensor),
        "slices": Scratch(offset=0),
        "slice_size": p.filter_elements,
        **_places(p, x, y),
    }
    step = cuda_step(
        "channelwise_weight",
        "channelwise_weight",
        arguments,
        _constants(kernel, p) | {"ATOMIC": int(kernel.atomic)},
        grid=(columns, blocks, rows),
        threads=32 * kernel.warps,
        smem_bytes=smem_bytes(kernel, p),
    )
    return summed(step, p, blocks, pitch, is_atomic=kernel.atomic)
