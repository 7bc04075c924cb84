"""A sweep over a Ray cluster of three nodes on this machine, one of them killed in the middle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ray
import recording
from ray.cluster_utils import Cluster

from tilewise.data.store import Store
from tilewise.sweep.crew import WorkerConfig
from tilewise.sweep.ray_backend import RayExecutor
from tilewise.sweep.run import Options, sweep

PROBLEMS, KERNELS = 1200, 12
"""Enough that all nodes are at work before the rest is done, however slowly they start."""


def main(folder: Path) -> None:
    tape = folder / "tape"
    recording.record(tape, problem_count=PROBLEMS, kernel_count=KERNELS)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    events: list[dict[str, Any]] = []

    config = WorkerConfig(engines=(), policy=recording.POLICY, replay=str(tape), kind="cpu")
    executor = RayExecutor(config)

    def listen(event: dict[str, Any]) -> None:
        """Kills a node for good once every node has work, so that something is lost with it."""
        events.append(event)
        is_busy = len(executor._hands) == 3 and all(hand.work for hand in executor._hands)
        if is_busy and len(nodes) == 2 and len(events) > 600:
            cluster.remove_node(nodes.pop(), allow_graceful=False)

    summary = sweep(
        *(folder / "store", recording.problems(PROBLEMS), recording.kernels(KERNELS)),
        *(executor, recording.POLICY),
        options=Options(give_up_after=0),
        on_event=listen,
    )
    rows = list(Store(folder / "store").measurements(latest=False))
    told = {
        "rows": len(rows),
        "first": len({r.key for r in rows if r.stage == "first"}),
        "distinct": len({r.identity for r in rows}),
        "expected": PROBLEMS * KERNELS,
        "nodes_killed": 2 - len(nodes),
        "nodes_lost": sum(e["event"] == "node_lost" for e in events),
        "seconds": summary.seconds,
        "remaining": summary.remaining,
    }
    print(json.dumps(told))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
