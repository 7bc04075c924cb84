"""The CPU engine: generated C++ kernels, compiled by the system compiler and called directly."""

from tilewise.engines.cpu.engine import CpuEngine

__all__ = ["CpuEngine"]
