"""A small model, trained once for all tests that only need some model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small_data() -> Any:
    """Made-up measurements of CK Tile GEMM kernels, some of them failures."""
    from synthetic import synthetic

    from tilewise.core.arch import load_arch

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
    from synthetic import synthetic

    from tilewise.core.arch import load_arch
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
    return _trained(vendor_data, tmp_path_factory.mktemp("models") / "vendor", 120)


@pytest.fixture(scope="session")
def shared_model(vendor_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose scores start from half of the analytic estimate."""
    folder = tmp_path_factory.mktemp("models") / "shared"
    return _trained(vendor_data, folder, base=0.5, calibrated=False)


@pytest.fixture(scope="session")
def told() -> Callable[[Any], dict[str, float]]:
    """What a made-up library says it would do; nobody could guess it from a problem's sizes."""
    from tilewise.ops.vendor import TACTIC

    def answer(problem: Any) -> dict[str, float]:
        tile_m = 256.0 if int(problem.key, 16) % 2 else 64.0
        return dict.fromkeys(TACTIC, 1.0) | {"tile_m": tile_m, "tile_n": 128.0}

    return answer


@pytest.fixture(scope="session")
def told_data(vendor_data: Any, told: Callable[[Any], dict[str, float]]) -> Any:
    """The library is fastest where it says tiles of 256 rows, and slowest otherwise."""
    import numpy as np

    data = vendor_data
    tactics = {p.key: told(p) for p in data.problems}
    is_fast = np.array([tactics[p.key]["tile_m"] > 64 for p in data.problems])
    best = np.full(len(data.problems), np.inf)
    own = data.kernel_index < len(data.kernels) - 1
    np.minimum.at(best, data.problem_index[own], data.time_us[own])
    its = (best * np.where(is_fast, 0.6, 1.8))[data.problem_index]
    return replace(data, tactics=tactics, time_us=np.where(own, data.time_us, its))


@pytest.fixture(scope="session")
def told_model(told_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learned from what the library said."""
    return _trained(told_data, tmp_path_factory.mktemp("models") / "told", 120)


def _trained(data: Any, folder: Path, vendor_trees: int = 0, **changes: Any) -> Path:
    """A small model."""
    from tilewise.learn.params import Params
    from tilewise.learn.train import save, train

    params = Params(trees=30, leaves=8, vendor_trees=vendor_trees, **changes)
    save(train(data, params, fold_count=3), data, folder)
    return folder
