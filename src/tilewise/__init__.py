"""Chooses, builds and runs the fastest tile kernel for a GEMM or grouped convolution."""

__version__ = "0.1.0"
