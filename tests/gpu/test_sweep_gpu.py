"""Sweeps on a GPU: faults that poison the context, every policy, and kernels of both engines."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.data.store import Store
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.local import LocalExecutor
from tilewise.sweep.run import Options, Summary, sweep
from tilewise.sweep.supervisor import Limits

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sabotage_gpu import EXPECTED, GpuSabotageKernel  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd")), reason="no GPU here"
    ),
]

GEMMS = [
    GemmProblem(m=256, n=128, k=512, dtype="bf16"),
    GemmProblem(m=64, n=64, k=64, dtype="fp16"),
]


def run(store: Path, kernels: object, policy: Policy, problems: list, **config: object) -> Summary:
    executor = LocalExecutor(WorkerConfig(policy=policy, kind="gpu", **config))  # type: ignore[arg-type]
    return sweep(
        *(store, problems, kernels, executor, policy),  # type: ignore[arg-type]
        options=Options(give_up_after=0),
        why_unusable=None if problems[0].op != "gemm" else _any_or_op,
    )


def _any_or_op(kernel: Kernel, problem: object, arch: Arch) -> str | None:
    if isinstance(kernel, GpuSabotageKernel):
        return None
    return get_op("gemm").why_unusable(kernel, problem, arch)  # type: ignore[arg-type]


def test_gpu_faults_cost_one_measurement_each(tmp_path: Path) -> None:
    policy = Policy(cache="cold", time_ms=1.0, max_repeats=20)
    deeds = [word for deed in EXPECTED for word in (deed, "fine")]
    kernels = [GpuSabotageKernel(deed=deed, serial=at) for at, deed in enumerate(deeds)]
    run(
        *(tmp_path, kernels, policy, GEMMS[:1]),
        engines=("sabotage_gpu:GpuSabotageEngine",),
        limits=Limits(timeout_s=3.0),
        environment={"PYTHONPATH": f"{HERE}:{HERE.parent.parent / 'src'}"},
    )
    rows = [r for r in Store(tmp_path).measurements(latest=False) if r.stage != "leader"]
    assert len(rows) == len(deeds)
    for row in rows:
        deed = next(d for d in EXPECTED if row.kernel.startswith(f"gemm_gpu_sabotage_{d}_s"))
        assert row.status == EXPECTED[deed], (row.kernel, row.message)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(cache="cold", time_ms=2.0),
        Policy(cache="hot", time_ms=2.0),
        Policy(cache="cold", launch="graph", time_ms=2.0),
    ],
    ids=["cold", "hot", "graph"],
)
def test_triton_and_vendor_kernels_are_measured(policy: Policy, tmp_path: Path) -> None:
    def kernels(arch: Arch) -> list[Kernel]:
        pool = load_pool(get_op("gemm"), arch, ["triton"])
        chosen = [k for k in pool if k.dtype in ("bf16", "fp16")][::40]  # type: ignore[attr-defined]
        return [*chosen, VendorKernel(op_name="gemm", library="torch")]

    run(tmp_path, kernels, policy, GEMMS, engines=("triton", "vendor"))
    rows = list(Store(tmp_path).measurements())
    statuses = Counter(r.status for r in rows)
    assert statuses["ok"] >= 4, [(r.kernel, r.status, r.message) for r in rows]
    assert set(statuses) <= {"ok", "over_limit"}, [
        (r.kernel, r.status, r.message) for r in rows if r.status not in ("ok", "over_limit")
    ]
    for row in rows:
        if row.is_ok:
            assert row.time_us is not None
            assert 0.5 < row.time_us < 1000
            assert row.device
            if row.engine == "triton":
                assert row.registers
                assert row.threads


def test_convolutions_of_the_vendor_are_measured(tmp_path: Path) -> None:
    policy = Policy(cache="cold", time_ms=2.0)
    for direction in ("fwd", "bwd_data", "bwd_weight"):
        problem = ConvProblem(
            **{"n": 4, "c": 32, "k": 64, "h": 14, "w": 14, "y": 3, "x": 3},
            pad_h=1,
            pad_w=1,
            dtype="bf16",
            direction=direction,
        )
        kernels = [VendorKernel(op_name=problem.op, library="torch")]
        run(tmp_path, kernels, policy, [problem], engines=("vendor",))
    rows = list(Store(tmp_path).measurements())
    assert [(r.status, r.message) for r in rows] == [("ok", "")] * 3
