"""Launches a kernel through Triton's HIP launcher onto a stub of the HIP runtime (argv: its path).

Everything between a bound kernel and the driver's call is real; what the call got is printed.
"""

from __future__ import annotations

import ctypes
import json
import sys

import torch
import triton
from triton.backends.amd.driver import HIPDriver

from tilewise.core.arch import load_arch
from tilewise.engines.triton_launch import BoundKernel
from tilewise.ops.gemm.kernels.gpu import TritonGemmKernel
from tilewise.ops.gemm.launch import launch
from tilewise.ops.gemm.problem import GemmProblem

STREAM = 0x5EA


def main() -> None:
    # A PyTorch without a GPU lacks these three; there the device is the only one.
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    triton.runtime.driver.set_active(HIPDriver())
    hip = ctypes.CDLL(sys.argv[1])
    kernel = TritonGemmKernel(family="pointer", dtype="bf16", tile_m=64, tile_n=64, tile_k=64)
    made = launch(kernel, GemmProblem(m=130, n=70, k=200, dtype="bf16"), load_arch("gfx942"))
    kinds = list(made.source.signature.values())
    ctypes.c_int.in_dll(hip, "tw_count").value = len(kinds)
    BoundKernel(made, load_arch("gfx942"), kernel.name).start((0xA00, 0xB00, 0xC00))
    raw = (ctypes.c_uint64 * 64).in_dll(hip, "tw_arguments")
    values = [raw[i] & (0xFFFFFFFF if kind == "i32" else ~0) for i, kind in enumerate(kinds)]
    print(
        json.dumps(
            {
                "grid": list((ctypes.c_uint * 3).in_dll(hip, "tw_grid")),
                "block": list((ctypes.c_uint * 3).in_dll(hip, "tw_block")),
                "shared": ctypes.c_uint.in_dll(hip, "tw_shared").value,
                "stream": ctypes.c_void_p.in_dll(hip, "tw_stream").value,
                "function": ctypes.c_void_p.in_dll(hip, "tw_function").value,
                "target": triton.runtime.driver.active.get_current_target().arch,
                "arguments": dict(zip(made.source.signature, values, strict=True)),
            }
        )
    )


if __name__ == "__main__":
    main()
