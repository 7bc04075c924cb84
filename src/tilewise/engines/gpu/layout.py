"""The parameters of a compiled kernel, in its order: what a step passes, and what it adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewise.core.dtypes import dtype as element
from tilewise.engines.gpu.objects import Box, GpuObject
from tilewise.errors import ExecutionError
from tilewise.ops.launch import Argument, CudaSource, Pointer, Scratch, Step, TensorMap

BYTES = {"i32": 4, "u32": 4, "f32": 4, "fp32": 4, "i64": 8, "u64": 8, "*": 8, "map": 128}
"""What each kind of argument takes among a kernel's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One parameter: a value, how it lies in memory, and what a compiler settled about a map."""

    value: Argument
    kind: str
    box: Box | None = None


def laid_out(step: Step, made: GpuObject, name: str) -> list[Passed]:
    """One for each of the object's own; what Triton adds for itself is zero."""
    boxes = iter(made.boxes)
    is_triton = not isinstance(step.source, CudaSource)
    found: list[Passed] = []
    for kind, argument in zip(step.source.signature.values(), step.arguments, strict=True):
        if isinstance(argument, TensorMap):
            box = next(boxes) if is_triton else None
            found.append(Passed(value=argument, kind="map", box=box))
            if is_triton:  # which passes shape and strides behind a descriptor
                found += _described(argument)
        elif isinstance(argument, Pointer | Scratch):
            found.append(Passed(value=argument, kind="*"))
        else:
            found.append(Passed(value=argument, kind=kind))
    sizes = tuple(BYTES[passed.kind] for passed in found)
    extra = made.parameters[len(sizes) :]
    if made.parameters[: len(sizes)] != sizes or (extra and not is_triton):
        raise ExecutionError(
            f"{name}: {made.function} takes parameters of {made.parameters} bytes; "
            f"the launch has {sizes}"
        )
    return found + [Passed(value=0, kind="u64") for _ in extra]


def _described(wanted: TensorMap) -> Iterator[Passed]:
    """A descriptor's sizes and strides in elements, outermost first."""
    for size in wanted.sizes[::-1]:
        yield Passed(value=size, kind="u32")
    for stride in wanted.strides[::-1]:
        yield Passed(value=stride // element(wanted.dtype).bytes, kind="u64")
    yield Passed(value=1, kind="u64")
