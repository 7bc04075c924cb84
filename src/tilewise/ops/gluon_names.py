# SPDX-License-Identifier: MIT
"""Gluon's operations that Triton has renamed since 3.6, under one name each for kernels to use."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# The old names stay behind as functions that raise, so the new one is looked for first.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
