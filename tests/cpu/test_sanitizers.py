"""Generated C++ under the address and undefined-behaviour sanitizers, family by family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.engines.toolchain import find_compiler

OPS = ("gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight")

SCRIPT = """
import sys
import numpy as np
import torch
from tilewise.core.dtypes import tolerance
from tilewise.core.tensors import empty, stored_copy
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op

op, arch = get_op(sys.argv[1]), detect("cpu")
flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
engine = CpuEngine(threads=2, extra_flags=flags)
torch_types = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

# One kernel of every family and way of reading, in each of three dtypes where there is one.
chosen = {}
for kernel in load_pool(op, arch, ["cpu"]):
    traits = kernel.to_dict()
    way = traits.get("access") or (traits["layout"], traits["vector"])
    chosen.setdefault((kernel.family, way if kernel.dtype == "fp32" else "", kernel.dtype), kernel)
chosen = [kernel for kernel in chosen.values() if kernel.dtype in torch_types]

if op.name == "gemm":
    sizes = [(1, 1, 1), (31, 37, 41), (4, 203, 67), (211, 3, 90), (96, 96, 96), (300, 1, 129)]
    shapes = [{"M": m, "N": n, "K": k, "layout": l} for m, n, k in sizes for l in ("rrr", "rcr")]
else:
    base = {"N": 2, "C": 16, "K": 24, "Hi": 9, "Wi": 11, "Y": 3, "X": 3, "pad_h": 1, "pad_w": 1}
    changes = [
        {}, {"C": 7, "K": 5, "stride_h": 2, "stride_w": 2}, {"G": 4, "C": 16, "K": 16},
        {"G": 18, "C": 18, "K": 18}, {"Y": 1, "X": 1, "pad_h": 0, "pad_w": 0},
        {"dilation_h": 2, "dilation_w": 3, "pad_w": 3}, {"Di": 4, "Z": 3, "pad_d": 1, "C": 5},
    ]
    shapes = [{**base, **c, "layout": l} for c in changes for l in ("nchw", "nhwc")]

ran = 0
for kernel in chosen:
    for at, values in enumerate(shapes):
        problem = op.make_problem(**values, dtype=kernel.dtype, out_dtype=kernel.out_dtype)
        if op.why_unusable(kernel, problem, arch):
            continue
        torch.manual_seed(at)
        *given, result = [
            torch.randint(-9, 9, s).float() if kernel.dtype == "int8" else torch.randn(s)
            for s in op.shapes(problem)
        ]
        *stored, kept = op.storage(problem)
        given = [t.to(torch_types[kernel.dtype]) for t in given]
        given = [stored_copy(t, s) for t, s in zip(given, stored)]
        out = empty(given[0], tuple(result.shape), problem.out_dtype, kept)
        engine.plan(kernel, problem, arch).execute(given, out)
        expected = op.reference(problem, *(t.double().numpy() for t in given))
        error = np.linalg.norm(out.double().numpy() - expected)
        error /= max(1.0, np.linalg.norm(expected))
        limit = tolerance(kernel.dtype, kernel.out_dtype, problem.gemm.k)
        assert error <= limit, (kernel.name, problem, error)
        ran += 1
print(f"{len(chosen)} kernels, {ran} runs")
assert ran >= 3 * len(chosen)
"""


def sanitizer_libraries() -> list[str]:
    """The run-time libraries, which must be loaded before Python itself."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    found = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [compiler.path, f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"the compiler has no {name}")
        found.append(path)
    return found


def sanitized(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(sanitizer_libraries()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_family_is_clean(op: str) -> None:
    ran = sanitized(SCRIPT, op)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]


def test_the_sanitizers_are_awake() -> None:
    """A kernel that writes one element too many must not pass."""
    overrun = """
import ctypes
from tilewise.engines.toolchain import Unit, compile_units
source = '''#include <cstdlib>
extern "C" __attribute__((visibility("default"))) int f(int n) {
  volatile char* p = (char*)malloc(8);
  p[n] = 1;
  return p[n];
}'''
(made,) = compile_units([Unit(source=source, flags=("-O1", "-fsanitize=address"))])
ctypes.CDLL(str(made.library)).f(8)
"""
    ran = sanitized(overrun)
    assert ran.returncode != 0
    assert "heap-buffer-overflow" in ran.stderr
