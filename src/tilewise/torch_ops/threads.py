"""Kernels called on tensors run on PyTorch's threads, as two sets of them fight for the cores."""

from __future__ import annotations

import torch

from tilewise.engines import get_engine
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.cpu.openmp import pytorch_runtime
from tilewise.settings import settings


def share_threads() -> None:
    """Lets CPU kernels borrow PyTorch's threads, as many as PyTorch uses."""
    engine, runtime = get_engine("cpu"), pytorch_runtime()
    if isinstance(engine, CpuEngine) and runtime is not None:
        engine.borrow(runtime, min(settings().threads, torch.get_num_threads()))
