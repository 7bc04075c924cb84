"""Edge dimensions: ones, primes, tiny sizes, neighbours of tile sizes, filters at their limits.

Nothing is drawn at random here: the same op always gives the same problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.problem import Problem
from tilewise.errors import ProblemError
from tilewise.problems.draw import Bounds
from tilewise.problems.problem_set import ProblemSet
from tilewise.problems.sampling import maker

_TINY = (1, 2, 3, 5, 8)
_PRIMES = (7, 13, 31, 61, 127, 251, 509, 1021, 2039)
_BESIDE_TILES = tuple(t + d for t in (16, 32, 64, 128, 256) for d in (-1, 1))
_USUAL = (64, 512, 4096)

Fields = Mapping[str, Any]


def edge_problems(
    op: str, arch: Arch | None = None, *, dtype: str = "", **fixed: Any
) -> ProblemSet:
    """Every edge problem of an op that can exist and fits the memory of `arch`."""
    make = maker(op, dtype, **fixed)
    limits = Bounds.of(arch, dtype or "fp32", memory_share=0.5, max_ms=1000.0) if arch else None
    found, seen = ProblemSet(), set[Problem]()
    for family, fields in _gemm_edges() if op == "gemm" else _conv_edges():
        try:
            problem = make(**fields)
        except ProblemError:
            continue  # grids cross values freely; some crossings cannot exist
        if problem not in seen and (limits is None or limits.allow(problem)):
            seen.add(problem)
            found.add(problem, {"family": family})
    return found


def _gemm_edges() -> Iterator[tuple[str, Fields]]:
    for m, n, k in product(_TINY, repeat=3):
        yield "tiny", {"m": m, "n": n, "k": k}
    for at, name in enumerate("mnk"):
        others = "mnk"[:at] + "mnk"[at + 1 :]
        for family, values in (
            ("one", (1,)),
            ("two", (2,)),
            ("prime", _PRIMES),
            ("beside_tile", _BESIDE_TILES),
        ):
            for value, (a, b) in product(values, product(_USUAL, repeat=2)):
                yield f"{family}_{name}", {name: value, others[0]: a, others[1]: b}
        for value in (1, 4096, 65536):
            yield f"only_{name}", {name: value, others[0]: 1, others[1]: 1}
    for p in _PRIMES:
        yield "all_prime", {"m": p, "n": p, "k": p}
    for size in _BESIDE_TILES:
        yield "all_beside_tile", {"m": size, "n": size, "k": size}
    for layout in ("rrr", "crr", "ccr"):
        for m, n, k in ((1, 512, 512), (512, 1, 512), (512, 512, 1), (127, 129, 65), (3, 5, 7)):
            yield f"layout_{layout}", {"m": m, "n": n, "k": k, "layout": layout}
    for batch, (m, n, k) in product((2, 7, 64), ((1, 64, 64), (64, 1, 64), (33, 65, 17))):
        yield "batched", {"batch": batch, "m": m, "n": n, "k": k}


def _conv_edges() -> Iterator[tuple[str, Fields]]:
    yield from _conv_sizes()
    yield from _conv_filters()
    yield from _conv_groups()
    yield from _conv_dimensions()


def _layer(c: int = 64, k: int = 64, size: int = 14, taps: int = 3, **more: Any) -> dict[str, Any]:
    """A plain padded 2-D layer with some fields changed."""
    base = {"n": 2, "c": c, "k": k, "h": size, "w": size, "y": taps, "x": taps}
    return {**base, "pad_h": taps // 2, "pad_w": taps // 2, **more}


def _conv_sizes() -> Iterator[tuple[str, Fields]]:
    for taps in (1, 3):
        for c, k in product(_TINY, repeat=2):
            yield "tiny_channels", _layer(c, k, taps=taps)
        for value in (1, *_PRIMES, *_BESIDE_TILES):
            yield "edge_c", _layer(c=value, taps=taps)
            yield "edge_k", _layer(k=value, taps=taps)
        for n in (1, 3, 7, 31, 33):
            yield "edge_n", _layer(taps=taps, n=n)
        for h, w in product((1, 2, 3, 5, 7, 13, 31, 33, 65), repeat=2):
            yield "edge_image", _layer(taps=taps, h=h, w=w)


def _conv_filters() -> Iterator[tuple[str, Fields]]:
    for y, x in product((1, 2, 3, 4, 5, 7), repeat=2):
        yield "filter", _layer(y=y, x=x, pad_h=y // 2, pad_w=x // 2)
        yield "filter_unpadded", _layer(y=y, x=x, pad_h=0, pad_w=0)
    for size in (1, 2, 3, 5, 7, 14):
        yield "filter_is_image", _layer(size=size, taps=size, pad_h=0, pad_w=0)
    for taps, stride in product((1, 2, 3, 5), (2, 3, 4, 5, 16)):
        yield "stride", _layer(taps=taps, stride_h=stride, stride_w=stride)
    for h, w in ((1, 2), (2, 1), (3, 1)):
        yield "uneven_stride", _layer(stride_h=h, stride_w=w)
    for dilation in (2, 3, 5, 6):
        for pad in (0, 1, dilation):
            yield "dilation", _layer(dilation_h=dilation, dilation_w=dilation, pad_h=pad, pad_w=pad)
    for pad in (2, 3, 7):
        yield "wide_padding", _layer(pad_h=pad, pad_w=pad)
        yield "padded_pointwise", _layer(taps=1, pad_h=pad, pad_w=pad)
    yield "exact_reach", _layer(size=13, dilation_h=6, dilation_w=6, pad_h=0, pad_w=0)


def _conv_groups() -> Iterator[tuple[str, Fields]]:
    for taps, stride in ((1, 1), (3, 1), (3, 2), (5, 1), (7, 1)):
        steps = {"stride_h": stride, "stride_w": stride}
        for g in (2, 3, 7, 8, 32, 33):
            for per_c, per_k in ((1, 1), (1, 2), (1, 7), (2, 1), (3, 5), (4, 4), (17, 8), (8, 1)):
                name = "depthwise" if per_c == 1 else "grouped"
                yield name, _layer(g * per_c, g * per_k, taps=taps, g=g, **steps)


def _conv_dimensions() -> Iterator[tuple[str, Fields]]:
    for w, x, stride in product((1, 7, 100, 1021), (1, 2, 3, 9), (1, 2, 3)):
        for c in (1, 3, 64):
            yield "one_d", {
                "n": 2, "c": c, "k": 32, "w": w, "x": x, "stride_w": stride, "pad_w": x // 2,
            }  # fmt: skip
    for d, z, stride in product((1, 2, 5, 16), (1, 2, 3), (1, 2)):
        deep = {"d": d, "z": z, "pad_d": z // 2, "stride_d": stride}
        for c, g in ((3, 1), (32, 1), (32, 4), (32, 32)):
            yield "three_d", _layer(c, 32, size=9, g=g, **deep)
