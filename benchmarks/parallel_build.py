#!/usr/bin/env python3
"""How much faster kernels build with more workers, and that a second build compiles nothing.

usage: python benchmarks/parallel_build.py [--op gemm] [--kernels 8] [--workers 2] [--json]

Every run starts from an empty cache of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.settings import settings


def build_seconds(kernels: list, workers: int, cache: Path) -> tuple[float, float, int]:
    """Seconds of the first and of the second build, and how many kernels the second compiled."""
    os.environ["TILEWISE_CACHE_DIR"] = str(cache)
    settings.cache_clear()
    arch = detect("cpu")
    started = time.perf_counter()
    first = CpuEngine().build(kernels, arch, max_workers=workers)
    between = time.perf_counter()
    second = CpuEngine().build(kernels, arch, max_workers=workers)
    assert all(build.status == "ok" for build in first), [build.message for build in first]
    done = time.perf_counter()
    return between - started, done - between, sum(not build.was_cached for build in second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="gemm")
    parser.add_argument("--kernels", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pool = load_pool(get_op(args.op), detect("cpu"), ["cpu"])
    kernels = pool[:: max(1, len(pool) // args.kernels)][: args.kernels]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(2):  # the first round warms the file cache and is not counted
            for workers in (1, args.workers):
                cache = Path(folder) / f"{repeat}-{workers}"
                results[workers] = build_seconds(kernels, workers, cache)
    compiler = find_compiler()
    summary = {
        "compiler": compiler.version if compiler else "",
        "kernels": len(kernels),
        "one_worker_s": results[1][0],
        f"{args.workers}_workers_s": results[args.workers][0],
        "speedup": results[1][0] / results[args.workers][0],
        "second_build_s": results[args.workers][1],
        "second_build_compiled": results[args.workers][2],
    }
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        for name, value in summary.items():
            print(f"{name:22} {value:.3f}" if isinstance(value, float) else f"{name:22} {value}")


if __name__ == "__main__":
    main()
