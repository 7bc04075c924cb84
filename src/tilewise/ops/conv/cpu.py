"""C++ source of CPU convolution kernels: one instance of a template from `include/`."""

from __future__ import annotations

from tilewise.ops.conv.kernels.cpu import CpuConvKernel

_CPP_TYPES = {
    "fp32": "float",
    "fp16": "tw::fp16",
    "bf16": "tw::bf16",
    "fp8": "tw::fp8",
    "bf8": "tw::bf8",
    "int8": "int8_t",
    "int32": "int32_t",
}


def source(kernel: CpuConvKernel) -> str:
    """The translation unit that exports `tw_workspace` and `tw_run`."""
    header, template, arguments = _instance(kernel)
    types = f"{_CPP_TYPES[kernel.dtype]}, {_CPP_TYPES[kernel.out_dtype]}"
    return f"""// {kernel.name}
#define TW_ISA_{kernel.isa.upper()}
#include "{header}"

using Kernel = tw::{template}<{types}, {", ".join(map(_cpp, arguments))}>;

extern "C" {{
__attribute__((visibility("default"))) int64_t tw_workspace(const tw_conv_args* args) {{
  return Kernel::workspace(args);
}}
__attribute__((visibility("default"))) int32_t tw_run(const tw_conv_args* args) {{
  return Kernel::execute(args);
}}
}}
"""


def _instance(kernel: CpuConvKernel) -> tuple[str, str, tuple[bool | int | str, ...]]:
    """Header, template and its arguments after the two element types."""
    k = kernel
    is_nhwc, is_backward = k.layout == "nhwc", k.op == "conv_bwd_data"
    if k.family in ("implicit", "direct", "pointwise"):
        if k.op == "conv_bwd_weight" and k.vector == "pixel":
            return "conv_dot.hpp", "DotWeight", (k.mr, k.nv, k.block)
        if k.op == "conv_bwd_weight":
            by_k, by_pixels = k.vector == "k", k.split == "pixels"
            return (
                "conv_weight.hpp",
                "WeightProduct",
                (is_nhwc, by_k, by_pixels, k.mr, k.nv, k.block),
            )
        source = f"tw::Source::{k.family}"
        return (
            "conv_gather.hpp",
            "Gather",
            (is_backward, is_nhwc, source, k.mr, k.nv, k.kc, k.block),
        )
    if k.family == "merged":
        if k.op == "conv_bwd_weight":
            return "conv_merged.hpp", "MergedWeight", (k.split == "pixels", k.kc, k.block)
        return "conv_merged.hpp", "MergedLanes", (is_backward, k.kc, k.mr, k.block)
    return "conv_depthwise.hpp", "DepthwiseRows", (is_backward, k.kc, k.mr, k.nv)


def _cpp(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
