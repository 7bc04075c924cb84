"""PyTorch's OpenMP runtime, whose threads kernels on tensors share."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Addresses of a runtime's entry points, as `tw_team_borrow` takes them."""

    parallel: int
    max_threads: int
    in_parallel: int


def pytorch_runtime() -> Runtime | None:
    """The runtime that PyTorch in this process computes with; None where it uses another kind.

    A symbol asked of PyTorch's own library is found in that library's dependencies, so this is
    PyTorch's runtime however many others the process has.
    """
    import torch

    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        # GCC's entry, which LLVM's and Intel's runtimes have as well.
        found = [library.GOMP_parallel, library.omp_get_max_threads, library.omp_in_parallel]
    except (OSError, AttributeError):
        return None
    parallel, most, inside = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in found)
    return Runtime(parallel=parallel, max_threads=most, in_parallel=inside)
