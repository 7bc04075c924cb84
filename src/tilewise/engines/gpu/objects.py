"""A compiled GPU kernel as a value: its bytes, its parameters and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.core.arch import Arch
from tilewise.engines.contract import Resources
from tilewise.engines.gpu.elf import (
    FRAME_SIZE,
    REGISTER_COUNT,
    cubin_facts,
    cubin_parameters,
    hsaco_facts,
    hsaco_parameters,
    static_smem_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What a compiler settled about a tensor map: the box of a copy and its swizzle."""

    sizes: tuple[int, ...]
    """Outermost first; of an im2col map pixels, then channels."""
    swizzle: int
    """In bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuObject:
    """A cubin or HSACO with one kernel."""

    image: bytes
    function: str
    parameters: tuple[int, ...]
    """Bytes of each, in order."""
    resources: Resources
    """Shared memory is what the object says by itself, and threads are 0 where it leaves them to
    the launch."""
    static_smem_bytes: int = 0
    """How much of the shared memory a launch does not ask for."""
    boxes: tuple[Box, ...] = ()
    """Of the tensor maps that Triton passes, in their order."""
    log: str = ""
    """What the compiler said besides."""
    was_cached: bool = False

    @property
    def dynamic_smem_bytes(self) -> int:
        """What a launch has to ask for."""
        return self.resources.smem_bytes - self.static_smem_bytes

    def launched_with(self, *, threads: int, smem_bytes: int) -> GpuObject:
        """The same, with what the launch adds where the object leaves it open."""
        needs = replace(
            self.resources,
            threads=threads or self.resources.threads,
            smem_bytes=self.static_smem_bytes + smem_bytes or self.resources.smem_bytes,
        )
        return replace(self, resources=needs)


def cubin_object(cubin: bytes, function: str, **known: object) -> GpuObject:
    """What a cubin says about its kernel."""
    facts, own = cubin_facts(cubin), static_smem_bytes(cubin, function)
    resources = Resources(
        registers=facts[REGISTER_COUNT], spills=facts.get(FRAME_SIZE, 0), smem_bytes=own
    )
    made = GpuObject(
        image=cubin,
        function=function,
        parameters=cubin_parameters(cubin, function),
        resources=resources,
        static_smem_bytes=own,
    )
    return replace(made, **known)  # type: ignore[arg-type]  # fields of the class


def hsaco_object(hsaco: bytes, function: str, **known: object) -> GpuObject:
    """What an HSACO says about its kernel."""
    kernel = hsaco_facts(hsaco)
    spilled = 4 * (kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"])
    resources = Resources(
        registers=kernel[".vgpr_count"],
        sgprs=kernel[".sgpr_count"],
        agprs=kernel[".agpr_count"],
        # Scratch memory holds spilled registers; scalar ones may go to vector registers instead.
        spills=max(spilled, kernel[".private_segment_fixed_size"]),
    )
    made = GpuObject(
        image=hsaco, function=function, parameters=hsaco_parameters(hsaco), resources=resources
    )
    return replace(made, **known)  # type: ignore[arg-type]  # fields of the class


def over_limit(resources: Resources, arch: Arch) -> str:
    """Which of a GPU's limits a compiled kernel breaks, or nothing."""
    if arch.kind != "gpu":
        return ""
    if resources.smem_bytes > arch.smem_per_block_bytes:
        return (
            f"{resources.smem_bytes} bytes of shared memory; "
            f"{arch.name} allows {arch.smem_per_block_bytes}"
        )
    if resources.threads > arch.max_threads_per_block:
        return f"{resources.threads} threads; {arch.name} allows {arch.max_threads_per_block}"
    if resources.registers > arch.max_registers_per_thread:
        return f"{resources.registers} registers; {arch.name} has {arch.max_registers_per_thread}"
    if resources.registers * resources.threads > arch.registers_per_cu:
        return f"{resources.registers} registers for each of {resources.threads} threads"
    return ""
