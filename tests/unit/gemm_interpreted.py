"""Triton GEMM kernels against float64, by Triton's interpreter: a JSON line for each case.

Run with TRITON_INTERPRET=1: `gemm_interpreted.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from gemm_kernels import gemm_kernel
from interpreted import TYPES, run

from tilewise.core.arch import Arch, load_arch
from tilewise.core.dtypes import tolerance
from tilewise.ops.gemm.arguments import A_SCALE, B_SCALE, BIAS, A, B, C, Epilogue
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel, why_unusable
from tilewise.ops.gemm.launch import default_strides, launch
from tilewise.ops.gemm.problem import GemmProblem

SMALL, LARGE = (load_arch("sm_90").with_figures(compute_units=count) for count in (3, 132))
"""Tiles are more than fit at once on the one, and few enough to be cut on the other."""
FULL = Epilogue(bias=True, activation="relu", scaling="row")


def kernel(family: str, m: int, n: int, k: int, **traits: Any) -> GpuGemmKernel:
    shape = {"dtype": "fp32", "tile_m": m, "tile_n": n, "tile_k": k}
    return gemm_kernel(family=family, **{**shape, **traits})


def arch_for(chosen: GpuGemmKernel) -> Arch:
    return LARGE if chosen.split_k > 1 else SMALL


def cases() -> Iterator[tuple[GpuGemmKernel, GemmProblem, Epilogue]]:
    for vectors in (1, 2, 3, 4):
        for split in (1, 3):
            chosen = kernel("gemv", 4, 1, 64, stages=1, split_k=split)
            for flat in ((vectors, 9), (9, vectors)):
                for layout in ("rcr", "rrr"):
                    problem = GemmProblem(
                        m=flat[0], n=flat[1], k=200, dtype="fp32", layout=layout, batch=split
                    )
                    yield chosen, problem, FULL if split > 1 else Epilogue()
    for chosen in (
        kernel("pointer", 16, 16, 16),
        kernel("splitk", 16, 16, 16, split_k=3),
        kernel("splitk", 16, 16, 16, split_k=2, atomic=True),
        kernel("streamk", 16, 16, 16),
        kernel("skinny", 16, 16, 16, split_k=2),
        kernel("smallk", 16, 32, 64, dtype="fp16"),
    ):
        for layout in ("rcr", "crr"):
            k = 61 if chosen.family == "smallk" else 70
            m = 9 if chosen.family == "skinny" else 37
            yield chosen, GemmProblem(m=m, n=33, k=k, dtype=chosen.dtype, layout=layout), FULL


def tensor(order: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> Any:
    """Random values that lie as the strides say."""
    made = torch.empty_strided(shape, order, dtype=TYPES[dtype])
    return made.copy_(torch.randn(shape))


def error(chosen: GpuGemmKernel, p: GemmProblem, epilogue: Epilogue) -> float:
    shapes = ((p.batch, p.m, p.k), (p.batch, p.k, p.n), (p.batch, p.m, p.n))
    a, b, c = (
        tensor(s, shape, p.dtype) for s, shape in zip(default_strides(p), shapes, strict=True)
    )
    more = {BIAS: torch.randn(p.n).to(c.dtype), A_SCALE: torch.rand(p.m), B_SCALE: torch.rand(p.n)}
    run(launch(chosen, p, arch_for(chosen), epilogue=epilogue), {A: a, B: b, C: c, **more})
    wanted = a.double() @ b.double()
    if epilogue.scaling == "row":
        wanted = wanted * more[A_SCALE].double()[:, None] * more[B_SCALE].double()
    if epilogue.bias:
        wanted = wanted + more[BIAS].double()
    if epilogue.activation == "relu":
        wanted = wanted.relu()
    return float((c.double() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    torch.manual_seed(0)
    for chosen, problem, epilogue in cases():
        why = why_unusable(chosen, problem, arch_for(chosen))
        assert why is None, f"{chosen.name}: {why}"
        found = {
            "kernel": chosen.name,
            "family": chosen.family,
            "problem": str(problem),
            "error": error(chosen, problem, epilogue),
            "allowed": tolerance(problem.dtype, problem.out_dtype, problem.k),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
