"""Kernels called on tensors run on PyTorch's threads, as two sets of them fight for the cores."""

from __future__ import annotations

from tilewise.engines import get_engine
from tilewise.engines.cpu import CpuEngine


def share_threads() -> None:
    """Lets CPU kernels borrow PyTorch's threads, as many as PyTorch uses."""
    engine = get_engine("cpu")
    if isinstance(engine, CpuEngine):
        engine.share_with_pytorch()
