"""A small model, trained once for all tests that only need some model."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.fixture(scope="session")
def vendor_data() -> Any:
    """Made-up measurements with a vendor's library that is quick on wide results only."""
    import numpy as np

    from tilewise.core.arch import load_arch
    from tilewise.learn.synthetic import synthetic
    from tilewise.ops.vendor import VendorKernel

    data = synthetic("gemm", arch=load_arch("gfx950"), problems=150, kernels=12)
    count = len(data.problems)
    best = np.full(count, np.inf)
    np.minimum.at(best, data.problem_index, data.time_us)
    times = best * np.where([p.gemm.n > 500 for p in data.problems], 0.7, 1.5)
    return replace(
        data,
        kernels=(*data.kernels, VendorKernel(op_name="gemm", library="torch")),
        problem_index=np.concatenate([data.problem_index, np.arange(count)]),
        kernel_index=np.concatenate([data.kernel_index, np.full(count, len(data.kernels))]),
        time_us=np.concatenate([data.time_us, times]),
        spread_us=np.concatenate([data.spread_us, times * 0.01]),
        repeats=np.concatenate([data.repeats, np.full(count, 20)]),
    )


@pytest.fixture(scope="session")
def vendor_model(vendor_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a forest that speaks of the vendor's library alone."""
    from tilewise.learn.params import Params
    from tilewise.learn.train import save, train

    folder = tmp_path_factory.mktemp("models") / "vendor"
    params = Params(trees=30, leaves=8, vendor_trees=120)
    save(train(vendor_data, params, fold_count=3), vendor_data, folder)
    return folder
