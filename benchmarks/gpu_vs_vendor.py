#!/usr/bin/env python3
"""Best GPU kernel of the pool against the vendor: cuBLAS and cuDNN through PyTorch (on ROCm AMD's).

usage: python benchmarks/gpu_vs_vendor.py [--op gemm|conv_fwd|conv_bwd_data|conv_bwd_weight]
                                          [--dtype bf16|fp16|fp8] [--only TEXT] [--part I/N]
                                          [--layers 120] [--most 40] [--minutes M]
                                          [--without FAMILY,...] [--out FILE] [--compile]
                                          [--autotuners] [--dry-run] [--json]

Kernels are checked and screened on every shape, cold cache; the best few, the first of the model's
ranking and the vendor are then timed in turn. The ratio is vendor time over ours. `selected` is
what is picked from the same pool with the vendor in it, by the shipped model or without one.

Of convolutions the --most kernels that the shipped model expects most of are tried, each family
having its turn and those of --without none, on --layers layers of real networks, as many of every
class (dense, pointwise, grouped, depthwise, 3-D) as there are. They are channels-last, cuDNN
searches for its fastest routine beforehand (benchmark mode), and all are timed inside CUDA graphs,
so that launches do not count. A kernel that fails is told and left out. Rows are added to --out as
they are known; layers that it holds are not timed again. `vendor_tables.py` shows it. --compile
only compiles what is tried on an H200, with or without one. --dry-run puts small layers and this
CPU in the place of a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import conv_contest
from conv_contest import geomean

from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.core.problem import Problem
from tilewise.engines import get_engine
from tilewise.engines.contract import Engine
from tilewise.engines.device import detect
from tilewise.errors import TilewiseError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.selection.choice import Choice, Ranked
from tilewise.sweep.bench_cuda import CudaTimer
from tilewise.sweep.timing import measure, measure_in_turn

SCREEN = Policy(cache="cold", time_ms=1.5, warmup=2, min_repeats=5, max_repeats=20)
FINAL = Policy(cache="cold", time_ms=9.0, warmup=2, min_repeats=18, max_repeats=90, rounds=9)
LEADERS = 6
LARGE_FLOPS = 1e11
"""From here on a product is bound by arithmetic and counts as large."""
AUTOTUNED = 10
OPS = ("gemm", *conv_contest.OPS)

# (N, K) of a model's linear layers; M is the number of tokens.
LAYERS = {
    "llama3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "llama3-70b": [(10240, 8192), (8192, 8192), (8192, 28672)],
    "qwen2.5-7b": [(4608, 3584), (37888, 3584), (3584, 18944)],
    "deepseek-v3": [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)],
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
OTHERS = {
    "bert-base": [(4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (512, 30522, 768)],
    "vit-b16": [(6304, 768, 768), (6304, 2304, 768), (6304, 3072, 768), (6304, 768, 3072)],
    "resnet50-1x1": [(25088, 256, 64), (12544, 512, 256), (3136, 2048, 512), (1568, 512, 2048)],
    "dlrm": [(2048, 512, 256), (2048, 1024, 480), (16384, 128, 64), (2048, 1, 256)],
    "square": [(n, n, n) for n in (512, 1024, 2048, 3072, 8192)],
}


@dataclass
class Row:
    """One shape: the vendor's time, ours, and what we used."""

    model: str
    problem: dict[str, Any]
    shape_class: str
    vendor_us: float
    best_us: float
    best: str
    ratio: float
    kernels: int
    search_s: float
    selected: str = ""
    selected_ratio: float | None = None
    selection_us: float | None = None
    roofline: float | None = None
    """The least time by the device's ceilings over ours."""
    final_us: dict[str, float] = field(default_factory=dict)
    """Times taken in turn, by kernel."""
    predicted_us: dict[str, float] = field(default_factory=dict)
    """What the model says of the vendor's routine and of the first of our own."""
    autotuners: dict[str, float] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return "gemm" if "m" in self.problem else f"conv_{self.problem['direction']}"

    def tuning(self) -> dict[str, float]:
        """Ratios and seconds of the autotuners, beside those of the selection."""
        if not self.autotuners or self.selected_ratio is None or self.selection_us is None:
            return self.autotuners
        ours = {"selected_ratio": self.selected_ratio, "selection_s": self.selection_us * 1e-6}
        return {**self.autotuners, **ours}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPS, default="gemm")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), default="bf16")
    parser.add_argument("--only", default="", help="models with this in their name, or MxNxK")
    parser.add_argument("--part", default="1/1", help="every N-th problem from the I-th: I/N")
    parser.add_argument(
        "--autotuners", action="store_true", help="only ten shapes, tuned at run time as well"
    )
    parser.add_argument("--layers", type=int, default=120, help="of convolutions")
    parser.add_argument("--most", type=int, default=40, help="kernels tried on a layer")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop then; 0 for no limit")
    parser.add_argument("--without", default="", help="families or kernels left out, by commas")
    parser.add_argument("--out", type=Path, help="where rows are added, a line each")
    parser.add_argument("--compile", action="store_true", help="convolutions; measures nothing")
    parser.add_argument("--dry-run", action="store_true", help="convolutions, on this CPU")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def problems(op: str, dtype: str, only: str) -> Iterator[tuple[str, Problem]]:
    """Labelled problems of an op."""
    return products(dtype, only) if op == "gemm" else conv_contest.layers(op, dtype, only)


def products(dtype: str, only: str) -> Iterator[tuple[str, GemmProblem]]:
    """Labelled problems; fp8 ones are those that the vendor has a routine for."""
    listed = [
        (model, (m, n, k)) for model, layers in LAYERS.items() for n, k in layers for m in TOKENS
    ]
    listed += [(model, shape) for model, shapes in OTHERS.items() for shape in shapes]
    for model, (m, n, k) in listed:
        is_meant = only in model or only == f"{m}x{n}x{k}"
        if is_meant and not (dtype == "fp8" and (n % 16 or k % 16)):
            yield model, GemmProblem(m=m, n=n, k=k, dtype=dtype)


def shape_class(problem: Any) -> str:
    if isinstance(problem, ConvProblem):
        return conv_contest.layer_class(problem)
    if min(problem.m, problem.n) <= 16:
        return "skinny"
    return "large" if problem.flops >= LARGE_FLOPS else "medium"


class Contest:
    """The tensors of one product, with every contender checked before it is timed."""

    def __init__(self, problem: GemmProblem, arch: Arch) -> None:
        import torch

        self.torch, self.problem, self.arch = torch, problem, arch
        p = problem
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[p.dtype]
        self.a = torch.randn(p.m, p.k, device="cuda").to(kind)
        self.b = torch.randn(p.n, p.k, device="cuda").to(kind).t()
        result = torch.float16 if p.out_dtype == "fp16" else torch.bfloat16
        self.out = torch.empty(p.m, p.n, device="cuda", dtype=result)
        self.expected = self.a.float() @ self.b.float()
        self.one = torch.ones((), device="cuda")

    def vendor(self) -> Any:
        if self.problem.dtype != "fp8":
            return self.torch.mm(self.a, self.b, out=self.out)
        return self.torch._scaled_mm(
            self.a, self.b, self.one, self.one, out_dtype=self.out.dtype, use_fast_accum=True
        )

    def ours(self, kernel: Kernel, engine: Engine) -> Callable[[], Any]:
        """The kernel's launch, once its result has been found right."""
        plan = engine.plan(kernel, self.problem, self.arch)
        self.out.fill_(float("nan"))
        plan.execute([self.a, self.b], self.out)
        apart = (self.out.float() - self.expected).norm() / self.expected.norm()
        if not float(apart) <= tolerance(
            self.problem.dtype, self.problem.out_dtype, self.problem.k
        ):
            raise SystemExit(f"{kernel.name} is wrong on {self.problem}: {float(apart):.3g}")
        return plan.bind([self.a, self.b], self.out)


def run(model: str, problem: Any, pool: list[Kernel], arch: Arch, tune: bool) -> Row:
    contest = Contest(problem, arch)
    cache = max(arch.l2_bytes, arch.l3_bytes)
    screen, final = CudaTimer(SCREEN, cache), CudaTimer(FINAL, cache)
    start = time.perf_counter()
    found = []
    for kernel in pool:
        if get_op(problem.op).why_unusable(kernel, problem, arch) is None:
            call = contest.ours(kernel, get_engine(kernel.engine))
            found.append((measure(call, screen, SCREEN).time_us, kernel, call))
    searched = time.perf_counter() - start
    leaders = sorted(found, key=lambda entry: entry[0])[:LEADERS]
    choice, selection_us = select(problem, arch)
    vendor = f"{problem.op}_vendor_torch"
    calls = {vendor: contest.vendor} | {kernel.name: call for _, kernel, call in leaders}
    told = contenders(choice)
    for ranked in told:
        if ranked.kernel.name not in calls:
            calls[ranked.kernel.name] = contest.ours(
                ranked.kernel, get_engine(ranked.kernel.engine)
            )
    timings = measure_in_turn(list(calls.values()), final, FINAL, lambda _: None)
    times = {name: t.time_us for name, t in zip(calls, timings, strict=True)}
    best = min((kernel.name for _, kernel, _ in leaders), key=times.__getitem__)
    row = Row(
        model=model,
        problem=problem.to_dict(),
        shape_class=shape_class(problem),
        vendor_us=times[vendor],
        best_us=times[best],
        best=best,
        ratio=times[vendor] / times[best],
        kernels=len(found),
        search_s=searched,
        final_us=times,
    )
    if choice is not None:
        if choice.path == "model":
            row.predicted_us = {ranked.kernel.name: ranked.predicted_us for ranked in told}
        row.selected, row.selection_us = choice.kernel.name, selection_us
        row.selected_ratio = times[vendor] / times[row.selected]
    if tune:
        compare_autotuners(row, contest, [call for _, _, call in found], final)
    return row


def run_layer(
    model: str, given: ConvProblem, stand: conv_contest.Stand, tried: list[Kernel]
) -> Row | None:
    """One layer of a network; None where no kernel of ours can serve it."""
    problem = stand.fitted(given)
    choice, selection_us = select(problem, stand.arch)
    told = [r.kernel for r in contenders(choice) if r.kernel.engine != "vendor"]
    start = time.perf_counter()
    found = conv_contest.contest(problem, stand, tried, told)
    for name, why in found.failed.items():
        print(f"failed: {name} on {conv_contest.shown(problem)}: {why}", file=sys.stderr)
    best = found.best()
    if best is None:
        return None
    row = Row(
        model=model,
        problem=problem.to_dict(),
        shape_class=conv_contest.layer_class(given),
        vendor_us=found.vendor_us,
        best_us=best[1],
        best=best[0],
        ratio=found.vendor_us / best[1],
        kernels=len(found.screened_us),
        search_s=time.perf_counter() - start,
        roofline=conv_contest.least_us(problem) / best[1],
        final_us=found.times_us,
    )
    if choice is not None and choice.kernel.name in found.times_us:
        row.selected, row.selection_us = choice.kernel.name, selection_us
        row.selected_ratio = found.vendor_us / found.times_us[row.selected]
    return row


def select(problem: Any, arch: Arch) -> tuple[Choice | None, float]:
    """What the shipped model picks, and how long it takes; (None, 0) without a model."""
    import tilewise

    try:
        # Another problem first: what is loaded once is not counted, what this problem costs is.
        more = {"m": problem.m + 1} if problem.op == "gemm" else {"n": problem.n + 1}
        tilewise.select(replace(problem, **more), arch=arch)
        start = time.perf_counter()
        choice = tilewise.select(problem, arch=arch)
    except TilewiseError:
        return None, 0.0
    return choice, 1e6 * (time.perf_counter() - start)


def contenders(choice: Choice | None) -> list[Ranked]:
    """The first of our own and the vendor's routine; what is chosen is one of the two.

    By their times and predictions any band of ties for the vendor can be judged afterwards.
    """
    found: dict[bool, Ranked] = {}
    for ranked in choice.ranking if choice is not None else ():
        found.setdefault(ranked.kernel.engine == "vendor", ranked)
        if len(found) == 2:
            break
    return list(found.values())


def compare_autotuners(
    row: Row, contest: Contest, calls: list[Callable[[], Any]], timer: CudaTimer
) -> None:
    """What tuning at run time costs and finds: PyTorch's, and Triton's over our own kernels.

    Triton's autotuner times every candidate by `do_bench`; ours are compiled already, which is
    not counted against it.
    """
    import torch
    from triton.testing import do_bench

    start = time.perf_counter()
    best = min(calls, key=do_bench)
    row.autotuners["triton_tuning_s"] = time.perf_counter() - start
    torch._dynamo.reset()  # every shape is compiled anew, as often as there are shapes
    tuned = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
    start = time.perf_counter()
    tuned(contest.a, contest.b)
    torch.cuda.synchronize()
    row.autotuners["max_autotune_tuning_s"] = time.perf_counter() - start
    rivals = [best, lambda: tuned(contest.a, contest.b), contest.vendor]
    found = measure_in_turn(rivals, timer, FINAL, lambda _: None)
    row.autotuners["triton_ratio"] = found[2].time_us / found[0].time_us
    row.autotuners["max_autotune_ratio"] = found[2].time_us / found[1].time_us


def summary(rows: list[Row]) -> dict[str, Any]:
    """Geometric means, all together and by class of shape."""
    groups = {"all": rows}
    for row in rows:
        groups.setdefault(row.shape_class, []).append(row)
    result: dict[str, Any] = {}
    for name, members in groups.items():
        ratios = [row.ratio for row in members]
        picked = [row.selected_ratio for row in members if row.selected_ratio is not None]
        result[name] = {"count": len(members), "geomean": geomean(ratios), "min": min(ratios)}
        shares = [row.roofline for row in members if row.roofline]
        if shares:
            result[name] |= {"roofline": geomean(shares)}
        if picked:
            result[name] |= {"selected_geomean": geomean(picked), "selected_min": min(picked)}
    return result


def taken(listed: list[Any], part: str) -> list[Any]:
    """The problems of one part of several."""
    first, _, parts = part.partition("/")
    if not (first.isdigit() and parts.isdigit() and 1 <= int(first) <= int(parts)):
        raise SystemExit(f"gpu_vs_vendor: --part is {part!r}; write it as 1/4, up to 4/4")
    return listed[int(first) - 1 :: int(parts)]


def shown(problem: Any) -> str:
    """A problem in one short line."""
    if isinstance(problem, GemmProblem):
        return f"{problem.m:6} x {problem.n:6} x {problem.k:6}"
    return conv_contest.shown(problem)


def product_rows(args: argparse.Namespace) -> Iterator[Row]:
    arch, op = detect("gpu"), get_op("gemm")
    engine = get_engine("triton")
    if engine.why_unavailable():
        raise TilewiseError(str(engine.why_unavailable()))
    pool = [k for k in load_pool(op, arch, ["triton"]) if getattr(k, "dtype", "") == args.dtype]
    listed = taken(list(problems(args.op, args.dtype, args.only)), args.part)
    if args.autotuners:
        listed = listed[:: max(1, len(listed) // AUTOTUNED)][:AUTOTUNED]
    pairs = [(k, p) for _, p in listed for k in pool if op.why_unusable(k, p, arch) is None]
    for failure in engine.compile_ahead(pairs, arch):
        print(f"does not compile: {failure}", file=sys.stderr)
    for model, problem in listed:
        yield run(model, problem, pool, arch, args.autotuners)


def attempts(
    args: argparse.Namespace, offer: conv_contest.Offer
) -> list[tuple[str, ConvProblem, list[Kernel]]]:
    """Layers of networks, and the kernels that are tried on each."""
    offer.leave_out(args.without.split(","))
    ranker = conv_contest.ranker_for(args.op, args.dtype, offer)
    every = list(conv_contest.layers(args.op, args.dtype, args.only))
    return [
        (model, p, conv_contest.shortlist(offer.fitted(p), offer, args.most, ranker=ranker))
        for model, p in taken(conv_contest.spread(every, args.layers), args.part)
    ]


def compile_layers(args: argparse.Namespace) -> int:
    """Compiles for an H200 what `layer_rows` times."""
    offer = conv_contest.Offer.ahead(args.op, args.dtype)
    pairs = [(kernel, p) for _, p, tried in attempts(args, offer) for kernel in tried]
    conv_contest.compile_pairs(offer, pairs)
    return 0


def rows_in(path: Path | None, op: str = "", dtype: str = "") -> list[Row]:
    """The rows of a file, those of an op and dtype where given; a line that was cut off is none."""
    rows = []
    for line in path.read_text().splitlines() if path and path.exists() else ():
        with suppress(json.JSONDecodeError, TypeError):
            rows.append(Row(**json.loads(line)))
    return [row for row in rows if op in ("", row.op) and dtype in ("", row.problem["dtype"])]


def layer_rows(args: argparse.Namespace, known: list[Row]) -> Iterator[Row]:
    make = conv_contest.Stand
    stand = make.dry(args.op) if args.dry_run else make.gpu(args.op, args.dtype)
    done = [row.problem for row in known]
    every = attempts(args, stand)
    listed = [entry for entry in every if stand.fitted(entry[1]).to_dict() not in done]
    conv_contest.compile_pairs(stand, [(kernel, p) for _, p, tried in listed for kernel in tried])
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    for model, problem, tried in listed:
        if end is not None and time.monotonic() >= end:
            print("gpu_vs_vendor: the time is up", file=sys.stderr)
            return
        row = run_layer(model, problem, stand, tried)
        if row is not None:
            yield row


def main() -> int:
    args = arguments()
    if args.compile:
        return compile_layers(args)
    dtype = "fp32" if args.dry_run else args.dtype
    rows = [] if args.op == "gemm" else rows_in(args.out, args.op, dtype)
    try:
        for row in product_rows(args) if args.op == "gemm" else layer_rows(args, list(rows)):
            rows.append(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            if not args.json:
                tell(row, args.op)
    except TilewiseError as error:
        print(f"gpu_vs_vendor: {error}", file=sys.stderr)
        return 2
    if not rows:
        print(f"gpu_vs_vendor: nothing was timed; is {args.only!r} a model's?", file=sys.stderr)
        return 2
    totals = summary(rows)
    if args.json:
        label = "a dry run on a CPU" if args.dry_run else detect("gpu").label
        facts = {"op": args.op, "dtype": args.dtype, "arch": label}
        print(json.dumps({**facts, "rows": [asdict(r) for r in rows], "summary": totals}))
    else:
        for name, figures in totals.items():
            print(name, " ".join(f"{k}={v:.3f}" for k, v in figures.items()))
    return 0


def tell(row: Row, op: str) -> None:
    problem = get_op(op).problem.from_dict(row.problem)
    print(
        f"{row.model:14} {shown(problem)}  vendor {row.vendor_us:9.1f} us  "
        f"ours {row.best_us:9.1f} us  {row.ratio:6.3f}  "
        f"selected {row.selected_ratio or 0:6.3f}  {row.best}",
        *([f"roofline {row.roofline:.2f}"] if row.roofline else []),
        *(f"{name}={value:.3g}" for name, value in row.tuning().items()),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
