"""Small random layers and kernels for them, which emulated kernels are held against float64 on.

python tests/emulated/drawn.py --seconds S [--seed N] [--family F]   goes on for so long
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any

from conv_calls import check
from emulation import EmulationError

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.errors import KernelError, ProblemError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.directed import OPS
from tilewise.ops.conv.launch import why_unfused
from tilewise.ops.conv.problem import ConvProblem

ARCH = load_arch("sm_90", "H200")
MOST_WORK = 6e6
"""Products of a layer, and the elements of its tensors; more take seconds."""
TILES: dict[str, tuple[int, ...]] = {
    "tile_m": (64, 128, 192), "tile_n": (32, 64, 96, 128), "stages": (1, 2, 3, 4),
    "math_groups": (1, 2, 3), "load_warps": (1, 2, 4), "cluster": (1, 2), "fill": (0, 1, 2),
    "tile_h": (1, 2, 4, 7, 8), "tile_w": (8, 16, 32), "blocks": (1, 2), "channels": (16, 32, 64),
    "strip": (2, 4, 8, 12), "warps": (2, 4),
}  # fmt: skip
"""Traits of small tiles, so that layers need several."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, and in which order its events happen."""

    kernel: Kernel
    problem: ConvProblem
    epilogue: Epilogue
    units: int
    """Multiprocessors of the device that it is launched for."""
    gaps: tuple[int, int, int]
    """Elements between images (or filters) of operands and result."""
    seed: int

    def run(self) -> None:
        check(
            *(self.kernel, self.problem, self.epilogue),
            seed=self.seed, units=self.units, gaps=self.gaps, is_small=True,
        )  # fmt: skip


def draw_channels(rng: Random) -> dict[str, int]:
    """Of the kinds that families are for."""
    eights = (8, 16, 24, 32, 40, 48, 56, 64, 72, 96, 136)
    kind = rng.choice(("dense", "few", "odd", "image", "small", "side", "ragged", "wide", "depth"))
    if kind in ("dense", "few"):
        c, k = (rng.choice(eights[:4] if kind == "few" else eights) for _ in range(2))
        return {"c": c, "k": k}
    if kind == "odd":
        return {"c": rng.randint(1, 80), "k": rng.randint(1, 80)}
    if kind == "image":
        return {"c": rng.randint(1, 4), "k": rng.choice((*eights, rng.randint(1, 80)))}
    if kind == "depth":
        g = rng.choice((rng.randint(2, 40), *eights))
        return {"c": g, "k": g * rng.choice((1, 1, 1, 2)), "g": g}
    groups = rng.choice((2, 2, 3, 4, 6, 8, 16))
    if kind == "small":
        c, k = (rng.randint(2, 32) for _ in range(2))
    elif kind == "side":
        c, k = (rng.choice((4, 8, 16, 32, 64)) for _ in range(2))
    elif kind == "ragged":
        c, k = (rng.choice((16, 24, 32, 40, 48, 56, 64, 72, 88, 144, 176)) for _ in range(2))
    else:
        c, k = (rng.randint(16, 80) for _ in range(2))
    k = rng.choice((c, c, k))
    groups = min(groups, 4) if max(c, k) > 64 else groups
    return {"c": groups * c, "k": groups * k, "g": groups}


def draw_axis(rng: Random, dim: str, taps: str, is_long: bool) -> dict[str, int]:
    """Sizes along one dimension: sometimes ones, padding beyond the filter, or long reaches."""
    count = rng.choice((1, 2, 3, 3, 3, 4, 5, 7))
    stride, dilation = rng.choice((1, 1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 1, 2, 3))
    size = rng.choice((1, 2, 3, rng.randint(4, 20), rng.randint(4, 40 if is_long else 12)))
    pad = rng.choice((0, count // 2 * dilation, rng.randint(0, count * dilation + 2)))
    if rng.random() < 0.04:  # at the limits of TMA's boxes, corners and steps
        stride, dilation = rng.choice((1, 5, 8, 9)), rng.choice((1, 15, 16, 40, 64, 127, 128))
        pad = rng.choice((0, 15, 16, 17, 127, 128, 129))
        count = rng.choice((2, 3))
    reach = (count - 1) * dilation + 1
    size = max(size, reach - 2 * pad)
    steps = {f"stride_{dim}": stride, f"dilation_{dim}": dilation, f"pad_{dim}": pad}
    return {dim: size, taps: count, **steps}


def draw_problem(rng: Random, ops: Sequence[str] = OPS) -> ConvProblem:
    """A layer of any kind, small enough to emulate."""
    while True:
        dims = rng.choice(("w", "hw", "hw", "hw", "hw", "dhw"))
        sizes: dict[str, Any] = {"w": 1, "x": 1, "n": rng.choice((1, 1, 2, 3, 5, 9))}
        for dim, taps in zip("dhw", "zyx", strict=True):
            if dim in dims:
                sizes |= draw_axis(rng, dim, taps, len(dims) == 1)
        if rng.random() < 0.15:
            kept = ("n", "d", "h", "w")  # 1x1
            sizes = {"x": 1} | {name: size for name, size in sizes.items() if name in kept}
        dtype = rng.choice(("bf16", "bf16", "bf16", "fp16"))
        try:
            p = ConvProblem(
                direction=rng.choice(ops).removeprefix("conv_"),
                **{**sizes, **draw_channels(rng)},
                dtype=dtype,
                out_dtype=rng.choice((dtype, dtype, dtype, "fp32")),
            )
        except ProblemError:
            continue
        if work(p) <= MOST_WORK:
            return p


@cache
def pool(op: str, dtype: str) -> dict[str, list[Kernel]]:
    """The pool's kernels by family."""
    found: dict[str, list[Kernel]] = {}
    for kernel in load_pool(get_op(op), ARCH, ["cuda"]):
        if kernel.dtype == dtype:  # type: ignore[attr-defined]  # all CUDA kernels have one
            found.setdefault(kernel.family, []).append(kernel)  # type: ignore[attr-defined]
    return found


def smaller(kernel: Kernel, rng: Random) -> Kernel:
    """The kernel with some traits drawn anew, where there is such a one."""
    own = [field.name for field in fields(kernel) if field.name in TILES]  # type: ignore[arg-type]
    for _ in range(20):
        try:
            return replace(kernel, **{name: rng.choice(TILES[name]) for name in own})  # type: ignore[type-var]
        except KernelError:
            continue
    return kernel


def draw_kernels(rng: Random, p: ConvProblem, families: Sequence[str] = ()) -> Iterator[Kernel]:
    """One of each family that serves a layer: of the pool, or a smaller one of its kind."""
    why = get_op(p.op).why_unusable
    for family, kernels in pool(p.op, p.dtype).items():
        if families and family not in families:
            continue
        for kernel in rng.sample(kernels, min(12, len(kernels))):
            drawn = smaller(kernel, rng) if rng.random() < 0.7 else kernel
            if why(drawn, p, ARCH) is None:
                yield drawn
                break


def draw_epilogue(rng: Random, kernel: Kernel, p: ConvProblem) -> Epilogue:
    drawn = Epilogue(
        bias=rng.random() < 0.3,
        residual=rng.random() < 0.3,
        sums=rng.random() < 0.3,
        activation=rng.choice(("none", "none", "none", "relu", "silu")),
    )
    return Epilogue() if why_unfused(kernel, p, drawn) else drawn


def draw_gaps(rng: Random, p: ConvProblem) -> tuple[int, int, int]:
    if rng.random() < 0.7:
        return 0, 0, 0
    a, b, c = (rng.choice((0, 8, 64)) for _ in range(3))
    return a, b, c


def siblings(rng: Random, p: ConvProblem, count: int) -> Iterator[ConvProblem]:
    """Layers of other sizes for which most kernels are compiled alike."""
    yield p
    for _ in range(count):
        sizes = {"n": rng.choice((1, 2, 3, 4, 7))}
        for dim, taps in zip("dhw", "zyx", strict=True):
            reach = (getattr(p, taps) - 1) * getattr(p, f"dilation_{dim}") + 1
            least = max(1, reach - 2 * getattr(p, f"pad_{dim}"))
            if getattr(p, dim) > 1:
                sizes[dim] = max(2, rng.randint(least, least + rng.choice((1, 6, 20))))
        made = replace(p, **sizes)
        if made.ndim == p.ndim and work(made) <= MOST_WORK:
            yield made


def work(p: ConvProblem) -> float:
    return p.flops / 2 + 16 * (p.input_elements + p.filter_elements + p.output_elements)


def cases(rng: Random, families: Sequence[str] = (), ops: Sequence[str] = OPS) -> Iterator[Case]:
    """For ever: a layer, and a kernel of each family (or of those given) that serves it."""
    while True:
        p = draw_problem(rng, ops)
        for kernel in draw_kernels(rng, p, families):
            epilogue, units = draw_epilogue(rng, kernel, p), rng.choice((2, 3, 5, 132))
            for own in siblings(rng, p, 3):
                if get_op(p.op).why_unusable(kernel, own, ARCH) is None:
                    yield Case(
                        kernel=kernel,
                        problem=own,
                        epilogue=epilogue,
                        units=units,
                        gaps=draw_gaps(rng, own),
                        seed=rng.choice((0, 0, 1, 2, 3)),
                    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", default=[])
    args = parser.parse_args()
    tried: Counter[str] = Counter()
    failed, start, told = 0, time.monotonic(), 0.0
    for case in cases(Random(args.seed), args.family):
        if time.monotonic() - start > args.seconds:
            break
        tried[f"{case.problem.op} {case.kernel.family}"] += 1  # type: ignore[attr-defined]
        try:
            case.run()
        except (EmulationError, AssertionError) as error:
            failed += 1
            print(f"{case}\n  {str(error)[:600]}", flush=True)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{sum(tried.values())} cases, {failed} failed", file=sys.stderr, flush=True)
    for name, count in sorted(tried.items()):
        print(f"{count:>7,}  {name}")
    print(f"{sum(tried.values()):>7,}  cases were tried, {failed} of them failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
