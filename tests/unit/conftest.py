"""A small model, trained once for all tests that only need some model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small_data() -> Any:
    """Made-up measurements of CK Tile GEMM kernels, some of them failures."""
    from tilewise.core.arch import load_arch
    from tilewise.learn.synthetic import synthetic

    return synthetic("gemm", arch=load_arch("gfx950"), problems=50, kernels=20, failures=0.05)


@pytest.fixture(scope="session")
def small_trained(small_data: Any) -> Any:
    """What training on the small data gives."""
    from tilewise.learn.params import Params
    from tilewise.learn.train import train

    params = Params(trees=40, leaves=8, targets=("tflops", "latency", "bandwidth"))
    return train(small_data, params, fold_count=3, name="small")


@pytest.fixture(scope="session")
def small_model(
    small_data: Any, small_trained: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same as a folder."""
    from tilewise.learn.train import save

    folder = tmp_path_factory.mktemp("models") / "small"
    save(small_trained, small_data, folder)
    return folder
