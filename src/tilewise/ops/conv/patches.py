"""What launches of CUDA kernels that copy patches of channels-last images have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.errors import TensorError
from tilewise.ops.arguments import ACTIVATIONS
from tilewise.ops.conv.epilogue import BIAS, OUT, RESIDUAL, Epilogue
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.strides import Strides
from tilewise.ops.launch import (
    Argument,
    CudaSource,
    Launch,
    Pointer,
    Scratch,
    Step,
    TensorMap,
    Zero,
)

DIMS = ("d", "h", "w")
TAPS = {"d": "z", "h": "y", "w": "x"}
SUM_THREADS = 256
MOST_WAYS = 32
BUSY_THREADS = 128 * 1024
"""Threads whose loads keep a large GPU's memory busy."""
MOST_BLOCKS = 65535
"""Of a grid's second and third dimension."""
Outer = tuple[int, int, int]
"""Elements from one image or filter to the next, of the two operands and the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A channels-last tensor of images; sizes are elements, the pitch from image to image too."""

    tensor: int
    dtype: str
    n: int
    d: int
    h: int
    w: int
    c: int
    pitch: int
    row: int
    """Elements from one row to the next."""

    def pitches(self) -> tuple[int, int, int, int]:
        """Elements from one image, plane, row and pixel to the next."""
        return self.pitch, self.h * self.row, self.row, self.c

    def as_rows(self) -> Image:
        """Images of one row as the rows of one image, wherever they lie."""
        return replace(self, n=1, h=self.n, row=self.pitch, pitch=self.n * self.pitch)

    def map(
        self, box: tuple[int, int, int, int], steps: tuple[int, int, int] = (1, 1, 1)
    ) -> TensorMap:
        """Copies of `box` (depth, height, width, channels), which take every `steps`-th pixel."""
        size = element(self.dtype).bytes
        n, d, h, w = self.pitches()
        deep, down, across, channels = box
        return TensorMap(
            tensor=self.tensor,
            dtype=self.dtype,
            sizes=(self.c, self.w, self.h, self.d, self.n),
            strides=tuple(size * pitch for pitch in (w, h, d, n)),
            box=(channels, across, down, deep, 1),
            steps=(1, *reversed(steps), 1) if max(steps) > 1 else (),
            swizzle=channels * size,
        )


def images(
    problem: ConvProblem,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    chunks: tuple[int, int] = (16, 16),
) -> tuple[Image, Image]:
    """The forward input and output, wherever the call has them; read by chunks of so many bytes."""
    p = problem
    if not is_aligned:
        raise TensorError("an address is no multiple of 16 bytes; give tensors that begin at one")
    pitches = outer_pitches(problem, strides)
    x_at, y_at = {"fwd": (0, 2), "bwd_data": (2, 0), "bwd_weight": (0, 1)}[p.direction]
    for at, chunk in zip((x_at, y_at), chunks, strict=True):
        if pitches[at] * element(p.dtype).bytes % chunk:
            raise TensorError(
                f"images lie {pitches[at]} elements apart; they are read by {chunk} bytes"
            )
    x = Image(
        tensor=x_at,
        dtype=p.dtype,
        n=p.n,
        d=p.d,
        h=p.h,
        w=p.w,
        c=p.c,
        pitch=pitches[x_at],
        row=p.w * p.c,
    )
    y = replace(
        x,
        tensor=y_at,
        d=p.out_d,
        h=p.out_h,
        w=p.out_w,
        c=p.k,
        pitch=pitches[y_at],
        row=p.out_w * p.k,
    )
    return x, y


def corners(p: ConvProblem, dim: str) -> tuple[int, int]:
    """Along `dim`: where the first patch begins, and how many places there are.

    Backward, a place of the image is one period of the stride, its phases; see `cuda/patches.cuh`.
    """
    pad, stride = getattr(p, f"pad_{dim}"), getattr(p, f"stride_{dim}")
    if p.direction != "bwd_data":
        return -pad, getattr(p, f"out_{dim}")
    last = -(-pad // stride)
    return last - (_shifts(p, dim) - 1) * getattr(p, f"dilation_{dim}"), -(
        -getattr(p, dim) // stride
    )


def patch_arguments(p: ConvProblem, target: Image) -> dict[str, Argument]:
    """Where the first patch begins, and the image that is written."""
    pitches = zip(("n", *DIMS), target.pitches(), strict=True)
    return {
        **{f"patch_corner_{dim}": corners(p, dim)[0] for dim in DIMS},
        **{"depth": target.d, "height": target.h, "width": target.w},
        **{f"pitch_{dim}": pitch for dim, pitch in pitches},
    }


def leads(p: ConvProblem) -> dict[str, int | str]:
    """Backward, how far the image begins behind a whole period of padding, as macros."""
    is_back = p.direction == "bwd_data"
    return {"LEAD_H": p.pad_h % p.stride_h * is_back, "LEAD_W": p.pad_w % p.stride_w * is_back}


def _shifts(p: ConvProblem, dim: str) -> int:
    """Places of a patch that one place of the result reads."""
    taps, stride = getattr(p, TAPS[dim]), getattr(p, f"stride_{dim}")
    if p.direction != "bwd_data":
        return int(taps)
    lead = getattr(p, f"pad_{dim}") % stride
    return int(max((lead > 0) - (tap % stride < lead) + tap // stride for tap in range(taps)) + 1)


def extent(p: ConvProblem, dim: str, tile: int) -> int:
    """Places of a patch that `tile` places of the result (backward, of its phases) read."""
    step = 1 if p.direction == "bwd_data" else getattr(p, f"stride_{dim}")
    return int((tile - 1) * step + (_shifts(p, dim) - 1) * getattr(p, f"dilation_{dim}") + 1)


def why_not_backward(p: ConvProblem) -> str | None:
    """What the phases of a gradient cannot be cut by, or None."""
    if p.direction != "bwd_data":
        return None
    if p.stride_d > 1:
        return "backward it takes no stride in depth"
    for dim in "hw":
        if getattr(p, f"stride_{dim}") > 1 and getattr(p, f"dilation_{dim}") > 1:
            return f"backward it takes no stride with dilation along {dim}"
    return None


def outer_pitches(problem: ConvProblem, strides: tuple[Strides, Strides, Strides]) -> Outer:
    """Elements from one image or filter to the next, of operands and result; all else is packed."""
    packed = (prod(shape[1:]) for shape in shapes(problem))
    a, b, c = (given[0] or usual for given, usual in zip(strides, packed, strict=True))
    return a, b, c


def geometry(problem: ConvProblem) -> dict[str, int | str]:
    """Filter, stride and dilation as macros."""
    p = problem
    return {
        **{f"FILTER_{dim.upper()}": getattr(p, TAPS[dim]) for dim in DIMS},
        **{f"STRIDE_{dim.upper()}": getattr(p, f"stride_{dim}") for dim in DIMS},
        **{f"DILATION_{dim.upper()}": getattr(p, f"dilation_{dim}") for dim in DIMS},
    }


def finishing(epilogue: Epilogue) -> dict[str, int | str]:
    """What is done to the sums, as macros."""
    return {
        "BIAS": int(epilogue.bias),
        "RESIDUAL": int(epilogue.residual),
        "ACTIVATION": ACTIVATIONS.index(epilogue.activation),
    }


def finishing_pointers(epilogue: Epilogue) -> dict[str, Argument]:
    """Bias and residual; what is absent is never read."""
    return {
        "bias": Pointer(tensor=BIAS if epilogue.bias else OUT),
        "residual": Pointer(tensor=RESIDUAL if epilogue.residual else OUT),
    }


def cuda_step(
    file: str,
    function: str,
    arguments: dict[str, Argument],
    constants: dict[str, int | str],
    *,
    grid: tuple[int, int, int],
    threads: int,
    smem_bytes: int = 0,
) -> Step:
    """A step whose signature follows from its arguments; numbers called pitch or size are wide."""
    return Step(
        source=CudaSource(
            file=f"conv/cuda/{file}.cuh",
            function=function,
            signature={name: _kind(name, value) for name, value in arguments.items()},
            constants=constants,
        ),
        grid=grid,
        threads=threads,
        smem_bytes=smem_bytes,
        arguments=tuple(arguments.values()),
    )


def _kind(name: str, value: Argument) -> str:
    if isinstance(value, TensorMap):
        return "map"
    if isinstance(value, Pointer | Scratch):
        return "*"
    if isinstance(value, float):
        return "f32"
    return "i64" if name.endswith(("pitch", "_size")) or name.startswith("pitch_") else "i32"


def walkers(tiles: int, columns: int, blocks: int, arch: Arch) -> int:
    """Blocks that share `tiles` evenly in one wave, `columns` times over."""
    room = max(1, blocks * arch.compute_units // columns)
    rounds = -(-tiles // min(tiles, room))
    return -(-tiles // rounds)


def summed(step: Step, problem: ConvProblem, slices: int, pitch: int, *, is_atomic: bool) -> Launch:
    """The step that makes slices of the filter's gradient, and one that adds them up.

    Atomics add them to one slice, which is cleared before.
    """
    slices = 1 if is_atomic else slices
    room = 4 * slices * problem.filter_elements
    clear = (Zero(target=Scratch(offset=0), size=room),) if is_atomic else ()
    adding = _sum_step(problem, slices, pitch)
    return Launch(steps=(*clear, step, adding), workspace_bytes=room)


def _sum_step(problem: ConvProblem, slices: int, pitch: int) -> Step:
    """Adds slices of the filter's gradient at the workspace's start up, filters `pitch` apart."""
    p = problem
    rows, size = p.k, p.filter_elements // p.k
    vector = next(v for v in (4, 2, 1) if size % v == 0 and pitch % v == 0)
    ways = _ways(rows * size // vector, slices)
    made = cuda_step(
        "sum_slices",
        "sum_slices",
        {
            "partial": Scratch(offset=0),
            "result": Pointer(tensor=OUT),
            "slices": slices,
            "rows": rows,
            "row": size,
            "pitch": pitch,
        },
        {"RESULT": p.out_dtype, "VECTOR": vector, "WAYS": ways},
        grid=(-(-rows * size // (SUM_THREADS // ways * vector)), 1, 1),
        threads=SUM_THREADS,
        smem_bytes=1024 + 4 * SUM_THREADS * vector if ways > 1 else 0,
    )
    return replace(made, overlaps=True)


def _ways(elements: int, slices: int) -> int:
    """Threads that share an element's slices: more where there are few elements to go round."""
    ways = 1
    while 2 * ways <= min(slices, MOST_WAYS) and ways * elements < BUSY_THREADS:
        ways *= 2
    return ways
