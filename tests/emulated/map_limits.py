"""What the CUDA driver takes of a launch: its tensor maps, grids and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.launch import CudaSource, Step, TensorMap

CORNERS = {3: 2**15, 4: 2**7, 5: 2**4}
"""How far a window's corner may lie from the image, by dimensions of a map in im2col mode."""
COUNTED_BYTES = 2**20
"""A barrier counts fewer bytes of copies in a phase."""


def why_not_encoded(m: TensorMap) -> str | None:
    """The first limit of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col that a map breaks."""
    rank, size, walk = len(m.sizes), element(m.dtype).bytes, m.im2col
    inner = (walk.channels if walk else (*m.box, 0)[0]) * size
    brought = walk.channels * walk.pixels if walk else prod(m.box)
    rules = {
        "one of box and im2col must be given": bool(m.box) == bool(walk),
        "there are 1 to 5 dimensions, and a stride for each but the first": not 0 < rank <= 5
        or len(m.strides) != rank - 1,
        "sizes are 1 to 2^31, as coordinates are": not all(0 < n <= 2**31 for n in m.sizes),
        "strides are multiples of 16 bytes below 2^40": any(
            step % 16 or not 0 < step < 2**40 for step in m.strides
        ),
        "the offset is a multiple of 16 bytes": m.offset % 16 != 0,
        "steps are 1 to 8": bool(m.steps)
        and (len(m.steps) != rank or not all(0 < step <= 8 for step in m.steps)),
        "rows of a copy are multiples of 16 bytes": inner % 16 != 0,
        "swizzles are of 0, 32, 64 or 128 bytes": m.swizzle not in (0, 32, 64, 128),
        "a row is longer than the swizzle": m.swizzle > 0 and inner > m.swizzle,
        "a copy is longer than a barrier counts": brought * size >= COUNTED_BYTES,
    }
    if walk is None:
        rules["boxes are 1 to 256 long"] = len(m.box) != rank or not all(
            0 < n <= 256 for n in m.box
        )
    else:
        most, corners = CORNERS.get(rank, 0), (*walk.lower, *walk.upper)
        rules |= {
            f"corners of {rank} dimensions are {-most} to {most - 1}": not all(
                -most <= corner < most for corner in corners
            )
            or len(corners) != 2 * (rank - 2),
            "a copy brings 1 to 256 channels of 1 to 1024 pixels": not (
                0 < walk.channels <= 256 and 0 < walk.pixels <= 1024
            ),
        }
    return next((rule for rule, is_broken in rules.items() if is_broken), None)


def why_not_launched(step: Step, arch: Arch) -> Iterator[str]:
    """The limits that a step of a CUDA kernel breaks, its maps and numbers included."""
    assert isinstance(step.source, CudaSource)
    x, y, z = step.grid
    if not (0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16):
        yield f"a grid of {step.grid}"
    if any(n % together for n, together in zip(step.grid, step.cluster, strict=True)):
        yield f"a grid of {step.grid} in clusters of {step.cluster}"
    if step.smem_bytes > arch.smem_per_block_bytes or not 0 < step.threads <= 1024:
        yield f"{step.smem_bytes} bytes of shared memory, {step.threads} threads"
    for (name, kind), given in zip(step.source.signature.items(), step.arguments, strict=True):
        if isinstance(given, TensorMap):
            if reason := why_not_encoded(given):
                yield f"{name}: {reason}: {given}"
        elif (
            kind in ("i32", "i64")
            and not -(2 ** (int(kind[1:]) - 1))
            <= given
            < 2
            ** (  # type: ignore[operator]
                int(kind[1:]) - 1
            )
        ):
            yield f"{name} is {given}, no {kind}"
