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
class Descriptor:
    """A TMA descriptor over a tensor of the call; the box is fixed when the kernel is compiled."""

    tensor: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that compiling one kernel depends on, besides the architecture."""

    module: str
    function: str
    is_gluon: bool = False
    signature: dict[str, str]
    """Argument -> type for those that are passed; the rest are constants."""
    constants: dict[str, Any]
    divisible: dict[str, int]
    """Argument -> a power of two that divides it."""
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel with its arguments; one per problem and set of strides."""

    source: Source
    grid: tuple[int, int]
    arguments: tuple[Pointer | Scratch | Descriptor | int, ...]
    """One per entry of the source's signature, in its order."""
    workspace_bytes: int = 0
    zeroed_bytes: int = 0
    """The head of the workspace that must be zero before a launch; the kernel leaves it so."""
