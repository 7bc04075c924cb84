#!/usr/bin/env python3
"""What a call costs in Python before the GPU has work: remembered calls beside raw launches.

usage: python benchmarks/dispatch_overhead.py [--dtype bf16] [--rounds 200] [--json]

Every figure is the time until a call returns, with the queue kept short so that none waits for the
GPU. `launch` starts the same compiled kernel with everything fixed, which is as little as Python
can do; `triton` starts it as its author would, `kernel[grid](...)` on tensors (Triton's own
kernels; Gluon's would want layouts). Neither makes a result. `execute` is `plan.execute`, `empty`
is torch.empty for the result. Hosts change speed within seconds, so all calls take turns in small
blocks: a figure is the median over rounds of a block's median, and `added_us` is the median over
rounds of what tw.matmul took over `launch` in the same round (`over_triton_us`: over `triton`);
`added_slow_us` is its 90th percentile. One row for each family of kernel on one small problem, one
for the shipped choice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from statistics import median, quantiles
from typing import Any

import tilewise as tw
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.dispatch import default_dispatcher
from tilewise.engines.contract import Plan
from tilewise.engines.device import detect
from tilewise.engines.gpu.build import launch_module
from tilewise.engines.gpu.triton_build import said
from tilewise.errors import TilewiseError
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import Launch, Pointer, Scratch, Source, Step, TensorMap

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SIZE = (16, 512, 2048)
"""Small enough for a kernel to finish while Python prepares the next; every family can serve."""
SCRATCH_TYPES = {"*fp32": "float32", "*i32": "int32"}
"""Partial sums and flags, as signatures and PyTorch name them."""
BLOCK = 9
"""Calls between two synchronisations, few enough for the queue."""


def take_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, synchronize: Callable[[], None]
) -> dict[str, list[float]]:
    """Microseconds of each call, one figure a round: the median of a small block."""
    for call in calls.values():
        for _ in range(3):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            call()  # the first after a wait is slow
            times = []
            for _ in range(BLOCK):
                start = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - start)
            found[name].append(median(times) / 1e3)
    synchronize()
    return found


def rows(dtype: str, rounds: int) -> list[dict[str, Any]]:
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
    chosen: dict[str, Kernel | None] = {"selected": None}
    for ranked in ranking:
        family = getattr(ranked.kernel, "family", "vendor")
        is_split = getattr(ranked.kernel, "split_k", 1) > 1
        chosen.setdefault(f"{family} split" if is_split else family, ranked.kernel)

    theirs = {
        "torch_mm": lambda: torch.mm(a, b),
        "torch_mm_out": lambda: torch.mm(a, b, out=out),
        "torch_linear": lambda: torch.nn.functional.linear(a, weight, bias),
        "empty": lambda: torch.empty((m, n), dtype=kind, device=a.device),
    }
    found = []
    with torch.no_grad():
        for name, kernel in chosen.items():
            if kernel is not None:
                registry.declare(kernel, priority="high")  # so that tw.matmul takes this one
            try:
                plan, choice = registry.dispatcher.plan(problem)
                calls = _ours(plan, a, b, weight, bias, out) | theirs
                calls |= _as_its_author(choice.kernel, problem, arch, (a, b, out))
                took = take_turns(calls, rounds, torch.cuda.synchronize)
                found.append({"name": name, "kernel": choice.kernel.name} | _row(took))
            except TilewiseError as error:
                found.append({"name": name, "error": str(error).splitlines()[0]})
            finally:
                if kernel is not None:
                    registry.declare(kernel, priority="normal")
    return found


def _ours(plan: Plan, a: Any, b: Any, weight: Any, bias: Any, out: Any) -> dict[str, Any]:
    return {
        "launch": plan.bind([a, b], out),
        "execute": lambda: plan.execute([a, b], out),
        "matmul": lambda: tw.matmul(a, b),
        "matmul_out": lambda: tw.matmul(a, b, out=out),
        "linear": lambda: tw.linear(a, weight, bias),
    }


def _as_its_author(
    kernel: Kernel, problem: GemmProblem, arch: Arch, tensors: Sequence[Any]
) -> dict[str, Callable[[], Any]]:
    """The kernel by Triton's own call on tensors; what it is given is made beforehand."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if kernel.engine != "triton":
        return {}
    launch: Launch = launch_module("gemm").launch(kernel, problem, arch)
    (step,) = launch.steps
    assert isinstance(step, Step) and isinstance(step.source, Source)
    source = step.source
    if source.is_gluon:
        return {}
    workspace = torch.zeros(launch.workspace_bytes, dtype=torch.uint8, device="cuda")
    given: dict[str, Any] = {}
    for (name, kind), value in zip(source.signature.items(), step.arguments, strict=True):
        if isinstance(value, Pointer):
            given[name] = tensors[value.tensor]
        elif isinstance(value, Scratch):
            given[name] = workspace[value.offset :].view(getattr(torch, SCRATCH_TYPES[kind]))
        elif isinstance(value, TensorMap):
            box = json.loads(kind[kind.index("[") : kind.index("]") + 1])
            tensor = tensors[value.tensor]
            strides = [*(s // tensor.element_size() for s in value.strides[::-1]), 1]
            given[name] = TensorDescriptor(tensor, list(value.sizes[::-1]), strides, box)
        else:
            given[name] = value
    function = getattr(import_module(source.module), source.function)
    constants = {name: said(value, source) for name, value in source.constants.items()}
    values = [given.get(name, constants.get(name)) for name in function.arg_names]
    options = {name: value for name, value in source.options.items() if value is not None}
    return {"triton": partial(function[step.grid], *values, **options)}


def _row(took: dict[str, list[float]]) -> dict[str, float]:
    row = {f"{name}_us": median(times) for name, times in took.items()}
    over = {"added": ("matmul", "launch"), "execute_added": ("execute", "launch")}
    if "triton" in took:
        over["over_triton"] = ("matmul", "triton")
    for name, (call, base) in over.items():
        extra = [one - raw for one, raw in zip(took[call], took[base], strict=True)]
        row[f"{name}_us"] = median(extra)
        if len(extra) > 1:
            row[f"{name}_slow_us"] = quantiles(extra, n=10)[-1]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    import torch
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; this measures launches on one")
    found = rows(given.dtype, given.rounds)
    good = [row for row in found if "error" not in row and "_vendor_" not in row["kernel"]]
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "problem": dict(zip("MNK", SIZE, strict=True)) | {"dtype": given.dtype},
        "rows": found,
        "summary": {
            "worst_added_us": max((row["added_us"] for row in good), default=None),
            "worst_over_triton_us": max(
                (row["over_triton_us"] for row in good if "over_triton_us" in row), default=None
            ),
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
