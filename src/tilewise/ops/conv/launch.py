"""What a GPU convolution is compiled from and called with, for one problem and set of strides."""

from __future__ import annotations

from importlib import import_module

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides, default_strides, strides_of
from tilewise.ops.launch import Launch

__all__ = ["Epilogue", "default_strides", "launch", "strides_of"]

MODULES = {
    "grouped": "launch_grouped",
}
"""Family of a CUDA kernel -> the module whose function of the same name makes its launches."""


def launch(
    kernel: Kernel,
    problem: ConvProblem,
    arch: Arch,
    *,
    strides: tuple[Strides, Strides, Strides] | None = None,
    is_aligned: bool = True,
    epilogue: Epilogue | None = None,
) -> Launch:
    """The kernel's steps; `is_aligned` says that every address is a multiple of 16 bytes."""
    module = MODULES[kernel.family]  # type: ignore[attr-defined]  # every GPU kernel has one
    build = getattr(import_module(f"tilewise.ops.conv.{module}"), module)
    made: Launch = build(
        *(kernel, problem, arch, strides or default_strides(problem), is_aligned),
        epilogue or Epilogue(),
    )
    return made
