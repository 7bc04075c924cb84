#!/usr/bin/env python3
"""What a call costs in Python before the GPU has work: remembered calls beside raw launches.

usage: python benchmarks/dispatch_overhead.py [--dtype bf16] [--calls 400] [--json]

Every row is the median time until a call returns, with the queue kept short so that none waits
for the GPU. `launch` starts the same compiled Triton kernel with everything fixed, `execute` is
`plan.execute`, `empty` is torch.empty for the result; `added_us` is what tw.matmul takes over
`launch`. One row for each family of kernel on one small problem, one for the shipped choice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import tilewise as tw
from tilewise.dispatch import default_dispatcher
from tilewise.dispatch.remembered import CALLS
from tilewise.engines.device import detect
from tilewise.errors import TilewiseError
from tilewise.ops.gemm.problem import GemmProblem

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SIZE = (16, 512, 2048)
"""Small enough for a kernel to finish while Python prepares the next; every family can serve."""
BATCH = 20
"""Calls between two synchronisations."""


def cost_us(call: Callable[[], Any], calls: int, synchronize: Callable[[], None]) -> float:
    """The median time of one call."""
    times = []
    for _ in range(3):
        call()
    for _ in range(max(1, calls // BATCH)):
        synchronize()
        for _ in range(BATCH):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    synchronize()
    return median(times) / 1e3


def rows(dtype: str, calls: int) -> list[dict[str, Any]]:
    import torch

    arch = detect("gpu")
    m, n, k = SIZE
    kind = getattr(torch, DTYPES[dtype])
    a = torch.randn(m, k, device="cuda").to(kind)
    weight = torch.randn(n, k, device="cuda").to(kind)
    b, bias, out = weight.t(), weight[:, 0].contiguous(), a.new_empty(m, n)
    problem = GemmProblem(m=m, n=n, k=k, dtype=dtype, layout="rcr")
    registry = default_dispatcher("gemm", arch).registry
    ranking = registry.select(problem).ranking
    chosen = {"selected": None}
    for ranked in ranking:
        kernel = ranked.kernel
        family = getattr(kernel, "family", "vendor")
        is_split = getattr(kernel, "split_k", 1) > 1
        chosen.setdefault(f"{family} split" if is_split else family, kernel)

    def timed(call: Callable[[], Any]) -> float:
        return cost_us(call, calls, torch.cuda.synchronize)

    with torch.no_grad():
        common = {
            "torch_mm_us": timed(lambda: torch.mm(a, b)),
            "torch_mm_out_us": timed(lambda: torch.mm(a, b, out=out)),
            "torch_linear_us": timed(lambda: torch.nn.functional.linear(a, weight, bias)),
            "empty_us": timed(lambda: torch.empty((m, n), dtype=kind, device=a.device)),
        }
        found = []
        for name, kernel in chosen.items():
            if kernel is not None:
                registry.declare(kernel, priority="high")  # so that tw.matmul takes this one
            try:
                found.append(_row(name, problem, (a, b, weight, bias, out), timed) | common)
            except TilewiseError as error:
                found.append({"name": name, "error": str(error).splitlines()[0]})
            finally:
                if kernel is not None:
                    registry.declare(kernel, priority="normal")
    return found


def _row(
    name: str, problem: GemmProblem, tensors: tuple[Any, ...], timed: Callable[..., float]
) -> dict[str, Any]:
    a, b, weight, bias, out = tensors
    plan, choice = default_dispatcher("gemm", detect("gpu")).plan(problem)
    CALLS.forget()
    row: dict[str, Any] = {"name": name, "kernel": choice.kernel.name}
    launch = plan.bind([a, b], out)
    row["launch_us"] = timed(launch)
    row["execute_us"] = timed(lambda: plan.execute([a, b], out))
    row["matmul_us"] = timed(lambda: tw.matmul(a, b))
    row["linear_us"] = timed(lambda: tw.linear(a, weight, bias))
    row["matmul_out_us"] = timed(lambda: tw.matmul(a, b, out=out))
    row["execute_added_us"] = row["execute_us"] - row["launch_us"]
    row["added_us"] = row["matmul_us"] - row["launch_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    import torch
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; this measures launches on one")
    found = rows(given.dtype, given.calls)
    good = [row for row in found if "error" not in row and "_vendor_" not in row["kernel"]]
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "problem": dict(zip("MNK", SIZE, strict=True)) | {"dtype": given.dtype},
        "rows": found,
        "summary": {
            "worst_added_us": max((row["added_us"] for row in good), default=None),
            "worst_execute_added_us": max((row["execute_added_us"] for row in good), default=None),
        },
    }
    if given.json:
        print(json.dumps(report, indent=1))
        return
    print(report["device"], report["versions"], report["problem"])
    for row in found:
        if "error" in row:
            print(f"{row['name']:<16} {row['error']}")
            continue
        shown = " ".join(f"{key[:-3]} {row[key]:.1f}" for key in row if key.endswith("_us"))
        print(f"{row['name']:<16} {shown}   {row['kernel']}")
    print(report["summary"])


if __name__ == "__main__":
    main()
