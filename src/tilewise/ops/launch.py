"""How a GPU kernel is compiled and called, as values: what an op's `launch` module gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise.core.arch import Arch

TRITON_TYPES = {
    "fp32": "fp32",
    "tf32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8e4nv",
    "bf8": "fp8e5",
    "int8": "i8",
    "int32": "i32",
}
"""Our element types as Triton's signatures name them."""
FNUZ_TYPES = {"fp8": "fp8e4b8", "bf8": "fp8e5b16"}
"""The 8-bit types of GPUs whose encodings have one zero and no infinity."""


def triton_type(dtype: str, arch: Arch) -> str:
    """The element type as Triton names it on `arch`, whose fp8 is the one its matrix units take."""
    types = TRITON_TYPES | FNUZ_TYPES if arch.has("fp8_fnuz") else TRITON_TYPES
    return types[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The address of a tensor of the call."""

    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """An address inside the workspace."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A name of the kernel's language, such as an element type, looked up when it is compiled.

    So a launch is worked out without importing the language.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] | None = None
    """What it is called with, where it makes something, such as a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that compiling one kernel depends on, besides the architecture."""

    module: str
    function: str
    is_gluon: bool = False
    signature: dict[str, str]
    """Argument -> type for those that are passed; the rest are constants.

    A Gluon descriptor without a layout (`tensordesc<bf16[64, 64]>`) gets the usual one of its box.
    """
    constants: dict[str, Any]
    """Numbers, texts, `Word`s, or tuples of them."""
    divisible: dict[str, int]
    """Argument -> a power of two that divides it."""
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2col:
    """How a tensor map walks the pixels of a convolution; spatial dimensions innermost first."""

    lower: tuple[int, ...]
    """Where the first pixel's corner lies, for each spatial dimension: minus the padding."""
    upper: tuple[int, ...]
    """Where the last pixel's corner lies, counted from the end of each spatial dimension."""
    channels: int
    """Channels that a copy brings of each pixel."""
    pixels: int
    """Pixels that a copy brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A TMA descriptor over a tensor of the call, whole; dimensions innermost first.

    Triton settles box and swizzle when it compiles, and they are taken from its object.
    """

    tensor: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of every dimension but the innermost."""
    box: tuple[int, ...] = ()
    """Elements that a copy brings, of each dimension; empty for im2col."""
    steps: tuple[int, ...] = ()
    """Elements from one that is read to the next, of each dimension; empty for ones."""
    swizzle: int = 0
    """Bytes of a row whose chunks are interleaved: 0, 32, 64 or 128."""
    promotion: int = 128
    """Bytes that a miss brings into L2: 0 (as few as it can), 64, 128 or 256."""
    offset: int = 0
    """Bytes from the tensor's first element to the map's."""
    im2col: Im2col | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSource:
    """Everything that compiling one CUDA C++ kernel depends on, besides the architecture."""

    file: str
    """Below `ops/`, such as `conv/cuda/halo.cuh`; includes are found from there, too."""
    function: str
    signature: dict[str, str]
    """Argument -> `map` (a tensor map), `*` (an address), `i32`, `i64` or `f32`."""
    constants: dict[str, int | str]
    """Macros: numbers, or names from a closed list such as element types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """A step that clears bytes of a tensor of the call, or of the workspace."""

    target: Pointer | Scratch
    size: int


Argument = Pointer | Scratch | TensorMap | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel of a launch, with all that the driver wants to know."""

    source: Source | CudaSource
    grid: tuple[int, int, int]
    threads: int = 0
    """Of a block; Triton's objects say it themselves."""
    smem_bytes: int = 0
    """Shared memory of a block beyond what the kernel declares; Triton's objects say it."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    overlaps: bool = False
    """Whether it may begin while the kernel of the step before still runs (NVIDIA's programmatic
    dependent launch). It waits by itself before it reads what that one writes, or ends."""
    arguments: tuple[Argument, ...]
    """One per entry of the source's signature, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a call does, one step after the other; one per problem and set of strides."""

    steps: tuple[Step | Zero, ...]
    workspace_bytes: int = 0
    zeroed_bytes: int = 0
    """The head of the workspace that must be zero before a launch; the kernels leave it so."""

    @property
    def sources(self) -> tuple[Source | CudaSource, ...]:
        """What must be compiled."""
        return tuple(step.source for step in self.steps if isinstance(step, Step))
