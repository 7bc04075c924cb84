"""The convolutions that a sweep measures, in which order, and which kernels of each.

Layers of the models that `whole_models.py` runs come first, then other layers of real networks and
drawn ones, of the kinds that models know least of before others; a third are grouped or depthwise.
What `gpu_vs_vendor.py` compares is kept out, so that choices are judged there on layers that no
model has seen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import conv_contest

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.dispatch.reshaping import simpler
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.problems.networks import network, networks_with
from tilewise.problems.problem_set import Labels, ProblemSet
from tilewise.problems.sampling import families, wide_coverage
from tilewise.selection.shortlist import Shortlist

OPS = conv_contest.OPS
FIRST_SHARE, REAL_SHARE, GROUPED_SHARE = 0.3, 0.45, 1 / 3
MODELS = ("resnet50", "resnext50", "convnext_tiny", "efficientnet_b0")
MODEL_BATCHES = (64, 256)
"""Of `whole_models.py`."""
BATCHES = (1, 8, 32, 128, 256)
"""Of networks: one image, a server's few, a training step's many."""
MOST_MS, WHOLE_MS = 0.8, 0.4
"""At the device's peaks: a sweep has little time for a problem, and less with every kernel."""
MOST_BYTES = 3 << 30
"""Of tensors; the reference in fp32 and its comparison take some seven times as much."""
DECODER = ((16, 384, 60), (384, 384, 60), (384, 192, 120), (192, 192, 120), (192, 96, 240))
"""Channels read and written and pixels of `model_cases.video_decoder`, causal: two frames more."""
DIFFUSION = ((320, 640, 3), (640, 640, 3), (320, 640, 1), (640, 640, 1))
"""Channels read and written and taps of `model_cases.unet_block`."""
WIDE_TAPS = 7
Entry = tuple[Problem, Labels]


@dataclass(frozen=True, kw_only=True)
class Set:
    """The problems of one op and dtype."""

    op: str
    dtype: str
    problems: ProblemSet
    first: int
    """How many from the beginning are layers of whole models."""
    whole: frozenset[Problem]
    """Those of which every legal kernel is measured."""
    top: int = 16
    """How many kernels of the others are."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype}"

    def labelled(self) -> Iterator[tuple[float, Problem, str]]:
        """Each problem with its place in a fair order of all sets, and its labels as JSON.

        What was measured in part says so: it is learned from, and never scored.
        """
        for at, (problem, labels) in enumerate(self.problems):
            told = labels if problem in self.whole else {**labels, "top": self.top}
            behind = at >= self.first
            begin, end = (self.first, len(self.problems)) if behind else (0, self.first)
            yield (
                behind + (at - begin + 0.5) / (end - begin),
                problem,
                json.dumps(told, default=str),
            )

    def told(self) -> dict[str, Any]:
        """What it holds."""
        listed: Sequence[Any] = self.problems.problems
        return {
            "set": self.name,
            "problems": len(listed),
            "grouped": sum(p.g > 1 and not p.is_depthwise for p in listed),
            "depthwise": sum(p.is_depthwise for p in listed),
            "dimensions": dict(sorted(Counter(p.ndim for p in listed).items())),
            "real": sum("network" in labels for labels in self.problems.labels),
            "first": self.first,
            "whole": len(self.whole),
        }


def make_set(
    op: str, dtype: str, count: int, arch: Arch, *, seed: int = 0, whole: float = 0.2, top: int = 16
) -> Set:
    """`count` problems from a seed: real ones, then drawn ones, so that a third are grouped."""
    rng = Random(f"{seed}/{op}/{dtype}")
    sampled = _sampled(rng, model_layers(op, dtype, arch), round(FIRST_SHARE * count))
    chosen = as_seen(op, sampled)[: len(sampled)]
    first = len(chosen)
    seen = {problem for problem, _ in chosen}
    others = [entry for entry in real_layers(op, dtype, arch) if entry[0] not in seen]
    chosen += _sampled(rng, others, round(REAL_SHARE * count) - first)
    wanted = round(GROUPED_SHARE * count) - sum(p.g > 1 for p, _ in chosen)  # type: ignore[attr-defined]
    grouped = {"grouped", "depthwise"}
    for only, more in ((grouped, wanted), (set(families(op)) - grouped, count)):
        room = min(more, count - len(chosen))
        if room > 0:
            chosen += wide_coverage(
                *(op, arch, room),
                dtype=dtype,
                seed=seed,
                only=only,
                max_ms=MOST_MS,
                memory_share=MOST_BYTES / arch.memory_bytes,
                avoid=[p for p, _ in chosen],
            )
    rest = chosen[first:]
    rng.shuffle(rest)
    rest.sort(key=lambda entry: not is_weak(entry[0]))
    made = ProblemSet()
    for problem, labels in as_seen(op, [*chosen[:first], *rest])[:count]:
        made.add(problem, labels)
    short = [p for p in made.problems if least_ms(p, arch) <= WHOLE_MS]
    lots = rng.sample(short, min(len(short), round(whole * len(made))))
    return Set(op=op, dtype=dtype, problems=made, first=first, whole=frozenset(lots), top=top)


def is_weak(problem: Any) -> bool:
    """Whether it is of a kind of which models knew too little (`docs/notebook.md`)."""
    p = problem
    is_grouped = p.g > 1 and not p.is_depthwise
    return bool(
        max(p.dilation_d, p.dilation_h, p.dilation_w) > 1
        or p.ndim != 2
        or (p.taps == 1 and p.direction != "fwd")
        or (is_grouped and max(p.stride_h, p.stride_w) > 1)
        or max(p.y, p.x) >= WIDE_TAPS
    )


def as_seen(op: str, entries: Sequence[Entry]) -> list[Entry]:
    """Behind each problem, the one that kernels see in its place; each once."""
    found: dict[Problem, Labels] = {}
    for problem, labels in entries:
        for seen in (problem, simpler(get_op(op), problem)):
            found.setdefault(seen, labels)
    return list(found.items())


def _sampled(rng: Random, entries: Sequence[Entry], count: int) -> list[Entry]:
    """A third of them grouped, as far as there are so many."""
    count = max(0, min(len(entries), count))
    grouped = [e for e in entries if e[0].g > 1]  # type: ignore[attr-defined]
    others = [e for e in entries if e[0].g == 1]  # type: ignore[attr-defined]
    some = max(min(len(grouped), round(GROUPED_SHARE * count)), count - len(others))
    drawn = rng.sample(grouped, some) + rng.sample(others, count - some)
    rng.shuffle(drawn)
    return drawn


def least_ms(problem: Problem, arch: Arch) -> float:
    """What the problem takes at the device's peaks."""
    moved = problem.bytes / (arch.memory_gb_s * 1e6)
    return max(moved, problem.flops / (arch.peak_tflops[problem.dtype] * 1e9))


def model_layers(op: str, dtype: str, arch: Arch) -> list[Entry]:
    """Convolutions of the models that `whole_models.py` runs, as large as it runs them."""
    found = ProblemSet()
    for name in MODELS:
        for batch in MODEL_BATCHES:
            for problem, labels in network(name, op, dtype=dtype, batch=batch):
                found.add(problem, labels)
    for problem in _blocks(op, dtype):
        found.add(problem, {"network": "unet_block" if problem.ndim == 2 else "video_decoder"})
    return _fit(found, arch)


def _blocks(op: str, dtype: str) -> Iterator[ConvProblem]:
    direction = op.removeprefix("conv_")
    for c, k, taps in DIFFUSION:
        sizes = {"n": 8, "c": c, "k": k, "h": 64, "w": 64, "y": taps, "x": taps}
        pads = dict.fromkeys(("pad_h", "pad_w"), taps // 2)
        yield ConvProblem(direction=direction, dtype=dtype, **sizes, **pads)
    if op != "conv_fwd":  # the decoder is not trained
        return
    for c, k, pixels in DECODER:
        sizes = {"n": 1, "c": c, "k": k, "d": 11, "h": pixels, "w": pixels}
        taps3 = {"z": 3, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
        yield ConvProblem(direction=direction, dtype=dtype, **sizes, **taps3)


def real_layers(op: str, dtype: str, arch: Arch) -> list[Entry]:
    """Layers of every network that has any, at all scales, each once."""
    found = ProblemSet()
    for name in networks_with(op):
        for batch in BATCHES:
            for problem, labels in network(name, op, dtype=dtype, batch=batch):
                found.add(problem, labels)
    return _fit(found, arch)


def _fit(found: ProblemSet, arch: Arch) -> list[Entry]:
    """Those that a sweep has time and room for, and that are compared nowhere."""
    if not found.problems:
        return []
    one = found.problems[0]
    compared = {problem for _, problem in conv_contest.layers(one.op, one.dtype)}
    return [
        (problem, labels)
        for problem, labels in found.distinct()
        if problem not in compared
        and problem.bytes <= MOST_BYTES
        and least_ms(problem, arch) <= MOST_MS
    ]


def in_order(listed: Sequence[Set]) -> tuple[list[Problem], list[str]]:
    """The problems of all sets and their labels; every beginning holds its share of each set."""
    ranked = sorted((e for one in listed for e in one.labelled()), key=lambda e: e[0])
    return [problem for _, problem, _ in ranked], [labels for _, _, labels in ranked]


def pool(
    op: str, dtype: str, arch: Arch, engines: Sequence[str], without: Collection[str] = ()
) -> list[Kernel]:
    """The kernels of a set: the vendor's, then our own."""
    own = [k for k in load_pool(get_op(op), arch, engines) if getattr(k, "dtype", "") == dtype]
    own = [k for k in own if getattr(k, "family", "") not in without]
    return [VendorKernel(op_name=op, library="torch"), *own]


class Picks:
    """The kernels of each problem: the vendor's, then ours, the most promising first."""

    def __init__(
        self,
        listed: Sequence[Set],
        kernels: Callable[[Set, Arch], Sequence[Kernel]],
        models: Sequence[Model] = (),
    ) -> None:
        self._sets = {(one.op, one.dtype): one for one in listed}
        self._kernels = kernels
        self._models = {model.op: model for model in models}
        self._pools: dict[str, tuple[Sequence[Kernel], Shortlist]] = {}
        self._held: dict[Problem, tuple[Kernel, ...]] = {}

    def all(self, arch: Arch) -> list[Kernel]:
        """Of all sets."""
        return [k for one in self._sets.values() for k in self._of(one, arch)[0]]

    def __call__(self, problem: Problem, arch: Arch) -> tuple[Kernel, ...]:
        if problem not in self._held:
            one = self._sets[problem.op, problem.dtype]
            kernels, promising = self._of(one, arch)
            vendors = [k for k in kernels if k.engine == "vendor"]
            count = len(kernels) if problem in one.whole else one.top
            self._held[problem] = (*vendors, *promising.chosen(problem, arch, count))
        return self._held[problem]

    def _of(self, one: Set, arch: Arch) -> tuple[Sequence[Kernel], Shortlist]:
        if one.name not in self._pools:
            kernels = self._kernels(one, arch)
            promising = Shortlist(one.top, one.op, lambda _: kernels, self._models.get(one.op))
            self._pools[one.name] = (kernels, promising)
        return self._pools[one.name]
