"""Which matrix products are worth looking at: families, edges, buckets, and how files say them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from tilewise.ops.buckets import INTENSITY, by_alignment, by_size, excluded
from tilewise.ops.contract import Problems
from tilewise.ops.draws import BESIDE_TILES, PRIMES, TINY, Fields
from tilewise.ops.gemm.capture import READERS
from tilewise.ops.gemm.commands import COMMANDS
from tilewise.ops.gemm.families import FAMILIES, LARGEST, uniform
from tilewise.ops.gemm.problem import GemmProblem

_USUAL = (64, 512, 4096)
_SKINNY = 32
_DEEP = 8
"""A reduction this many times longer than the longer side of the result."""
_SMALL = 2**27
"""Operations below which launching and filling a device cost more than computing."""


def _edges() -> Iterator[tuple[str, Fields]]:
    for m, n, k in product(TINY, repeat=3):
        yield "tiny", {"m": m, "n": n, "k": k}
    for at, name in enumerate("mnk"):
        others = "mnk"[:at] + "mnk"[at + 1 :]
        for family, values in (
            ("one", (1,)),
            ("two", (2,)),
            ("prime", PRIMES),
            ("beside_tile", BESIDE_TILES),
        ):
            for value, (a, b) in product(values, product(_USUAL, repeat=2)):
                yield f"{family}_{name}", {name: value, others[0]: a, others[1]: b}
        for value in (1, 4096, 65536):
            yield f"only_{name}", {name: value, others[0]: 1, others[1]: 1}
    for p in PRIMES:
        yield "all_prime", {"m": p, "n": p, "k": p}
    for size in BESIDE_TILES:
        yield "all_beside_tile", {"m": size, "n": size, "k": size}
    for layout in ("rrr", "crr", "ccr"):
        for m, n, k in ((1, 512, 512), (512, 1, 512), (512, 512, 1), (127, 129, 65), (3, 5, 7)):
            yield f"layout_{layout}", {"m": m, "n": n, "k": k, "layout": layout}
    for batch, (m, n, k) in product((2, 7, 64), ((1, 64, 64), (64, 1, 64), (33, 65, 17))):
        yield "batched", {"batch": batch, "m": m, "n": n, "k": k}


_AXES = (
    by_size("M", lambda p: p.m, 2, 32, 256, 4096),
    by_size("N", lambda p: p.n, 2, 32, 256, 4096),
    by_size("K", lambda p: p.k, 2, 64, 512, 4096),
    by_size("batch", lambda p: p.batch, 2),
    by_alignment("N alignment", lambda p: p.n),
    by_alignment("K alignment", lambda p: p.k),
    INTENSITY,
)
_EXCLUDED = frozenset(
    excluded("N", "1", "N alignment", "x64", "x8", "x2")
    + excluded("N", "2-31", "N alignment", "x64")
    + excluded("K", "1", "K alignment", "x64", "x8", "x2")
    + excluded("K", "2-63", "K alignment", "x64")
)


def _shape(p: GemmProblem) -> str:
    kinds = {
        "batched": p.batch > 1,
        "vector": min(p.m, p.n) == 1,
        "skinny": min(p.m, p.n) <= _SKINNY,
        "deep": p.k >= _DEEP * max(p.m, p.n),
        "odd": any(size % 8 for size in (p.m, p.n, p.k)),
        "small": p.flops < _SMALL,
    }
    return next((name for name, fits in kinds.items() if fits), "large")


def _brief(problem: GemmProblem) -> dict[str, Any]:
    values = problem.to_dict()
    return {key: values[key] for key in ("op", "dtype", "layout", "batch", "M", "N", "K")}


PROBLEMS = Problems(
    families=FAMILIES,
    uniform=uniform,
    largest=LARGEST,
    edges=_edges,
    sizes=("m", "n", "k", "batch"),
    axes=_AXES,
    excluded=_EXCLUDED,
    words={"layout": {}},
    shape=_shape,
    columns=("M", "N", "K", "batch", "layout", "dtype", "split_k"),
    rates=("latency_ms", "tflops", "bandwidth_gb_s"),
    brief=_brief,
    readers=READERS,
    commands=COMMANDS,
)
