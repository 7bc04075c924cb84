"""The peak of this machine's processor, measured: listed clocks are not those it runs at."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tilewise.core.arch import Arch
from tilewise.engines.cpu.engine import ISA_FLAGS
from tilewise.engines.toolchain import Unit, library_of
from tilewise.errors import BuildError

_SHAPES = {"avx512": (16, 24), "avx2": (8, 12)}
"""Lanes of a vector, and chains of multiply-adds that fit in the registers."""
_ROUNDS = 200_000
_SECONDS = 0.5


def measured_tflops(arch: Arch) -> float:
    """The most fp32 TFLOPS that all cores together reached in about half a second."""
    isa = next((name for name in _SHAPES if arch.has(name)), None)
    if isa is None:
        raise BuildError(f"{arch.label} has no vector instructions that tilewise knows")
    lanes, chains = _SHAPES[isa]
    unit = Unit(
        source=(Path(__file__).parent / "peak.cpp").read_text(),
        flags=(*ISA_FLAGS[isa], f"-DTW_LANES={lanes}", f"-DTW_CHAINS={chains}"),
    )
    run = library_of(unit, "the peak", "tw_peak").tw_peak
    run.argtypes, run.restype = (ctypes.c_int64,), ctypes.c_float
    flops = 2 * lanes * chains * _ROUNDS

    def best_rate(_: int) -> float:
        """Of one core while the others are at it too; whatever else it does costs some runs."""
        best, stop = 0.0, time.perf_counter() + _SECONDS
        while not best or time.perf_counter() < stop:
            start = time.perf_counter()
            run(_ROUNDS)
            best = max(best, flops / (time.perf_counter() - start))
        return best

    with ThreadPoolExecutor(arch.compute_units) as threads:
        return 1e-12 * sum(threads.map(best_rate, range(arch.compute_units)))
