"""Families of matrix products, each a way to draw sizes that stress something else."""

from __future__ import annotations

from random import Random
from typing import Any

from tilewise.ops.draws import Draw, log_uniform, prime_near

_HIDDEN = (768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 14336, 16384)
_WIDTHS = (1, 1.5, 2, 2.6875, 3, 3.5, 4)
"""What a layer's output is in units of the hidden size: attention, gated and plain MLPs."""


LARGEST = 28672
"""N and K of uniform draws."""


def uniform(align: int) -> Draw:
    """Log-uniform sizes; N and K are multiples of `align`, M is any number of rows."""

    def draw(rng: Random) -> dict[str, Any]:
        return {
            "m": log_uniform(rng, 1, 16384),
            "n": log_uniform(rng, align, LARGEST, align),
            "k": log_uniform(rng, align, LARGEST, align),
        }

    return draw


def _sizes(
    rng: Random, m: tuple[int, int], n: tuple[int, int], k: tuple[int, int]
) -> dict[str, Any]:
    align = rng.choice((8, 16, 64))
    drawn = {}
    for name, (low, high) in (("m", m), ("n", n), ("k", k)):
        drawn[name] = log_uniform(rng, low, high, align if low >= 64 else 1)
    return drawn


def square(rng: Random) -> dict[str, Any]:
    size = log_uniform(rng, 64, 16384, rng.choice((8, 64, 128)))
    return {"m": size, "n": size, "k": size}


def skinny_m(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (2, 32), (512, 28672), (512, 28672))


def vector_m(rng: Random) -> dict[str, Any]:
    return {**_sizes(rng, (1, 1), (256, 65536), (256, 28672)), "m": 1}


def skinny_n(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (512, 65536), (1, 32), (64, 16384))


def small_k(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (128, 16384), (128, 16384), (1, 128))


def deep_k(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (16, 512), (16, 512), (8192, 131072))


def tall(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (16384, 262144), (32, 512), (32, 1024))


def wide(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (32, 512), (16384, 262144), (32, 4096))


def small(rng: Random) -> dict[str, Any]:
    return _sizes(rng, (8, 256), (8, 256), (8, 256))


def language(rng: Random) -> dict[str, Any]:
    """A linear layer of a transformer at some number of tokens."""
    hidden = rng.choice(_HIDDEN)
    inner = int(hidden * rng.choice(_WIDTHS))
    n, k = rng.choice(((inner, hidden), (hidden, inner)))
    return {
        "m": rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
        "n": n,
        "k": k,
    }


def odd(rng: Random) -> dict[str, Any]:
    return {name: log_uniform(rng, 17, 8192) | 1 for name in "mnk"}


def prime(rng: Random) -> dict[str, Any]:
    return {name: prime_near(log_uniform(rng, 17, 8192)) for name in "mnk"}


def near_power(rng: Random) -> dict[str, Any]:
    """Just beside a power of two, where one more tile is nearly empty."""
    return {name: 2 ** rng.randint(4, 13) + rng.choice((-1, 0, 1)) for name in "mnk"}


def batched(rng: Random) -> dict[str, Any]:
    drawn = _sizes(rng, (16, 2048), (16, 2048), (16, 256))
    return {**drawn, "batch": log_uniform(rng, 2, 512)}


FAMILIES: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (
        square,
        skinny_m,
        vector_m,
        skinny_n,
        small_k,
        deep_k,
        tall,
        wide,
        small,
        language,
        odd,
        prime,
        near_power,
        batched,
    )
}
