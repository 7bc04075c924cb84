"""Convolutions of a layer timed against each other: ours, by family, and the vendor's.

Shared by the benchmarks of convolutions. On a GPU calls are captured in graphs, so that launches
do not count, caches are cold, and cuDNN searches for its fastest routine beforehand. `Stand.dry`
puts a CPU in the GPU's place, to see that a benchmark runs before a GPU is spent on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.dispatch.reshaping import ReshapedPlan, reshaped_for, simpler
from tilewise.engines import Plan, engines_for, get_engine
from tilewise.engines.device import detect
from tilewise.errors import TilewiseError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.problems.networks import network
from tilewise.selection.analytic import AnalyticRanker
from tilewise.selection.choice import Ranker
from tilewise.selection.models import load_models
from tilewise.selection.ranker import ModelRanker
from tilewise.selection.selector import why_foreign
from tilewise.selection.shortlist import fair
from tilewise.sweep.bench import Bench, WrongResultError
from tilewise.sweep.timing import Timer, measure, measure_in_turn

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
SCREEN = Policy(cache="cold", launch="graph", time_ms=1.0, warmup=1, min_repeats=4, max_repeats=12)
FINAL = replace(SCREEN, time_ms=6.0, min_repeats=18, max_repeats=63, rounds=9)
LEADERS = 5
TAKEN_DOWN = 3
"""How a process ends whose device answers no more: what was measured counts, and more may be."""
COPY_TBS, PRODUCT_TFLOPS = 4.23, 790.0
"""What an H200 was seen to copy and to multiply at in bf16, the ceilings of a roofline."""
NETWORKS = {
    "resnet50": 64,
    "resnext50": 64,
    "mobilenet_v2": 64,
    "efficientnet_b0": 64,
    "convnext_tiny": 64,
    "retinanet": 8,
    "unet": 4,
    "deeplab_v3": 8,
    "inception_v3": 32,
    "r3d18": 8,
    "unet3d": 2,
    "wav2vec2": 8,
}
"""Networks whose convolutions are timed, and how many images at once."""


def layer_class(problem: ConvProblem) -> str:
    if problem.is_depthwise:
        return "depthwise"
    if problem.ndim == 3:
        return "3-D"
    if problem.g > 1 and max(problem.c, problem.k) // problem.g <= 32:
        return "grouped"
    return "pointwise" if problem.taps == 1 else "dense"


def least_us(problem: ConvProblem) -> float:
    """What the problem takes at the device's ceilings, its data read and written once."""
    return max(problem.bytes / COPY_TBS, problem.flops / PRODUCT_TFLOPS) * 1e-6


def layers(op: str, dtype: str, only: str = "") -> Iterator[tuple[str, ConvProblem]]:
    """Convolutions of real networks, each problem once."""
    seen: set[str] = set()
    for name, batch in NETWORKS.items():
        if only not in name:
            continue
        for problem in network(name, op, dtype=dtype, batch=batch).problems:
            if problem.key not in seen:
                seen.add(problem.key)
                yield name, problem  # type: ignore[misc]


def spread(listed: Sequence[tuple[str, ConvProblem]], count: int) -> list[tuple[str, ConvProblem]]:
    """About `count` of the layers, the same number of every class as far as it has them, in turn.

    So every beginning is of all classes, for whoever runs out of time.
    """
    classes: dict[str, list[tuple[str, ConvProblem]]] = {}
    for entry in listed:
        classes.setdefault(layer_class(entry[1]), []).append(entry)
    room, left, kept = count, len(classes), []
    for members in sorted(classes.values(), key=len):
        share = min(len(members), -(-room // left))
        step = len(members) / share if share else 1
        own = [members[int(at * step)] for at in range(share)]
        kept += [((at + 0.5) / share, entry) for at, entry in enumerate(own)]
        room, left = room - share, left - 1
    return [entry for _, entry in sorted(kept, key=lambda ranked: ranked[0])]


@dataclass(kw_only=True)
class Offer:
    """A device and the kernels that can run there."""

    arch: Arch
    pool: list[Kernel]
    is_dry: bool = False

    @classmethod
    def ahead(cls, op: str, dtype: str) -> Offer:
        """An H200's, on a machine that only compiles."""
        arch = load_arch("sm_90:H200")
        return cls(arch=arch, pool=_own(op, dtype, arch, engines_for("gpu", get_op(op))))

    def leave_out(self, words: Collection[str]) -> None:
        """Kernels of these names, or families."""
        unwanted = set(words) - {""}
        self.pool = [k for k in self.pool if not {k.name, getattr(k, "family", "")} & unwanted]

    def fitted(self, problem: ConvProblem) -> ConvProblem:
        """The problem as it is run."""
        return problem


@dataclass(kw_only=True)
class Stand(Offer):
    """Where layers are timed: a device, its clock, and the pool that can run there."""

    bench: Bench
    screen: Timer
    final: Timer
    policies: tuple[Policy, Policy]

    @classmethod
    def gpu(cls, op: str, dtype: str) -> Stand:
        """The GPU in this machine; raises where there is none."""
        from tilewise.sweep.bench_cuda import CudaBench, CudaTimer

        arch = detect("gpu")
        engines = {n: get_engine(n) for n in engines_for("gpu", get_op(op))}
        usable = {n: e for n, e in engines.items() if e.why_unavailable() is None}
        cache = max(arch.l2_bytes, arch.l3_bytes)
        return cls(
            arch=arch,
            bench=CudaBench(arch, SCREEN, usable),
            screen=CudaTimer(SCREEN, cache),
            final=CudaTimer(FINAL, cache),
            policies=(SCREEN, FINAL),
            pool=_own(op, dtype, arch, list(usable)),
        )

    @classmethod
    def dry(cls, op: str) -> Stand:
        """This CPU, a few kernels and hardly any repeats."""
        from tilewise.sweep.bench_cpu import CpuBench
        from tilewise.sweep.timing import CpuTimer

        print("a dry run: times mean nothing", file=sys.stderr)
        policy = Policy(time_ms=0.5, warmup=1, min_repeats=3, max_repeats=5, rounds=3)
        arch = detect("cpu")
        pool = _own(op, "fp32", arch, ["cpu"])
        bench = CpuBench(arch, policy, {n: get_engine(n) for n in ("cpu", "vendor")})
        clock = CpuTimer(policy, 1 << 20)
        few = pool[:: max(1, len(pool) // 6)]
        return cls(
            arch=arch,
            bench=bench,
            screen=clock,
            final=clock,
            policies=(policy, policy),
            pool=few,
            is_dry=True,
        )

    def fitted(self, problem: ConvProblem) -> ConvProblem:
        """The problem as it is run: a CPU in the GPU's place gets a small one of its kind."""
        if not self.is_dry:
            return problem
        p, g = problem, min(problem.g, 4)
        c, k = (min(8, size // problem.g) * g for size in (p.c, p.k))
        spans = {
            dim: (getattr(p, tap) - 1) * getattr(p, f"dilation_{dim}") + 1
            for dim, tap in zip("dhw", "zyx", strict=True)
        }
        sizes = {dim: min(getattr(p, dim), max(8, span)) for dim, span in spans.items()}
        return replace(p, n=1, c=c, k=k, g=g, dtype="fp32", out_dtype="fp32", **sizes)


def _own(op: str, dtype: str, arch: Arch, engines: Sequence[str]) -> list[Kernel]:
    every = load_pool(get_op(op), arch, engines)
    return [kernel for kernel in every if getattr(kernel, "dtype", "") == dtype]


@dataclass(kw_only=True)
class Contest:
    """What became of a layer: times of the leaders and the vendor, taken in turn."""

    problem: ConvProblem
    times_us: dict[str, float]
    vendor: str
    screened_us: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def vendor_us(self) -> float:
        return self.times_us[self.vendor]

    def best(self, among: Callable[[str], bool] = lambda name: True) -> tuple[str, float] | None:
        """The fastest of ours that was timed in turn, of those that `among` lets pass."""
        own = {n: t for n, t in self.times_us.items() if n != self.vendor and among(n)}
        return min(own.items(), key=lambda entry: entry[1]) if own else None


def shortlist(
    problem: ConvProblem,
    stand: Offer,
    most: int,
    among: Callable[[Kernel], bool] = lambda kernel: True,
    ranker: Ranker | None = None,
) -> list[Kernel]:
    """The `most` kernels that are expected to be fastest, each family having its turn.

    Kernels are ranked by `ranker`, or by the analytic estimate where it knows no such problems.
    """
    op, arch = get_op(problem.op), stand.arch
    seen = {kernel: as_served(kernel, problem, arch) for kernel in stand.pool if among(kernel)}
    legal = [k for k, given in seen.items() if op.why_unusable(k, given, arch) is None]
    if not legal:
        return []
    if ranker is None or _is_foreign(ranker, problem, arch):
        ranker = AnalyticRanker()
    expected = ranker.predict_us(simpler(op, problem), legal, arch)
    return fair([legal[at] for at in expected.argsort(kind="stable")], most)


def ranker_for(op: str, dtype: str, stand: Offer) -> Ranker:
    """Who says what is worth trying: a shipped model, or the analytic estimate."""
    for model in load_models(op, stand.arch):
        if op == model.op and dtype in model.dtypes:
            return ModelRanker(model)
    return AnalyticRanker()


def _is_foreign(ranker: Ranker, problem: ConvProblem, arch: Arch) -> bool:
    """A dry run's problems are of another dtype than those that a model was sought for."""
    return isinstance(ranker, ModelRanker) and why_foreign(ranker.model, problem, arch) is not None


def as_served(kernel: Kernel, problem: ConvProblem, arch: Arch) -> ConvProblem:
    """The problem, or the simpler one that a kernel computes in its place."""
    found: Any = reshaped_for(get_op(problem.op), kernel, problem, arch)
    return found or problem


def plan(kernel: Kernel, problem: ConvProblem, stand: Stand) -> Plan:
    """As a dispatcher makes it."""
    seen = as_served(kernel, problem, stand.arch)
    made = stand.bench.plan(kernel, seen)
    return made if seen == problem else ReshapedPlan(get_op(problem.op), made, problem)


def contest(
    problem: ConvProblem,
    stand: Stand,
    tried: Sequence[Kernel],
    always: Sequence[Kernel] = (),
    is_rival: Callable[[Kernel], bool] = lambda kernel: False,
    *,
    leaders: int = LEADERS,
    before: Callable[[Kernel], None] = lambda kernel: None,
) -> Contest:
    """Checks and screens kernels, then times the best and the vendor's in turn.

    `before` is told of each that is `tried`. `always` are timed in the end, too. Those that
    `is_rival` tells apart have leaders of their own.
    """
    arch = stand.arch
    tried = list(dict.fromkeys([*tried, *always]))
    vendor: Kernel = VendorKernel(op_name=problem.op, library="torch")
    calls, found, failed = {}, {}, {}
    for kernel in tried:
        before(kernel)
        try:
            calls[kernel.name] = _checked(kernel, problem, stand)
            found[kernel.name] = measure(
                calls[kernel.name], stand.screen, stand.policies[0]
            ).time_us
        except (TilewiseError, WrongResultError, RuntimeError) as error:
            calls.pop(kernel.name, None)
            failed[kernel.name] = f"{type(error).__name__}: {error}"[:300]
            if not stand.bench.is_sound():
                print(f"{kernel.name} took the device down: {error}", file=sys.stderr)
                raise SystemExit(TAKEN_DOWN) from error
    ranked = sorted((k for k in tried if k.name in found), key=lambda k: found[k.name])
    sides = [[k for k in ranked if is_rival(k) == side][:leaders] for side in (False, True)]
    last = [*sides[0], *sides[1], *(k for k in always if k.name in found)]
    timed = list(dict.fromkeys(k.name for k in last))
    piece = stand.bench.piece(problem)
    theirs = stand.bench.engines["vendor"].plan(vendor, problem, arch)
    calls[vendor.name] = theirs.bind(piece.operands, piece.out)
    calls[vendor.name]()  # cuDNN searches now
    timed.insert(0, vendor.name)
    timings = measure_in_turn(
        [calls[name] for name in timed], stand.final, stand.policies[1], lambda _: None
    )
    times = {name: t.time_us for name, t in zip(timed, timings, strict=True)}
    return Contest(
        problem=problem, times_us=times, vendor=vendor.name, screened_us=found, failed=failed
    )


def _checked(kernel: Kernel, problem: ConvProblem, stand: Stand) -> Callable[[], Any]:
    """The kernel's launch, once its result has been found right."""
    made = plan(kernel, problem, stand)
    stand.bench.verify(made, problem)
    piece = stand.bench.piece(problem)
    return made.bind(piece.operands, piece.out)


def compile_pairs(
    stand: Offer, pairs: Sequence[tuple[Kernel, ConvProblem]], max_workers: int | None = None
) -> None:
    """Compiles what contests will need, in parallel; failures are told and fail again there."""
    if stand.is_dry:
        return
    for name in sorted({kernel.engine for kernel, _ in pairs}):
        own = [(k, as_served(k, p, stand.arch)) for k, p in pairs if k.engine == name]
        for failure in get_engine(name).compile_ahead(own, stand.arch, max_workers=max_workers):
            print(f"does not compile: {failure[:300]}", file=sys.stderr)


def vendor_kernels(call: Callable[[], Any]) -> list[str]:
    """The names of the device kernels that a vendor's call runs, longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spans = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    return [event.key for event in spans if event.device_time_total > 0]


def geomean(ratios: Sequence[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else float("nan")


def shown(p: ConvProblem) -> str:
    """A problem in one short line."""
    sizes = "x".join(str(n) for n in (p.d, p.h, p.w)[3 - p.ndim :])
    taps = "x".join(str(n) for n in (p.z, p.y, p.x)[3 - p.ndim :])
    return f"{p.n:3} {p.c:4}->{p.k:4} g{p.g:<4} {sizes:11} {taps:6} s{p.stride_w}"
