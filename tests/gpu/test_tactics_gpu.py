"""What cuBLAS says it would do is what it then does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tilewise.core.measurement import Policy
from tilewise.data.store import Store
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import TACTIC, VendorKernel
from tilewise.selection.models import load_models
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import sweep

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None, reason="no NVIDIA GPU"
    ),
]


tactic_of = get_engine("vendor").tactic


def asked(**sizes: object) -> dict[str, float]:
    return dict(tactic_of(GemmProblem(**{"dtype": "bf16", **sizes}), detect("gpu")))  # type: ignore[arg-type]


def launched(m: int, n: int, k: int) -> list[str]:
    """Names of the kernels that PyTorch's product runs."""
    a = torch.ones(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(n, k, device="cuda", dtype=torch.bfloat16).t()
    torch.mm(a, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.mm(a, b)
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(16, 28672, 4096), (64, 4096, 7168), (256, 6144, 4096), (2048, 4096, 4096), (4, 2880, 4096)],
)
def test_it_does_what_it_says(m: int, n: int, k: int) -> None:
    told = asked(m=m, n=n, k=k)
    names = launched(m, n, k)
    tiles = [found for name in names if (found := re.search(r"_(\d+)x(\d+)_", name))]
    if not tiles or "nvjet" not in " ".join(names):
        pytest.skip(f"these kernels do not tell their tiles: {names}")
    assert sorted(map(int, tiles[0].groups())) == sorted((told["tile_m"], told["tile_n"]))
    assert (told["split"] > 1) is any("splitK" in name for name in names)


def test_tiles_are_told_in_the_sense_of_the_problem() -> None:
    few, many = asked(m=8, n=8192, k=4096), asked(m=8192, n=8, k=4096)
    assert few["tile_m"] < few["tile_n"]
    assert many["tile_m"] > many["tile_n"]


def test_the_device_is_known_by_its_figures() -> None:
    """A model is asked with the figures it was trained with."""
    live = detect("gpu")
    model = next(iter(load_models("gemm", live)))
    problem = GemmProblem(m=256, n=512, k=1024, dtype="bf16")
    assert tactic_of(problem, model.trained_on) == tactic_of(problem, live) != {}
    assert not tactic_of(problem, live.with_figures(compute_units=live.compute_units - 2))


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_layout_is_answered(dtype: str, layout: str) -> None:
    told = asked(m=256, n=512, k=1024, dtype=dtype, layout=layout)
    assert set(told) == set(TACTIC)
    assert told["tile_m"] > 0
    assert asked(m=256, n=512, k=1024, dtype=dtype, layout=layout, batch=8)["waves"] > 0


def test_what_another_routine_serves_is_not_asked() -> None:
    assert asked(m=64, n=128, k=256, dtype="fp8")["tile_n"] > 0
    for sizes in ({"n": 130}, {"k": 250}, {"batch": 2}):
        assert not asked(**{"m": 64, "n": 128, "k": 256, "dtype": "fp8", **sizes})
    assert not asked(m=64, n=128, k=256, dtype="fp32")
    assert not asked(m=64, n=0, k=256)


def test_nothing_is_asked_while_a_graph_is_captured() -> None:
    known = asked(m=320, n=320, k=320)
    x = torch.ones(64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        assert not asked(m=321, n=328, k=328)
        assert asked(m=320, n=320, k=320) == known
    graph.replay()
    assert bool((y == 2).all())
    assert asked(m=321, n=328, k=328)


def test_a_sweep_keeps_it(tmp_path: Path) -> None:
    policy = Policy(cache="cold", time_ms=1.0, max_repeats=5, rounds=0)
    problem = GemmProblem(m=128, n=256, k=512, dtype="bf16")
    kernels = [VendorKernel(op_name="gemm", library="torch")]
    executor = LocalExecutor(WorkerConfig(policy=policy, kind="gpu", engines=("vendor",)))
    sweep(tmp_path, [problem], kernels, executor, policy)
    (row,) = Store(tmp_path).table().to_pylist()
    assert json.loads(row["tactic"]) == asked(m=128, n=256, k=512)
