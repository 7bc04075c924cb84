"""A few kernels of every family on small layers: what runs first where they have never run.

python tests/gpu/family_cases.py [--jobs N]      compiles them, on a machine that needs no GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.engines import get_engine
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import ConvProblem

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
SIZES = {"n": 3, "h": 13, "w": 11, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
POINT = {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0}
VOLUME = {"d": 5, "z": 3, "pad_d": 1}
LAYERS: dict[str, dict[str, Any]] = {
    "many tiles": {"n": 16, "c": 64, "k": 64, "h": 48, "w": 48},
    "dense": {"c": 72, "k": 136},
    "1x1": {"c": 136, "k": 72, **POINT},
    "strided": {"c": 64, "k": 96, "stride_h": 2, "stride_w": 2},
    "volume": {"c": 64, "k": 40, **VOLUME},
    "taps of 24": {"c": 24, "k": 24, "stride_h": 2, "stride_w": 2},
    "taps of 16": {"c": 16, "k": 16, "h": 40, "w": 40, "n": 8},
    "groups of 32": {"c": 128, "k": 128, "g": 4, "stride_h": 2, "stride_w": 2},
    "groups of 24": {"c": 96, "k": 96, "g": 4},
    "groups of 40, strided": {"c": 160, "k": 160, "g": 4, "stride_h": 2, "stride_w": 2},
    "groups of 12": {"c": 96, "k": 96, "g": 8, "h": 30, "w": 30},
    "groups of 24 by 2": {"c": 96, "k": 96, "g": 4, "h": 31, "w": 30, "stride_h": 2, "stride_w": 2},
    "groups of 4": {"c": 128, "k": 128, "g": 32, "h": 28, "w": 28},
    "groups of 24 in volumes": {"c": 96, "k": 96, "g": 4, **VOLUME},
    "depthwise": {"c": 96, "k": 96, "g": 96, "h": 28, "w": 28},
    "depthwise line": {"c": 96, "k": 96, "g": 96, "h": 1, "w": 401, "y": 1, "pad_h": 0},
    "image": {"c": 3, "k": 64, "h": 64, "w": 64, "y": 7, "x": 7, "stride_h": 2, "stride_w": 2},
    "patches": {"c": 3, "k": 96, "h": 64, "w": 64, "y": 4, "x": 4, "stride_h": 4, "stride_w": 4},
}
MOST_LAYERS, MOST_KERNELS = 3, 12


def problem(layer: str, op: str) -> ConvProblem:
    direction = op.removeprefix("conv_")
    return ConvProblem(direction=direction, dtype="bf16", **{**SIZES, **LAYERS[layer]})  # type: ignore[arg-type]


def families() -> list[tuple[str, str]]:
    """Op and family of every CUDA kernel."""
    pairs = ((op, get_op(op).module("launch").MODULES) for op in OPS)
    every = [(op, family) for op, known in pairs for engine, family in known if engine == "cuda"]
    return [pair for pair in every if _pool(*pair, load_arch("sm_90:H200"))]


def cases(op: str, family: str, arch: Arch) -> Iterator[tuple[str, ConvProblem, list[Kernel]]]:
    """The layers that a family serves, the small ones first, with kernels of every trait."""
    why, pool, found = get_op(op).why_unusable, _pool(op, family, arch), []
    for layer in LAYERS:
        p = problem(layer, op)
        served = [kernel for kernel in pool if why(kernel, p, arch) is None]
        if served:
            found.append((layer, p, of_every_trait(served)[:MOST_KERNELS]))
    # The newest layers of a family are the special ones; many tiles make blocks walk.
    kept = [*found[:1], *found[1:][-(MOST_LAYERS - 1) :]]
    yield from sorted(kept, key=lambda case: case[1].flops)


def of_every_trait(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels that together have every value of every trait; those with the most new ones first."""
    left, seen, kept = list(kernels), set[Any](), []
    while left:
        best = max(left, key=lambda kernel: len(_traits(kernel) - seen))
        if not _traits(best) - seen:
            break
        kept.append(best)
        seen |= _traits(best)
        left.remove(best)
    return kept


def _traits(kernel: Kernel) -> set[tuple[str, Any]]:
    return {(field.name, getattr(kernel, field.name)) for field in fields(kernel)}  # type: ignore[arg-type]


def _pool(op: str, family: str, arch: Arch) -> list[Kernel]:
    every = load_pool(get_op(op), arch, engines=["cuda"])
    return [k for k in every if (k.family, k.dtype) == (family, "bf16")]  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=None, help="compilers at once")
    args = parser.parse_args()
    arch = load_arch("sm_90:H200")
    pairs = [
        (kernel, p)
        for op, family in families()
        for _, p, kernels in cases(op, family, arch)
        for kernel in kernels
    ]
    failed = get_engine("cuda").compile_ahead(pairs, arch, max_workers=args.jobs)
    print("\n".join(failed) or f"{len(pairs)} kernels on small layers are compiled")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
