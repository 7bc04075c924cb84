"""Every Triton convolution against float64, by Triton's interpreter: a JSON line for each case.

Run with TRITON_INTERPRET=1: `conv_interpreted.py DIRECTION [OLD NEW]`; with OLD and NEW the kernels
are read with a piece of their text replaced, and every fourth case is tried.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interpreted import TYPES, poisoned, run

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.errors import KernelError
from tilewise.ops.conv.epilogue import BIAS, RESIDUAL, SUMS, Epilogue
from tilewise.ops.conv.kernels.triton import TritonConvKernel, why_unusable
from tilewise.ops.conv.launch import launch, strides_of
from tilewise.ops.conv.problem import ConvProblem, shapes, storage
from tilewise.ops.conv.reference import reference

ARCH = load_arch("sm_90").with_figures(compute_units=8)
LAYERS: dict[str, dict[str, Any]] = {
    "grouped, strided, dilated": {
        **{"n": 2, "c": 6, "k": 10, "g": 2, "h": 7, "w": 9, "y": 3, "x": 2},
        **{"stride_h": 2, "stride_w": 3, "pad_h": 1, "pad_w": 1, "dilation_h": 2},
    },
    "3-D depthwise": {
        **{"n": 1, "c": 5, "k": 5, "g": 5, "d": 4, "h": 3, "w": 6, "z": 2, "y": 3, "x": 3},
        **{"stride_d": 2, "pad_d": 1, "pad_h": 1, "pad_w": 2, "dilation_w": 2},
    },
    "1-D, two outputs a group, nchw": {
        **{"n": 2, "c": 6, "k": 12, "g": 6, "w": 17, "x": 5, "stride_w": 4, "dilation_w": 6},
        **{"pad_w": 12, "layout": "nchw"},
    },
    "1x1, strided, odd": {
        **{"n": 1, "c": 33, "k": 17, "h": 5, "w": 4, "y": 1, "x": 1, "stride_h": 2, "stride_w": 2},
    },
    "stem": {"n": 1, "c": 3, "k": 8, "h": 9, "w": 7, "y": 3, "x": 3, "stride_h": 2, "pad_w": 1},
    "patches with gaps": {
        **{"n": 1, "c": 4, "k": 7, "h": 8, "w": 8, "y": 2, "x": 2, "stride_h": 3, "stride_w": 3},
    },
    "even channels": {
        **{"n": 1, "c": 32, "k": 16, "h": 4, "w": 3, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
    },
    "one image, one pixel": {
        **{"n": 1, "c": 16, "k": 16, "h": 1, "w": 1, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
    },
}
TILES = {"implicit": (16, 16, 16), "packed": (32, 16, 16), "merged": (32, 16, 16)}


def kernels(op: str, dtype: str) -> Iterator[TritonConvKernel]:
    """A kernel of each family, whole, cut and added by atomics."""
    is_filter = op == "conv_bwd_weight"
    for family in ("implicit", "packed", "merged", "direct"):
        m, n, k = TILES.get(family, (8, 16, 4 if is_filter else 1))
        for fill, atomic in ((0, False), (2, False), (2, True)):
            traits = {"tile_m": m, "tile_n": n, "tile_k": k, "fill": fill, "atomic": atomic}
            try:
                yield TritonConvKernel(op_name=op, family=family, dtype=dtype, **traits)
            except KernelError:
                continue


def operands(problem: ConvProblem) -> dict[int, Any]:
    """Random operands and, poisoned, the result and what the epilogue reads or writes."""
    random = np.random.default_rng(1)
    tensors: dict[int, Any] = {}
    kinds = [problem.dtype.replace("tf32", "fp32")] * 2 + [problem.out_dtype]
    for at, (shape, stored, kind) in enumerate(
        zip(shapes(problem), storage(problem), kinds, strict=True)
    ):
        tensors[at], tensors[-1 - at] = poisoned(shape, stored.axes, kind)
        if at < 2:
            tensors[at].copy_(torch.from_numpy(random.standard_normal(shape)))
    out = tensors[2]
    tensors[BIAS] = torch.from_numpy(random.standard_normal(out.shape[1])).to(out.dtype)
    residual, _ = poisoned(out.shape, storage(problem)[2].axes, problem.out_dtype)
    tensors[RESIDUAL] = residual.copy_(torch.from_numpy(random.standard_normal(out.shape)))
    tensors[SUMS] = torch.full((2, out.shape[1]), float("nan"))
    return tensors


def check(kernel: Kernel, problem: ConvProblem, epilogue: Epilogue) -> dict[str, Any]:
    """The largest error over the largest value of the result, and what rounding explains."""
    tensors = operands(problem)
    lies = strides_of(problem, [tensors[at].stride() for at in range(3)])
    run(launch(kernel, problem, ARCH, strides=lies, is_aligned=False, epilogue=epilogue), tensors)
    expected = reference(problem, *(tensors[at].double().numpy() for at in range(2)))
    if epilogue.bias:
        shape = (1, -1, *(1,) * (expected.ndim - 2))
        expected += tensors[BIAS].double().numpy().reshape(shape)
    if epilogue.residual:
        expected += tensors[RESIDUAL].double().numpy()
    if epilogue.activation == "relu":
        expected = np.maximum(expected, 0)
    found = tensors[2].double().numpy()
    error = apart(found, expected)
    if epilogue.sums:
        axes = (0, *range(2, found.ndim))
        sums = np.stack([found.sum(axes), (found**2).sum(axes)])
        error = max(error, 1e3 * apart(tensors[SUMS].double().numpy(), sums))
    memory = tensors[-3]
    is_inside = bool(memory[:64].isnan().all() and memory[-64:].isnan().all())
    allowed = tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    return {"error": error, "allowed": allowed, "is_inside": is_inside}


def apart(found: Any, expected: Any) -> float:
    return float(np.nan_to_num(np.abs(found - expected).max() / np.abs(expected).max(), nan=1e9))


def cases(direction: str) -> Iterator[tuple[str, TritonConvKernel, ConvProblem, Epilogue]]:
    op = f"conv_{direction}"
    for name, layer in LAYERS.items():
        problem = ConvProblem(direction=direction, dtype="fp16", **layer)
        for kernel in kernels(op, "fp16"):
            yield name, kernel, problem, Epilogue()
    layer = LAYERS["grouped, strided, dilated"]
    for dtype, out in (("fp32", ""), ("tf32", ""), ("fp16", "fp32")):
        problem = ConvProblem(direction=direction, dtype=dtype, out_dtype=out, **layer)
        for kernel in kernels(op, dtype.replace("tf32", "fp32")):
            if kernel.family == "direct" or (dtype != "tf32" and not kernel.atomic):
                yield f"{dtype} {out}", kernel, problem, Epilogue()
    if direction != "bwd_weight":
        sums = direction == "fwd"
        epilogue = Epilogue(bias=True, residual=True, sums=sums, activation="relu")
        for name in ("grouped, strided, dilated", "3-D depthwise"):
            problem = ConvProblem(direction=direction, dtype="fp16", **LAYERS[name])
            for kernel in kernels(op, "fp16"):
                yield f"{name}, epilogue", kernel, problem, epilogue
    # The interpreter has no product of matrices in bf16.
    problem = ConvProblem(direction=direction, dtype="bf16", **LAYERS["3-D depthwise"])
    for kernel in kernels(op, "bf16"):
        if kernel.family == "direct":
            yield "bf16", kernel, problem, Epilogue()


def replace_text(old: str, new: str) -> None:
    """Has the kernels read from a changed copy of their module."""
    name = "tilewise.ops.conv.triton"
    spec = importlib.util.find_spec(name)
    assert spec and spec.origin
    text = Path(spec.origin).read_text()
    assert old in text, old
    copy = Path(tempfile.mkdtemp()) / "triton.py"
    copy.write_text(text.replace(old, new))
    changed = importlib.util.spec_from_file_location(name, copy)
    assert changed and changed.loader
    module = importlib.util.module_from_spec(changed)
    sys.modules[name] = module
    changed.loader.exec_module(module)


def main() -> None:
    direction, *texts = sys.argv[1:]
    if texts:
        replace_text(*texts)
    assert set(TYPES) == {"fp32", "fp16", "bf16"}
    # What is spoilt shows in any of them.
    for name, kernel, problem, epilogue in islice(cases(direction), 0, None, 4 if texts else 1):
        if why_unusable(kernel, problem, ARCH) is None:
            found = check(kernel, problem, epilogue)
            print(json.dumps({"case": name, "kernel": kernel.name, **found}), flush=True)


if __name__ == "__main__":
    main()
