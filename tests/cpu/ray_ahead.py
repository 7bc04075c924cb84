"""A sweep over a Ray cluster of two nodes on this machine, each of which compiles ahead."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.core.problem import Problem
from tilewise.engines.vendor import VendorEngine, VendorPlan
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.plan import Assignment, Task
from tilewise.sweep.ray_backend import RayExecutor

PROBLEMS = 6
FOLLOWERS = {0: ("ahead 1", "ahead 2", "measured 3"), 3: ("ahead 4", "ahead 5")}
"""What each node waits for in the middle of its first problem; nothing is stolen meanwhile."""
WAIT_S = 240.0
KERNEL = VendorKernel(op_name="gemm", library="torch")
POLICY = Policy(time_ms=1.0, warmup=0, rounds=0, threads=1)


def notes() -> Path:
    return Path(os.environ["NOTES"])


def note(node: int, what: str) -> None:
    (notes() / f"{node} {what}").touch()


def index(problem: Problem) -> int:
    return int(problem.to_dict()["M"]) - 8


class NotingEngine(VendorEngine):
    """The vendor's, on a GPU as far as anyone can tell; notes who compiles and measures what."""

    def compile_ahead(
        self,
        pairs: Iterable[tuple[Kernel, Problem]],
        arch: Arch,
        *,
        max_workers: int | None = None,
    ) -> list[str]:
        for _, problem in pairs:
            note(os.getppid(), f"ahead {index(problem)}")
        return []

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> VendorPlan:
        note(os.getppid(), f"measured {index(problem)}")
        end = time.monotonic() + WAIT_S
        for awaited in FOLLOWERS.get(index(problem), ()):
            while not any(notes().glob(f"* {awaited}")) and time.monotonic() < end:
                time.sleep(0.05)
        return super().plan(kernel, problem, arch)


def works() -> list[Assignment]:
    return [
        Assignment(
            at,
            Task(
                problem=GemmProblem(m=8 + at, n=16, k=16).to_dict(),
                kernels={0: KERNEL.to_dict()},
                keys={0: KERNEL.key},
                todo=(0,),
                prior={},
                confirmed=frozenset(),
                policy=POLICY.to_dict(),
            ),
            {},
            0,
        )
        for at in range(PROBLEMS)
    ]


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    os.environ["NOTES"] = str(folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    here = str(Path(__file__).parent)
    config = WorkerConfig(
        engines=("ray_ahead:NotingEngine",),
        policy=POLICY,
        kind="cpu",
        environment={"NOTES": str(folder), "PYTHONPATH": here},
    )
    executor = RayExecutor(config)
    left = works()

    def next_work() -> Assignment:
        if not left:
            raise StopIteration
        return left.pop(0)

    executor.start()
    kernels = [(KERNEL.key, KERNEL.to_dict())]
    steps = [group or [] for _, group in executor.run(next_work, kernels, load_arch("sm_90"))]
    statuses = [result["status"] for group in steps for result in group]
    print(json.dumps({"statuses": statuses, "notes": sorted(p.name for p in notes().iterdir())}))
    executor.close()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
