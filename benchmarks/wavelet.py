#!/usr/bin/env python3
"""Load warps and math warps against all else, over the layers that MLPerf's RetinaNet trains.

usage: python benchmarks/wavelet.py [--ops conv_bwd_weight,conv_fwd,conv_bwd_data] [--batch 8]
                                    [--dtype bf16|fp16] [--most 10] [--others 4] [--minutes M]
                                    [--out FILE] [--without NAME,...] [--names]
                                    [--compile | --dry-run]
       python benchmarks/wavelet.py --show FILE

RetinaNet on ResNeXt-50 32x4d, images of 800x800: 38 trainable layers, of which layer2.conv1 and
fpn.inner.c3 are one problem and are measured once. For each: the fastest kernel of ours with load
warps of its own (wavelet), the fastest of the others, and cuDNN after its search, timed in turn
inside CUDA graphs with cold caches. --most of the first and --others of the second are tried (more
where there are few of the first): those that a shipped model, or the analytic estimate, expects to
be fastest, each family having its turn.

Kernels are compiled beside the layers that are measured. Every layer is a line of JSON in --out as
soon as it is known; layers that are there already are not measured again. --minutes bounds it all.
A kernel that does not come back ends the run, named; give it, or its family, to --without and start
again. --show prints the tables of a file. --names adds cuDNN's own kernels. --compile only compiles
what is tried on an H200, with or without one. --dry-run puts small layers and this CPU in the place
of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conv_contest import (
    OPS,
    Offer,
    Stand,
    compile_pairs,
    contest,
    geomean,
    layer_class,
    least_us,
    ranker_for,
    shortlist,
    shown,
    vendor_kernels,
)

from tilewise.core.kernel import Kernel
from tilewise.errors import TilewiseError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.problems.networks import network

FIRST = ("conv_bwd_weight", "conv_fwd", "conv_bwd_data")
BATCH = 8
TWINS = {"layer2.1.conv1": "fpn.inner.c3"}
"""Layers of one shape that MLPerf's list counts apart."""
LEADERS = 3
PARTS = (6, 12)
"""Layers of the first batches to be compiled; those measured first wait for few kernels."""
HANGS_S = 30.0
"""No kernel takes as long, its compiler and a search of cuDNN included, unless it hangs."""
SPARE_CORES = 3


@dataclass(kw_only=True)
class Row:
    """One layer; times in microseconds, None where no such kernel can serve it."""

    op: str
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

    @property
    def best(self) -> str:
        return self.wavelet if self.is_won else self.other


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(FIRST), help="with commas between them")
    parser.add_argument("--batch", type=int, default=BATCH, help="images at once")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--most", type=int, default=10, help="wavelet kernels tried on a layer")
    parser.add_argument("--others", type=int, default=4, help="other kernels tried on a layer")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop then; 0 for no limit")
    parser.add_argument("--out", type=Path, help="where layers are added, a line each")
    parser.add_argument("--without", default="", help="kernels or families left out, by commas")
    parser.add_argument("--show", type=Path, help="print the tables of such a file")
    parser.add_argument("--names", action="store_true", help="cuDNN's own kernels, too")
    parser.add_argument("--compile", action="store_true", help="measures nothing")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    strange = sorted(set(args.ops.split(",")) - set(OPS))
    if strange:
        parser.error(f"--ops has {', '.join(strange)}; use {', '.join(OPS)}")
    if min(args.batch, args.most, args.others) < 1:
        parser.error("--batch, --most and --others are at least 1")
    return args


def layers(op: str, dtype: str, batch: int) -> list[tuple[str, ConvProblem]]:
    """The shapes of the trainable layers, each once under its first layer's name."""
    found = network("retinanet", op, dtype=dtype, batch=batch)
    return [(str(labels["layer"]), problem) for problem, labels in found]  # type: ignore[misc]


def is_wavelet(kernel: Kernel) -> bool:
    """Whether warps of its own load for it, which a selector sees as `kernel_load_warps`."""
    return int(getattr(kernel, "load_warps", 0)) > 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer with the kernels that are tried on it."""

    layer: str
    given: ConvProblem
    stand: Stand | Offer
    tried: tuple[Kernel, ...]

    @property
    def problem(self) -> ConvProblem:
        return self.stand.fitted(self.given)


def cases(op: str, args: argparse.Namespace) -> Iterator[Case]:
    """The layers of a direction, with the kernels that are worth trying."""
    stand = Stand.dry(op) if args.dry_run else Stand.gpu(op, args.dtype)
    yield from cases_on(stand, op, args)


def cases_on(stand: Any, op: str, args: argparse.Namespace) -> Iterator[Case]:
    """The same of a stand, or of an offer of kernels that are only compiled."""
    stand.leave_out(args.without.split(","))
    ranker = ranker_for(op, args.dtype, stand)
    for layer, given in layers(op, args.dtype, args.batch):
        problem = stand.fitted(given)
        own = shortlist(problem, stand, args.most, is_wavelet, ranker)
        room = args.others + args.most - len(own)
        others = shortlist(problem, stand, room, lambda k: not is_wavelet(k), ranker)
        yield Case(layer=layer, given=given, stand=stand, tried=(*own, *others))


class Compiling:
    """Compiles the kernels of layers in a thread, in the order in which they are measured."""

    def __init__(self, listed: Sequence[Case]) -> None:
        ends = [*(end for end in PARTS if end < len(listed)), len(listed)]
        starts = [0, *ends[:-1]]
        self._parts = [listed[start:end] for start, end in zip(starts, ends, strict=True)]
        self._ready = {id(case): threading.Event() for case in listed}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        workers = max(1, (os.cpu_count() or 1) - SPARE_CORES)
        for part in self._parts:
            try:
                for stand in {id(case.stand): case.stand for case in part}.values():
                    own = [case for case in part if case.stand is stand]
                    pairs = [(kernel, case.problem) for case in own for kernel in case.tried]
                    compile_pairs(stand, pairs, workers)
            except Exception as error:  # it is compiled, or fails and is named, when it is measured
                print(f"wavelet: compiling ahead: {error}", file=sys.stderr)
            for case in part:
                self._ready[id(case)].set()

    def wait_for(self, case: Case, seconds: float | None) -> bool:
        """Whether the kernels of a layer were compiled in time."""
        return self._ready[id(case)].wait(seconds)


class Watch:
    """Ends the process where a kernel does not come back, and says which."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def note(self, kernel: Kernel) -> None:
        """From now on it is this kernel's time."""
        self.stop()
        self._timer = threading.Timer(self._seconds, self._end, [kernel.name])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, name: str) -> None:
        print(
            f"wavelet: {name}, or cuDNN after it, hangs; start again --without it", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(3)


def run(case: Case, args: argparse.Namespace) -> Row:
    stand, problem = case.stand, case.problem
    watch = Watch(HANGS_S)
    try:
        found = contest(
            problem,
            stand,
            case.tried,
            is_rival=is_wavelet,
            leaders=LEADERS,
            before=watch.note,
        )
    finally:
        watch.stop()
    wavelets = {kernel.name for kernel in case.tried if is_wavelet(kernel)}
    own = found.best(lambda name: name in wavelets)
    others = found.best(lambda name: name not in wavelets)
    row = Row(
        op=problem.op,
        layer=case.layer,
        problem=problem.to_dict(),
        shape_class=layer_class(case.given),
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
        vendor: Kernel = VendorKernel(op_name=problem.op, library="torch")
        theirs = stand.bench.engines["vendor"].plan(vendor, problem, stand.arch)
        row.vendor_kernels = vendor_kernels(theirs.bind(piece.operands, piece.out))
    return row


def rows_of(args: argparse.Namespace, known: Sequence[Row]) -> Iterator[Row]:
    """The layers that are not known yet, as they are measured."""
    start = time.monotonic()
    end = start + 60 * args.minutes if args.minutes else None
    done = {(row.op, row.layer) for row in known}
    listed = [case for op in args.ops.split(",") for case in cases(op, args)]
    listed = [case for case in listed if (case.given.op, case.layer) not in done]
    if not listed:
        return
    compiling, waited, done_now = Compiling(listed), 0.0, 0
    for case in listed:
        now = time.monotonic()
        if not compiling.wait_for(case, None if end is None else max(0.0, end - now)):
            break
        waited += time.monotonic() - now
        if end is not None and time.monotonic() >= end:
            break
        row = run(case, args)
        yield row
        if case.layer in TWINS:
            yield replace(row, layer=TWINS[case.layer])
        done_now += 1
    took = f"{time.monotonic() - start:.0f} s, {waited:.0f} s of it waiting for compilers"
    print(f"{done_now} of {len(listed)} layers in {took}", file=sys.stderr)


def compile_layers(args: argparse.Namespace) -> None:
    """Compiles for an H200 what is tried there."""
    for op in args.ops.split(","):
        listed = list(cases_on(Offer.ahead(op, args.dtype), op, args))
        pairs = [(kernel, case.problem) for case in listed for kernel in case.tried]
        if listed:
            compile_pairs(listed[0].stand, pairs)


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
            result[name] = {
                "count": len(ratios),
                "geomean": round(geomean(ratios), 3),
                "min": round(min(ratios), 3),
                "behind": sum(ratio < 1 for ratio in ratios),
                "roofline": round(geomean([row.roofline for row in members if row.roofline]), 3),
            }
    return result


def read(path: Path) -> list[Row]:
    """The rows of a file; a line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            print(f"wavelet: {path} has a line that is no row: {line[:60]}", file=sys.stderr)
    return rows


def us(value: float | None) -> str:
    return f"{value:.1f}" if value is not None else "-"


def tell(row: Row) -> None:
    ratio = row.vendor_us / row.best_us if row.best_us else 0.0
    problem = ConvProblem.from_dict(row.problem)
    print(
        f"{row.op:15} {row.layer:23} {shown(problem)}  wavelet {us(row.wavelet_us):>8}  "
        f"other {us(row.other_us):>8}  cuDNN {us(row.vendor_us):>8}  {ratio:5.2f}  {row.best}",
        flush=True,
    )
    for name, why in row.failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)


def tables(rows: Iterable[Row]) -> str:
    """A table in Markdown and the summary, for each direction."""
    directions: dict[str, list[Row]] = {}
    for row in rows:
        directions.setdefault(row.op, []).append(row)
    lines = []
    for op, members in directions.items():
        lines += [f"## {op}", "", "| layer | shape | wavelet | other | cuDNN | ratio | fastest |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in members:
            times = (us(at) for at in (row.wavelet_us, row.other_us, row.vendor_us))
            ratio = f"{row.vendor_us / row.best_us:.2f}" if row.best_us else "-"
            shape = " ".join(shown(ConvProblem.from_dict(row.problem)).split())
            lines.append(
                f"| {row.layer} | {shape} | {' | '.join(times)} | {ratio} | `{row.best}` |"
            )
        lines += ["", *(f"{name}: {found}" for name, found in summary(members).items()), ""]
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    if args.show:
        print(tables(read(args.show)))
        return 0
    if args.compile:
        compile_layers(args)
        return 0
    rows = read(args.out) if args.out else []
    try:
        for row in rows_of(args, rows):
            rows.append(row)
            tell(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    except TilewiseError as error:
        print(f"wavelet: {error}", file=sys.stderr)
        return 2
    print(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
