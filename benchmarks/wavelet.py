#!/usr/bin/env python3
"""Load warps and math warps against all else, over the layers that MLPerf's RetinaNet trains.

usage: python benchmarks/wavelet.py [--op conv_bwd_weight|conv_fwd|conv_bwd_data]
                                    [--dtype bf16|fp16] [--most 60] [--minutes M]
                                    [--names] [--dry-run] [--json]

RetinaNet on ResNeXt-50 32x4d, 8 images of 800x800; its 38 trainable layers have 37 shapes, as
layer2.conv1 and fpn.inner.c3 are alike. For each: the fastest kernel of ours with load warps of its
own (wavelet), the fastest of the others, and cuDNN, timed in turn inside CUDA graphs with cold
caches. `ratio` is cuDNN's time over our best. --names adds cuDNN's own kernels, which a profiler
tells. --dry-run puts small layers and this CPU in the place of a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from conv_contest import (
    OPS,
    Stand,
    compile_all,
    contest,
    geomean,
    layer_class,
    least_us,
    shown,
    vendor_kernels,
)

from tilewise.core.kernel import Kernel
from tilewise.errors import TilewiseError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.problems.networks import network

BATCH = 8
LOADING = {("conv_fwd", "grouped"), ("conv_bwd_data", "grouped"), ("conv_fwd", "stem")}
"""Families with a load warp that is no trait of theirs."""


@dataclass(kw_only=True)
class Row:
    """One layer; times in microseconds, None where no such kernel can serve it."""

    layer: str
    problem: dict[str, Any]
    shape_class: str
    vendor_us: float
    wavelet: str = ""
    wavelet_us: float | None = None
    other: str = ""
    other_us: float | None = None
    roofline: float | None = None
    """The least time by the device's ceilings over our best."""
    kernels: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    vendor_kernels: list[str] = field(default_factory=list)

    @property
    def best_us(self) -> float | None:
        known = [us for us in (self.wavelet_us, self.other_us) if us is not None]
        return min(known, default=None)

    @property
    def is_won(self) -> bool:
        """Whether the fastest of ours has load warps."""
        return self.wavelet_us is not None and self.wavelet_us == self.best_us


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPS, default="conv_bwd_weight")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--most", type=int, default=60, help="kernels tried on a layer")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop then; 0 for no limit")
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def layers(op: str, dtype: str) -> list[tuple[str, ConvProblem]]:
    """The shapes of the trainable layers, each once under its first layer's name."""
    found = network("retinanet", op, dtype=dtype, batch=BATCH)
    return [(str(labels["layer"]), problem) for problem, labels in found]  # type: ignore[misc]


def is_wavelet(kernel: Kernel) -> bool:
    """Whether warps of its own load for it."""
    own = (kernel.op, getattr(kernel, "family", ""))
    return int(getattr(kernel, "load_warps", 0)) > 0 or (kernel.engine == "cuda" and own in LOADING)


def run(layer: str, given: ConvProblem, stand: Stand, args: argparse.Namespace) -> Row:
    problem = stand.fitted(given)
    found = contest(problem, stand, args.most, is_rival=is_wavelet)
    wavelets = {kernel.name for kernel in stand.pool if is_wavelet(kernel)}
    own = found.best(lambda name: name in wavelets)
    others = found.best(lambda name: name not in wavelets)
    row = Row(
        layer=layer,
        problem=problem.to_dict(),
        shape_class=layer_class(given),
        vendor_us=found.vendor_us,
        wavelet=own[0] if own else "",
        wavelet_us=own[1] if own else None,
        other=others[0] if others else "",
        other_us=others[1] if others else None,
        kernels=len(found.screened_us),
        failed=found.failed,
    )
    if row.best_us is not None:
        row.roofline = least_us(problem) / row.best_us
    if args.names:
        piece = stand.bench.piece(problem)
        vendor = stand.bench.engines["vendor"].plan(_vendor(problem), problem, stand.arch)
        row.vendor_kernels = vendor_kernels(vendor.bind(piece.operands, piece.out))
    return row


def _vendor(problem: ConvProblem) -> Kernel:
    from tilewise.ops.vendor import VendorKernel

    return VendorKernel(op_name=problem.op, library="torch")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How often load warps win among ours, and how ours stand against cuDNN, by class."""
    served = [row for row in rows if row.best_us is not None]
    result: dict[str, Any] = {
        "layers": len(rows),
        "served": len(served),
        "wavelet_fastest": sum(row.is_won for row in rows),
    }
    classes: dict[str, list[Row]] = {"all": served}
    for row in served:
        classes.setdefault(row.shape_class, []).append(row)
    for name, members in classes.items():
        ratios = [row.vendor_us / row.best_us for row in members if row.best_us]
        if ratios:
            result[name] = {"count": len(ratios), "geomean": geomean(ratios), "min": min(ratios)}
            result[name]["roofline"] = geomean([row.roofline for row in members if row.roofline])
    return result


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    stand = Stand.dry(args.op) if args.dry_run else Stand.gpu(args.op, args.dtype)
    listed = layers(args.op, args.dtype)
    compile_all(stand, [problem for _, problem in listed], args.most)
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    for layer, problem in listed:
        if end is not None and time.monotonic() >= end:
            print("wavelet: the time is up", file=sys.stderr)
            return
        yield run(layer, problem, stand, args)


def tell(row: Row) -> None:
    def us(value: float | None) -> str:
        return f"{value:8.1f}" if value is not None else "       -"

    ratio = row.vendor_us / row.best_us if row.best_us else 0.0
    problem = ConvProblem.from_dict(row.problem)
    print(
        f"{row.layer:28} {shown(problem)}  wavelet {us(row.wavelet_us)}  other {us(row.other_us)}  "
        f"cuDNN {us(row.vendor_us)}  {ratio:5.2f}  {row.wavelet if row.is_won else row.other}",
        flush=True,
    )
    for name, why in row.failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)


def main() -> int:
    args = arguments()
    rows = []
    try:
        for row in rows_of(args):
            rows.append(row)
            if not args.json:
                tell(row)
    except TilewiseError as error:
        print(f"wavelet: {error}", file=sys.stderr)
        return 2
    totals = summary(rows)
    if args.json:
        print(json.dumps({"op": args.op, "rows": [asdict(r) for r in rows], "summary": totals}))
    else:
        for name, figures in totals.items():
            print(name, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
