"""What launches of CUDA convolutions ask of the driver is within its limits, whatever the layer."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any

import pytest
from map_limits import why_not_launched

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.errors import ProblemError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.draws import log_uniform
from tilewise.ops.launch import Step
from tilewise.problems.sampling import wide_coverage

ARCH = load_arch("sm_90:H200")
OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
MEMORY = 141 * 10**9
"""Bytes that the tensors of a layer fill at most."""
COUNTED = 2**31


def large(op: str, rng: Random) -> ConvProblem:
    """A layer that fits in memory: sizes up to all of it, reaches up to TMA's limits and beyond."""
    while True:
        dims = rng.choice(("w", "hw", "hw", "dhw"))
        images = log_uniform(rng, 1, rng.choice((8, 1024, COUNTED)))
        sizes: dict[str, Any] = {"w": 1, "x": 1, "n": images, "dtype": "bf16"}
        for dim, taps in zip("dhw", "zyx", strict=True):
            if dim in dims:
                sizes |= _axis(rng, dim, taps)
        try:
            p = ConvProblem(direction=op.removeprefix("conv_"), **sizes, **_channels(rng))
        except ProblemError:
            continue
        if p.bytes <= MEMORY and not p.is_empty:
            return p


def _axis(rng: Random, dim: str, taps: str) -> dict[str, int]:
    count = rng.choice((1, 1, 2, 3, 3, 3, 5, 7, 16))
    stride, dilation = rng.choice((1, 1, 1, 2, 3, 8, 9)), rng.choice((1, 1, 1, 2, 16, 127, 128))
    pad = rng.choice((0, count // 2 * dilation, 15, 16, 17, 127, 128, 129))
    least, size = (count - 1) * dilation + 1 - 2 * pad, rng.choice((64, 8192, COUNTED))
    steps = {f"stride_{dim}": stride, f"dilation_{dim}": dilation, f"pad_{dim}": pad}
    return {dim: max(least, log_uniform(rng, 1, size)), taps: count, **steps}


def _channels(rng: Random) -> dict[str, int]:
    read, written = (log_uniform(rng, 8, 4096, 8) for _ in range(2))
    few, odd = rng.randint(1, 4), rng.randint(1, 64)
    groups, own = log_uniform(rng, 2, 512), rng.choice((1, 4, 8, 16, 24, 32, 40, 64, odd))
    return rng.choice(
        (
            {"c": read, "k": written},
            {"c": few, "k": written},
            {"c": 8 * few, "k": written},
            {"c": groups * own, "k": groups * own, "g": groups},
            {"c": groups * own, "k": groups * rng.choice((8, 16, 24, 32)), "g": groups},
            {"c": read, "k": read, "g": read},
        )
    )


def steps(op: str, problems: list[ConvProblem]) -> Iterator[tuple[Kernel, ConvProblem, Step]]:
    """Of one kernel of each family on the layers, not always the same one."""
    pool, rule = load_pool(get_op(op), ARCH, ["cuda"]), get_op(op).why_unusable
    for turn, problem in enumerate(problems):
        legal: dict[str, list[Kernel]] = {}
        for kernel in pool:
            if rule(kernel, problem, ARCH) is None:
                legal.setdefault(kernel.family, []).append(kernel)  # type: ignore[attr-defined]
        for own in legal.values():
            kernel = own[turn % len(own)]
            made = get_op(op).module("launch").launch(kernel, problem, ARCH)
            yield from ((kernel, problem, s) for s in made.steps if isinstance(s, Step))


def counted(step: Step) -> Iterator[tuple[str, int]]:
    """What a kernel multiplies in 32 bits: how many works and places it counts."""
    c = step.source.constants
    a: dict[str, Any] = dict(zip(step.source.signature, step.arguments, strict=True))
    name, blocks = step.source.function, step.grid[0]
    if name in ("implicit", "halo"):
        sizes = (-(-a[f"size_{dim}"] // 8) for dim in "hw")
        rows = a["pixels"] if name == "implicit" else 64 * a["images"] * a["size_d"] * prod(sizes)
        tiles = -(-rows // c["TILE_M"]) + c["CLUSTER"] - 1
        across = -(-a["out_channels"] // c["TILE_N"]) + c["CLUSTER"] - 1
        yield "tiles", tiles * across * a["groups"] * a["splits"] + blocks
        yield "pixels", tiles * c["TILE_M"] if name == "implicit" else tiles * (c["TILE_M"] // 64)
    elif name in ("wgrad", "halo_wgrad"):
        width = a["in_channels"] if c.get("LOADER") == 2 else -(-a["in_channels"] // 64) * 64
        entries = prod(a[f"taps_{dim}"] for dim in "dhw") * width
        rows = -(-a["out_channels"] // c.get("TILE_M", 64))
        tiles = rows * -(-entries // c.get("TILE_N", 64)) * a["groups"]
        yield "entries", entries + c.get("TILE_N", 64)
        yield "tiles", tiles * a["splits"] + blocks
        if c.get("STREAM"):
            yield "steps of all tiles", tiles * -(-a["pixels"] // 64)
    elif "tile_count" in a:
        yield "tiles", a["tile_count"] + 8 * prod(step.grid)
    elif name.startswith("channelwise"):
        strips = -(-(a["width"] + c["STRIDE_W"] - 1) // c["STRIP"])
        yield "strips", a["images"] * a["depth"] * a["height"] * strips + step.grid[1] * c["WARPS"]


def check(op: str, problems: list[ConvProblem]) -> set[str]:
    """The families whose launches were held against what the driver and 32 bits take."""
    families = set()
    for kernel, problem, step in steps(op, problems):
        told = f"{kernel.name} on {problem}"
        families.add(kernel.family)  # type: ignore[attr-defined]
        assert list(why_not_launched(step, ARCH)) == [], told
        assert [(what, n) for what, n in counted(step) if n >= COUNTED] == [], told
    return families


@pytest.mark.parametrize("op", OPS)
def test_what_is_asked_of_the_driver_is_within_its_limits(op: str) -> None:
    drawn = wide_coverage(op, ARCH, 60, dtype="bf16", seed=5, max_ms=2.0).problems
    assert len(check(op, drawn)) >= 8


@pytest.mark.parametrize("op", OPS)
def test_the_same_of_layers_that_fill_the_memory(op: str) -> None:
    rng = Random(11)
    problems = [large(op, rng) for _ in range(150)]
    assert sum(p.input_elements > COUNTED or p.output_elements > COUNTED for p in problems) >= 15
    assert len(check(op, problems)) >= 8


@pytest.mark.parametrize(
    ("op", "sizes", "why"),
    [
        ("conv_fwd", {"c": 40, "k": 40, "g": 40, "d": 2**30, "z": 3}, "2^31 blocks"),
        ("conv_bwd_weight", {"c": 64, "k": 64, "g": 64, "d": 70000, "z": 65536}, "planes"),
        ("conv_bwd_weight", {"c": 64, "k": 64, "g": 8, "d": 70000, "z": 65536}, "planes"),
    ],
)
def test_volumes_that_no_grid_covers_are_refused(op: str, sizes: dict[str, int], why: str) -> None:
    """Of kernels whose blocks are planes of the filter, or tiles of a plane."""
    values = {"n": 1, "w": 1, "x": 1, "dtype": "bf16", **sizes}
    problem = ConvProblem(direction=op.removeprefix("conv_"), **values)  # type: ignore[arg-type]
    pool, rule = load_pool(get_op(op), ARCH, ["cuda"]), get_op(op).why_unusable
    reasons = [rule(kernel, problem, ARCH) for kernel in pool]
    assert any(why in reason for reason in reasons if reason)
    check(op, [problem])
