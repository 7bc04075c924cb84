"""The C++ of a GEMM kernel: one instantiation of a family's template."""

from __future__ import annotations

from tilewise.ops.gemm.kernels.cpu import CpuGemmKernel

CTYPES = {
    "fp32": "float",
    "fp16": "tw::fp16",
    "bf16": "tw::bf16",
    "fp8": "tw::fp8",
    "bf8": "tw::bf8",
    "int8": "int8_t",
    "int32": "int32_t",
}
SPLITS = {"m": "kM", "n": "kN", "grid": "kGrid", "shared": "kShared"}

TEMPLATE = """\
// {name}
#define TW_ISA_{isa} 1
#include "{family}.hpp"

using Gemm = tw::{instance};

TW_EXPORT int64_t tw_workspace(const tw_gemm_args* args) {{
  return Gemm::workspace(tw::worth_threads(*args));
}}
TW_EXPORT int32_t tw_run(const tw_gemm_args* args) {{ return Gemm::run(tw::worth_threads(*args)); }}
"""


def source(kernel: CpuGemmKernel) -> str:
    """The translation unit of a kernel."""
    return TEMPLATE.format(
        name=kernel.name, isa=kernel.isa.upper(), family=kernel.family, instance=instance(kernel)
    )


def instance(k: CpuGemmKernel) -> str:
    """The family's template with the kernel's traits filled in."""
    types = f"{CTYPES[k.dtype]}, {CTYPES[k.out_dtype]}"
    if k.family in ("packed", "splitk"):
        last = f"tw::Split::{SPLITS[k.split]}" if k.family == "packed" else str(k.split_k)
        name = "Packed" if k.family == "packed" else "SplitK"
        blocks = f"{k.mr}, {k.vectors}, {k.mc}, {k.kc}, {k.nc}, {k.unroll}"
        return f"{name}<{types}, {blocks}, {last}>"
    if k.family == "unpacked":
        packs = "true" if k.access == "bpanels" else "false"
        split = f"tw::Split::{SPLITS[k.split]}"
        exact = str(k.exact).lower()
        return f"Unpacked<{k.mr}, {k.vectors}, {k.unroll}, {packs}, {split}, {exact}>"
    if k.family == "skinny":
        if k.access == "dot":
            return f"SkinnyDot<{types}, {k.mr}, {k.nr}, {k.ahead}>"
        return f"SkinnyStrip<{types}, {k.mr}, {k.vectors}, {k.kc}, {k.unroll}>"
    if k.access == "dot":
        return f"GemvDot<{types}, {k.nr}, {k.ahead}>"
    return f"GemvAxpy<{types}, {k.unroll}, {k.nr}>"
