#!/usr/bin/env python3
"""What is selected on a CPU against PyTorch's own, call by call in turns; or the best of the pool.

usage: python benchmarks/cpu_vs_vendor.py [--op gemm|conv_fwd|conv_bwd_data|conv_bwd_weight]...
                                          [--layout nchw|nhwc]... [--threads N] [--best] [--json]

What users get: tilewise's functions on tensors beside PyTorch's, one call of each after the other,
as in a model whose other layers are PyTorch's. The ratio is PyTorch's time over ours, the median
over pairs of neighbouring calls.

With `--best` every legal kernel is screened on every shape; the best few and the vendor (OpenBLAS
for GEMM, oneDNN for convolution) are then timed in alternating blocks: what choosing could reach.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

OPS = ("gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=OPS, help="default: all")
    parser.add_argument("--layout", action="append", choices=("nchw", "nhwc"), help="convolutions")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--best", action="store_true", help="the best of the pool instead")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each shape")
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


ARGS = arguments() if __name__ == "__main__" else None
if ARGS:  # before NumPy and PyTorch start their threads
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(ARGS.threads)
    os.environ["TILEWISE_THREADS"] = str(ARGS.threads)

import numpy as np  # noqa: E402

from tilewise.cli.build import compile_all  # noqa: E402
from tilewise.cli.demo import random_operands  # noqa: E402
from tilewise.core.problem import Problem  # noqa: E402
from tilewise.core.tensors import empty  # noqa: E402
from tilewise.dispatch import default_dispatcher  # noqa: E402
from tilewise.engines import get_engine  # noqa: E402
from tilewise.engines.device import detect  # noqa: E402
from tilewise.ops.configs import load_pool  # noqa: E402
from tilewise.ops.contract import get_op  # noqa: E402
from tilewise.ops.vendor import VendorKernel  # noqa: E402

GEMMS = {
    "square": [(n, n, n) for n in (128, 256, 384, 512, 768, 1024, 1536, 2048)],
    "small": [(8, 8, 8), (16, 16, 16), (24, 40, 32), (32, 32, 32), (48, 48, 48), (64, 64, 64),
              (17, 31, 23)],
    "skinny": [(1, 4096, 4096), (4, 4096, 4096), (8, 1024, 4096), (16, 4096, 1024), (4096, 4, 4096),
               (4096, 1, 1024), (2, 11008, 4096), (12, 768, 3072)],
    "layers": [(128, 3072, 768), (128, 768, 3072), (512, 2304, 768), (512, 768, 768),
               (64, 1000, 2048), (256, 4096, 1024), (197, 768, 768), (3136, 64, 256),
               (784, 512, 128), (196, 256, 1024)],
    "odd": [(127, 129, 131), (511, 513, 509), (1000, 1000, 1000), (333, 777, 222)],
    "deep": [(64, 64, 8192), (128, 128, 16384), (32, 32, 4096)],
}  # fmt: skip

# label: n, c, k, g, h, w, y, x, stride, pad (pairs where the two dimensions differ), of volumes
# depth (with its taps where they differ from the filter's rows)
LAYERS: dict[str, dict[str, tuple]] = {
    "dense": {
        "resnet50.conv1": (1, 3, 64, 1, 224, 224, 7, 7, 2, 3),
        "resnet50.layer1.3x3": (4, 64, 64, 1, 56, 56, 3, 3, 1, 1),
        "resnet50.layer1.1x1-expand": (4, 64, 256, 1, 56, 56, 1, 1, 1, 0),
        "resnet50.layer1.1x1-reduce": (4, 256, 64, 1, 56, 56, 1, 1, 1, 0),
        "resnet50.layer2.3x3": (4, 128, 128, 1, 28, 28, 3, 3, 1, 1),
        "resnet50.layer2.3x3-s2": (4, 128, 128, 1, 56, 56, 3, 3, 2, 1),
        "resnet50.layer2.down": (4, 256, 512, 1, 56, 56, 1, 1, 2, 0),
        "resnet50.layer3.3x3": (4, 256, 256, 1, 14, 14, 3, 3, 1, 1),
        "resnet50.layer3.1x1": (4, 1024, 256, 1, 14, 14, 1, 1, 1, 0),
        "resnet50.layer4.3x3": (4, 512, 512, 1, 7, 7, 3, 3, 1, 1),
        "resnet50.layer4.1x1": (4, 512, 2048, 1, 7, 7, 1, 1, 1, 0),
        "vgg16.conv1_1": (1, 3, 64, 1, 224, 224, 3, 3, 1, 1),
        "vgg16.conv1_2": (1, 64, 64, 1, 224, 224, 3, 3, 1, 1),
        "vgg16.conv3_2": (1, 256, 256, 1, 56, 56, 3, 3, 1, 1),
        "vgg16.conv5_1": (2, 512, 512, 1, 14, 14, 3, 3, 1, 1),
        "inception.1x7": (4, 128, 128, 1, 17, 17, (1, 7), None, 1, (0, 3)),
        "inception.7x1": (4, 160, 192, 1, 17, 17, (7, 1), None, 1, (3, 0)),
        "inception.5x5": (4, 48, 64, 1, 35, 35, 5, 5, 1, 2),
        "unet.enc1": (1, 64, 64, 1, 128, 128, 3, 3, 1, 1),
        "unet.dec3": (1, 512, 256, 1, 32, 32, 3, 3, 1, 1),
        "mobilenetv2.expand": (4, 24, 144, 1, 56, 56, 1, 1, 1, 0),
        "mobilenetv2.project": (4, 192, 64, 1, 14, 14, 1, 1, 1, 0),
        "efficientnet.head": (4, 320, 1280, 1, 7, 7, 1, 1, 1, 0),
        "convnext.patchify": (1, 3, 96, 1, 224, 224, 4, 4, 4, 0),
        "convnext.down": (2, 96, 192, 1, 56, 56, 2, 2, 2, 0),
        "retinanet.head": (1, 256, 36, 1, 50, 50, 3, 3, 1, 1),
    },
    "grouped": {
        "resnext50.layer1": (2, 128, 128, 32, 56, 56, 3, 3, 1, 1),
        "resnext50.layer2-s2": (2, 256, 256, 32, 56, 56, 3, 3, 2, 1),
        "resnext50.layer2": (2, 256, 256, 32, 28, 28, 3, 3, 1, 1),
        "resnext50.layer3": (2, 512, 512, 32, 14, 14, 3, 3, 1, 1),
        "resnext50.layer4": (2, 1024, 1024, 32, 7, 7, 3, 3, 1, 1),
        "shufflenet.1x1-g3": (4, 240, 240, 3, 28, 28, 1, 1, 1, 0),
    },
    "depthwise": {
        "mobilenetv2.dw112": (2, 32, 32, 32, 112, 112, 3, 3, 1, 1),
        "mobilenetv2.dw56-s2": (2, 144, 144, 144, 56, 56, 3, 3, 2, 1),
        "mobilenetv2.dw28": (4, 192, 192, 192, 28, 28, 3, 3, 1, 1),
        "mobilenetv2.dw14": (4, 576, 576, 576, 14, 14, 3, 3, 1, 1),
        "efficientnet.dw5x5": (4, 240, 240, 240, 28, 28, 5, 5, 1, 2),
        "efficientnet.dw5x5-s2": (4, 240, 240, 240, 28, 28, 5, 5, 2, 2),
        "convnext.dw7x7": (2, 96, 96, 96, 56, 56, 7, 7, 1, 3),
        "convnext.dw7x7-deep": (2, 768, 768, 768, 7, 7, 7, 7, 1, 3),
    },
    "3-D": {
        "r3d.layer1": (1, 64, 64, 1, 28, 28, 3, 3, 1, 1, 8),
        "r3d.layer2": (1, 128, 128, 1, 14, 14, 3, 3, 1, 1, 4),
        "r3d.layer3": (1, 256, 256, 1, 7, 7, 3, 3, 1, 1, 2),
        "r3d.layer2-batch4": (4, 128, 128, 1, 14, 14, 3, 3, 1, 1, 4),
        "i3d.mixed3b": (1, 96, 128, 1, 28, 28, 3, 3, 1, 1, 8),
        "r2plus1d.spatial": (1, 64, 144, 1, 28, 28, 3, 3, 1, 1, (8, 1)),
        "r2plus1d.temporal": (1, 144, 64, 1, 28, 28, 1, 1, 1, 0, (8, 3)),
        "x3d.depthwise": (1, 108, 108, 108, 20, 20, 3, 3, 1, 1, 13),
        "unet3d.encoder": (1, 32, 64, 1, 32, 32, 3, 3, 1, 1, 32),
        "unet3d.decoder": (1, 192, 64, 1, 12, 12, 3, 3, 1, 1, 12),
        "vae.decoder": (1, 48, 24, 1, 40, 40, 3, 3, 1, 1, 6),
    },
}


@dataclass(slots=True)
class Row:
    """One shape: our kernel beside the vendor's routine."""

    op: str
    kind: str
    label: str
    layout: str
    kernel: str
    candidates: int
    tilewise_us: float
    vendor_us: float
    tilewise_gflops: float
    ratio: float


def gemm_problems() -> list[tuple[str, str, Problem]]:
    make = get_op("gemm").make_problem
    found = []
    for kind, shapes in GEMMS.items():
        for index, (m, n, k) in enumerate(shapes):
            layout = ("rrr", "rcr")[index % 2]
            label = f"{m}x{n}x{k} {layout}"
            found.append((kind, label, make(M=m, N=n, K=k, layout=layout)))
    return found


def conv_problems(op: str, layout: str) -> list[tuple[str, str, Problem]]:
    found = []
    for kind, layers in LAYERS.items():
        for label, (n, c, k, g, h, w, y, x, stride, pad, *depth) in layers.items():
            (y, x), (pad_h, pad_w) = (v if isinstance(v, tuple) else (v, v) for v in (y, pad))
            third = {}
            if depth:
                d, z = depth[0] if isinstance(depth[0], tuple) else (depth[0], y)
                third = {"Di": d, "Z": z, "pad_d": z // 2}
            problem = get_op(op).make_problem(
                **{"N": n, "C": c, "K": k, "G": g, "Hi": h, "Wi": w, "Y": y, "X": x},
                **{"stride_h": stride, "stride_w": stride, "pad_h": pad_h, "pad_w": pad_w},
                **third,
                layout=layout,
            )
            found.append((kind, label, problem))
    return found


def best_of(call: Callable[[], object], seconds: float) -> float:
    """The fastest single call within about `seconds`, in microseconds."""
    best, stop = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() > stop:
            return best * 1e6


def median_of(call: Callable[[], object], seconds: float) -> float:
    times, stop = [], time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < stop and len(times) < 5000):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e6


def measure(op: str, kind: str, label: str, problem: Problem, kernels: list, arch: object) -> Row:
    operands = random_operands(problem)
    out = empty(
        operands[0], get_op(op).shapes(problem)[-1], "fp32", get_op(op).storage(problem)[-1]
    )
    out[...] = 0
    engine = get_engine("cpu")
    legal = [k for k in kernels if get_op(op).why_unusable(k, problem, arch) is None]
    calls = {k: engine.plan(k, problem, arch).bind(operands, out) for k in legal}
    first = {kernel: best_of(call, 0.0) for kernel, call in calls.items()}
    near = sorted(calls, key=first.__getitem__)[: max(8, len(calls) // 3)]
    screened = {kernel: best_of(calls[kernel], 0.01) for kernel in near}
    leaders = sorted(screened, key=screened.__getitem__)[:3]
    library = "numpy" if op == "gemm" else "torch"
    vendor = get_engine("vendor").plan(VendorKernel(op_name=op, library=library), problem, arch)
    theirs = vendor.bind(operands, out)
    theirs()
    # OpenBLAS's idle threads keep their cores busy for about a tenth of a second, OpenMP's less.
    pause = 0.2 if op == "gemm" else 0.05
    time.sleep(pause)
    ours_us: dict = {kernel: [] for kernel in leaders}
    theirs_us = []
    for _ in range(5):
        for kernel in leaders:
            ours_us[kernel].append(median_of(calls[kernel], 0.02))
        time.sleep(0.03)  # our pool falls asleep within a tenth of a millisecond
        theirs_us.append(median_of(theirs, 0.02))
        time.sleep(pause)
    best = min(leaders, key=lambda k: np.median(ours_us[k]))
    ours, vendors = float(np.median(ours_us[best])), float(np.median(theirs_us))
    # Pairs of neighbouring blocks: a machine that slows down for a while slows both.
    ratio = float(np.median(np.divide(theirs_us, ours_us[best])))
    layout = getattr(problem, "layout", "")
    speed = problem.flops / ours / 1e3
    return Row(op, kind, label, layout, best.name, len(legal), ours, vendors, speed, ratio)


def tensor_calls(problem: Problem) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same call of tilewise's functions and of PyTorch's, on the same tensors."""
    import torch

    import tilewise as tw

    one, two = (torch.from_numpy(operand) for operand in random_operands(problem))
    if problem.op == "gemm":
        return lambda: tw.matmul(one, two), lambda: torch.matmul(one, two)
    rank = one.dim() - 2
    dims = "dhw"[3 - rank :]
    stride, padding, dilation = (
        [getattr(problem, f"{what}_{dim}") for dim in dims]
        for what in ("stride", "pad", "dilation")
    )
    layer = {"stride": stride, "padding": padding, "dilation": dilation, "groups": problem.g}
    if problem.op == "conv_fwd":
        ours, theirs = getattr(tw, f"conv{rank}d"), getattr(torch.nn.functional, f"conv{rank}d")
        return lambda: ours(one, two, **layer), lambda: theirs(one, two, **layer)
    size = get_op(problem.op).shapes(problem)[-1]
    is_data = problem.op == "conv_bwd_data"
    call = tw.conv_input_gradient if is_data else tw.conv_weight_gradient
    gradient = getattr(torch.nn.grad, f"conv{rank}d_{'input' if is_data else 'weight'}")
    dy, other = (one, two) if is_data else (two, one)
    given = (size, other, dy) if is_data else (other, size, dy)
    return lambda: call(*given, **layer), lambda: gradient(*given, **layer)


def measure_selected(op: str, kind: str, label: str, problem: Problem, seconds: float) -> Row:
    """One call of ours, one of PyTorch's, and so on."""
    ours, theirs = tensor_calls(problem)
    for call in (ours, theirs, ours, theirs):
        call()
    taken: tuple[list[float], list[float]] = ([], [])
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(taken[0]) < 5:
        for call, times in zip((ours, theirs), taken, strict=True):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
    choice = default_dispatcher(op, detect("cpu")).select(problem)
    us, vendor_us = (float(np.median(times)) for times in taken)
    ratio = float(np.median(np.divide(taken[1], taken[0])))
    speed = problem.flops / us / 1e3
    return Row(
        *(op, kind, label, getattr(problem, "layout", ""), choice.kernel.name),
        *(len(choice.ranking), us, vendor_us, speed, ratio),
    )


def geomean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def summarise(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Geometric mean of the ratios per op, whole and by class and layout of layer."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for op in dict.fromkeys(row.op for row in rows):
        of_op = [row for row in rows if row.op == op]
        groups = {"all": of_op}
        for row in of_op:
            groups.setdefault(row.kind, []).append(row)
            if op != "gemm":
                groups.setdefault(row.layout, []).append(row)
        summary[op] = {
            name: {
                "geomean": geomean([r.ratio for r in group]),
                "worst": min(r.ratio for r in group),
                "shapes": len(group),
            }
            for name, group in groups.items()
        }
    return summary


def main(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    arch = detect("cpu")
    rows: list[Row] = []
    for op in args.op or OPS:
        kernels = [k for k in load_pool(get_op(op), arch, ["cpu"]) if k.dtype == "fp32"]
        if args.best:
            built = compile_all(kernels, arch, None)
            kernels = [b.kernel for b in built if b.status == "ok"]
        problems = (
            gemm_problems()
            if op == "gemm"
            else [
                p for layout in args.layout or ("nchw", "nhwc") for p in conv_problems(op, layout)
            ]
        )
        for kind, label, problem in problems:
            if args.only not in label:
                continue
            if args.best:
                row = measure(op, kind, label, problem, kernels, arch)
            else:
                row = measure_selected(op, kind, label, problem, args.seconds)
            rows.append(row)
            print(
                f"{row.op:16} {row.kind:10} {row.label:28} {row.layout:5} {row.ratio:6.2f}x "
                f"{row.tilewise_us:10.1f} us {row.tilewise_gflops:8.1f} GFLOPS  {row.kernel}",
                file=sys.stderr,
                flush=True,
            )
    summary = summarise(rows)
    if args.json:
        head = {"device": arch.label, "threads": args.threads, "torch": torch.__version__}
        print(json.dumps({**head, "summary": summary, "rows": [asdict(r) for r in rows]}, indent=1))
        return
    for op, groups in summary.items():
        for name, figures in groups.items():
            print(f"{op:16} {name:10} {figures['geomean']:5.2f}x (worst {figures['worst']:.2f}x "
                  f"of {figures['shapes']})")  # fmt: skip


if __name__ == "__main__":
    assert ARGS is not None
    main(ARGS)
