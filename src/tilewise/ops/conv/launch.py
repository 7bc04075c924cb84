"""How GPU convolutions are compiled and called, by the family of kernel."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.errors import InputError
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.triton import FAMILIES
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides, default_strides, strides_of
from tilewise.ops.conv.usual import usual_layer
from tilewise.ops.launch import Launch

__all__ = [
    "Epilogue",
    "default_strides",
    "launch",
    "representative",
    "strides_of",
    "why_unfused",
]

MODULES = {
    **{("triton", family): "launch_triton" for family in FAMILIES},
    ("triton", "gemm"): "launch_gemm",
    **{("cuda", family): "launch_dense" for family in ("im2col", "rows", "gather", "taps")},
    ("cuda", "halo"): "launch_halo",
    ("cuda", "channelwise"): "launch_channelwise",
    ("cuda", "depthwise"): "launch_depthwise",
    ("cuda", "grouped"): "launch_grouped",
    ("cuda", "padded"): "launch_padded",
    ("cuda", "ragged"): "launch_ragged",
    ("cuda", "stem"): "launch_stem",
    ("cuda", "image"): "launch_image",
}
"""Engine and family -> the module whose function of the same name makes its launches."""
CUDA_FILES = {
    **dict.fromkeys(("im2col", "rows", "gather"), ("implicit", "wgrad")),
    "taps": ("implicit", "wgrad"),
    **{name: (name, f"{name}_weight") for name in ("channelwise", "depthwise", "grouped", "stem")},
    "padded": ("grouped", "grouped_weight"),
    "halo": ("halo", "halo_wgrad"),
    "image": ("image", "image"),
    "ragged": ("implicit", "halo", "wgrad"),
}
"""Family -> the files of its kernels over pixels, and last that of its filters' gradients."""
KNOWN = (*"zyx", *(f"{what}_{dim}" for what in ("stride", "dilation", "pad") for dim in "dhw"))
"""Sizes that kernels are compiled for, or that decide how many steps a launch has: an exported
library serves those of given layers."""
EXTENTS = ("d", "h", "w")
"""Sizes that differ from call to call of one layer, as its images do; but one stays one."""
VARIED = ("n", *EXTENTS)
PATCHES = (
    "launch_channelwise",
    "launch_depthwise",
    "launch_grouped",
    "launch_image",
    "launch_padded",
    "launch_stem",
)


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
    epilogue = epilogue or Epilogue()
    if reason := why_unfused(kernel, problem, epilogue):
        raise InputError(f"{kernel.name}: {reason}")
    module, name = _module(kernel)
    made: Launch = getattr(module, name)(
        *(kernel, problem, arch, strides or default_strides(problem)),
        *(is_aligned, epilogue),
    )
    return made


def why_unfused(kernel: Kernel, problem: ConvProblem, epilogue: Epilogue) -> str | None:
    """Why a kernel cannot do what an epilogue asks besides, or None; it serves without, then."""
    if epilogue.sums and problem.direction != "fwd":
        return "sums over pixels are of forward results"
    if epilogue.sums and MODULES[kernel.engine, kernel.family] in PATCHES:  # type: ignore[attr-defined]
        return "kernels over patches give no sums over pixels"
    if MODULES[kernel.engine, kernel.family] == "launch_gemm" and (  # type: ignore[attr-defined]
        epilogue.residual or epilogue.sums
    ):
        return "matrix products add no residual and give no sums over pixels"
    if problem.direction == "bwd_weight" and not epilogue.is_plain:
        return "the gradient of a filter takes no epilogue"
    return None


def cuda_files(op: str, family: str) -> list[str]:
    """Below `ops/`, what a family's kernels of an op are made of, but for what these include."""
    *pixels, weight = CUDA_FILES[family]
    names = (
        (weight, "sum_slices") if op == "conv_bwd_weight" else (*pixels, "reduce", "sum_columns")
    )
    return [f"conv/cuda/{name}.cuh" for name in names]


def representative(kernel: Kernel) -> ConvProblem:
    """A problem of the usual kind for this kernel, to compile ahead of time for."""
    own = getattr(_module(kernel)[0], "representative", None)
    made: ConvProblem = own(kernel) if own else usual_layer(kernel, c=256, k=256)
    return made


def _module(kernel: Kernel) -> tuple[Any, str]:
    name = MODULES[kernel.engine, kernel.family]  # type: ignore[attr-defined]  # all GPU ones have it
    return import_module(f"tilewise.ops.conv.{name}"), name
