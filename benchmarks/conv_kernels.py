#!/usr/bin/env python3
"""Every GPU convolution kernel of the pool on a few layers: is it right, and how fast beside cuDNN.

usage: python benchmarks/conv_kernels.py [--dtype bf16|fp16] [--only TEXT] [--engines cuda,triton]
                                         [--family NAME] [--minutes M] [--json]

One call of a few minutes tells of each kernel on each layer whether it compiles, runs and is right
(against cuDNN in fp32), and its time inside a CUDA graph with a cold cache beside cuDNN's with
benchmark mode on. Kernels are compiled in parallel first; layers without time left are named.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from math import exp, log
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.bench_cuda import CudaBench, CudaTimer
from tilewise.sweep.timing import measure

POLICY = Policy(cache="cold", launch="graph", time_ms=2.0, warmup=2, min_repeats=5, max_repeats=20)
OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
COPY_TBS, PRODUCT_TFLOPS = 4.23, 790.0
"""What an H200 was seen to copy and to multiply at, the ceilings of a roofline."""
THREE = {"y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
SEVEN = {"y": 7, "x": 7, "pad_h": 3, "pad_w": 3}
TWO = {"stride_h": 2, "stride_w": 2}


def _square(n: int, c: int, k: int, size: int, **more: int) -> dict[str, int]:
    return {"n": n, "c": c, "k": k, "h": size, "w": size, **more}


LAYERS: dict[str, dict[str, int]] = {
    "dense 56": _square(32, 256, 256, 56, **THREE),
    "dense 100": _square(8, 256, 256, 100, **THREE),
    "dense 28": _square(32, 512, 512, 28, **THREE),
    "dense 14": _square(32, 256, 256, 14, **THREE),
    "dense 7": _square(32, 512, 512, 7, **THREE),
    "strided 56": _square(32, 256, 256, 56, **THREE, **TWO),
    "dilated 50": _square(8, 256, 256, 50, y=3, x=3, pad_h=4, pad_w=4, dilation_h=4, dilation_w=4),
    "1x1 56": _square(32, 256, 64, 56, y=1, x=1),
    "1x1 14": _square(32, 1024, 512, 14, y=1, x=1),
    "strided 1x1 56": _square(32, 256, 512, 56, y=1, x=1, **TWO),
    "stem 224": _square(32, 3, 64, 224, **SEVEN, **TWO),
    "volume 96": {**_square(1, 96, 96, 120, **THREE), "d": 17, "z": 3, "pad_d": 1},
    "line 4096": {"n": 16, "c": 256, "k": 256, "h": 1, "w": 4096, "y": 1, "x": 3, "pad_w": 1},
    "groups of 64": _square(32, 512, 512, 28, g=8, **THREE),
    "groups of 4": _square(32, 128, 128, 56, g=32, **THREE),
    "groups of 16": _square(32, 512, 512, 28, g=32, **THREE),
    "depthwise 56": _square(32, 96, 96, 56, g=96, **THREE),
    "depthwise 7x7": _square(32, 96, 96, 56, g=96, **SEVEN),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--only", default="", help="layers or ops with this in their name")
    parser.add_argument("--engines", default="cuda", help="with commas between them")
    parser.add_argument("--family", default="", help="kernels of this family alone")
    parser.add_argument("--minutes", type=float, default=8.0, help="layers begun after it are left")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def cases(args: argparse.Namespace) -> Iterator[tuple[str, ConvProblem]]:
    """Each layer in all directions before the next: what a short run shows is of every kind."""
    for name, sizes in LAYERS.items():
        for op in OPS:
            if args.only in name or args.only in op:
                values: dict[str, Any] = {"dtype": args.dtype, "layout": "nhwc", **sizes}
                yield name, ConvProblem(direction=op.removeprefix("conv_"), **values)


def kernels_for(problem: ConvProblem, args: argparse.Namespace, arch: Arch) -> list[Kernel]:
    op = get_op(problem.op)
    pool = load_pool(op, arch, engines=args.engines.split(","))
    return [
        kernel
        for kernel in pool
        if args.family in ("", getattr(kernel, "family", ""))
        and op.why_unusable(kernel, problem, arch) is None
    ]


def least_us(problem: ConvProblem) -> float:
    """What the problem takes at the device's ceilings, its data read and written once."""
    return max(problem.bytes / COPY_TBS, problem.flops / PRODUCT_TFLOPS) * 1e-6


class Layer:
    """One problem's tensors and timers."""

    def __init__(self, name: str, problem: ConvProblem, arch: Arch) -> None:
        self.name, self.problem, self.arch = name, problem, arch
        self.bench = CudaBench(arch, POLICY, {})
        self.timer = CudaTimer(POLICY, max(arch.l2_bytes, arch.l3_bytes))
        piece = self.bench.piece(problem)
        vendor = VendorKernel(op_name=problem.op, library="torch")
        plan = get_engine("vendor").plan(vendor, problem, arch)
        call = plan.bind(piece.operands, piece.out)
        call()  # cuDNN searches now
        self.vendor_us = measure(call, self.timer, POLICY).time_us

    def row(self, kernel: Kernel) -> dict[str, Any]:
        """What became of one kernel; its own failure is a fact, not the run's."""
        said: dict[str, Any] = {
            "layer": self.name,
            "op": self.problem.op,
            "kernel": kernel.name,
            "family": getattr(kernel, "family", ""),
            "vendor_us": self.vendor_us,
        }
        try:
            plan = get_engine(kernel.engine).plan(kernel, self.problem, self.arch)
            self.bench.verify(plan, self.problem)
            piece = self.bench.piece(self.problem)
            time_us = measure(plan.bind(piece.operands, piece.out), self.timer, POLICY).time_us
        except Exception as error:
            return {**said, "status": type(error).__name__, "message": str(error)[:300]}
        return {
            **said,
            "status": "ok",
            "time_us": time_us,
            "ratio": self.vendor_us / time_us,
            "tflops": self.problem.flops / time_us * 1e-6,
            "roofline": least_us(self.problem) / time_us,
        }


def compile_all(jobs: list[tuple[ConvProblem, list[Kernel]]], arch: Arch) -> list[str]:
    """Compiles everything in parallel; the failures, one a line."""
    failed = []
    for engine in {kernel.engine for _, kernels in jobs for kernel in kernels}:
        pairs = [(k, p) for p, kernels in jobs for k in kernels if k.engine == engine]
        failed += get_engine(engine).compile_ahead(pairs, arch)
    return failed


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest right kernel of each layer and direction."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["layer"], row["op"]
        if (
            row["status"] == "ok"
            and row["time_us"] < best.get(key, row | {"time_us": 1e30})["time_us"]
        ):
            best[key] = row
    return list(best.values())


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in OPS:
        ratios = [row["ratio"] for row in best_of(rows) if row["op"] == op]
        if ratios:
            found[op] = {"geomean": exp(sum(map(log, ratios)) / len(ratios)), "layers": len(ratios)}
    return found | {"wrong": sum(row["status"] != "ok" for row in rows), "kernels": len(rows)}


def main() -> None:
    args = arguments()
    arch, start = detect("gpu"), time.perf_counter()
    listed = [(name, p, kernels_for(p, args, arch)) for name, p in cases(args)]
    failed = compile_all([(p, kernels) for _, p, kernels in listed], arch)
    compiled_s = time.perf_counter() - start
    print(f"compiled in {compiled_s:.0f} s, {len(failed)} failures", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    left = []
    for name, problem, kernels in listed:
        if time.perf_counter() - start > 60 * args.minutes:
            left.append(f"{name} {problem.op}")
            continue
        layer = Layer(name, problem, arch)
        mine = [layer.row(kernel) for kernel in kernels]
        rows += mine
        for row in best_of(mine):
            print(
                f"{name:16} {problem.op:16} cuDNN {row['vendor_us']:8.1f} us, ours "
                f"{row['time_us']:8.1f} us, x{row['ratio']:.2f}, roofline {row['roofline']:.2f}, "
                f"{row['kernel']}",
                file=sys.stderr,
            )
        for row in mine:
            if row["status"] != "ok":
                print(f"  {row['kernel']}: {row['status']} {row['message']}", file=sys.stderr)
    said = {"rows": rows, "summary": summary(rows), "left": left, "compile_failures": failed}
    print(json.dumps(said) if args.json else json.dumps(said["summary"], indent=1))


if __name__ == "__main__":
    main()
