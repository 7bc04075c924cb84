#!/usr/bin/env python3
"""What choosing and launching cost in C++: an exported library beside cublasLtMatmul.

usage: python benchmarks/cpp_dispatch.py [--library FOLDER] [--filter EXPR] [--keep FOLDER]

Exports the GEMM library of the H200's model (or takes one that was exported), builds it and
`cpp_dispatch.cpp` with CMake and runs it. Microseconds of host time, each the median over rounds:
`plan new` of problems never seen, `plan kept` of a remembered one, `execute` until the launch
returns, cuBLASLt's heuristic alone and `cublasLtMatmul` with what it found. Below them, Python's
scorer alone on the same kernels. Needs CUDA's headers, cuBLASLt and an sm_90 GPU; says so where
there is none.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tilewise.core.arch import load_arch
from tilewise.export.library import Wanted, prepared, write_library
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.selection.compiled import CompiledScorer
from tilewise.selection.selector import Selector

HERE = Path(__file__).parent
WHERE = "batch == 1 and n % 64 == 0 and k % 64 == 0 and k < 1048576 and n < 1048576"
CMAKE = """\
cmake_minimum_required(VERSION 3.18)
project(cpp_dispatch LANGUAGES CXX)
find_package(CUDAToolkit REQUIRED)
add_subdirectory({library} library)
add_executable(cpp_dispatch {source})
target_link_libraries(cpp_dispatch PRIVATE tilewise CUDA::cublasLt CUDA::cudart)
"""


def wanted(expression: str) -> Wanted:
    return Wanted(
        op="gemm",
        arch=load_arch("sm_90:H200"),
        dtypes=("bf16",),
        layouts=("rcr",),
        expression=expression,
        where=WHERE,
    )


def why_not_here() -> str | None:
    """Why the comparison cannot be built on this machine, or None."""
    if shutil.which("cmake") is None:
        return "there is no cmake"
    nvcc = shutil.which("nvcc")
    toolkits = [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    if any(list(kit.glob("**/include/cublasLt.h")) for kit in toolkits if kit.exists()):
        return None
    return f"there is no cublasLt.h below {' or '.join(map(str, toolkits))}; install cuBLAS"


def scorer_us(expression: str) -> float:
    """Python's compiled scorer alone on the same kernels."""
    export = prepared(wanted(expression))
    scorer = Selector(export.model, export.kernels, export.arch, compiled=True).scorer
    assert isinstance(scorer, CompiledScorer)
    times = []
    for m in range(128, 1128):
        problem = GemmProblem(m=m, n=2048, k=2048, dtype="bf16")
        start = time.perf_counter()
        scorer.rank(problem)
        times.append(1e6 * (time.perf_counter() - start))
    return median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", type=Path, help="a folder that export-cpp wrote")
    parser.add_argument("--filter", default="", help="which kernels to export; by default all")
    parser.add_argument("--keep", type=Path, help="where to export to, and keep it")
    given = parser.parse_args()
    why = why_not_here()
    if why is not None:
        print(f"cpp_dispatch cannot be built: {why}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.library or given.keep or Path(scratch, "library")
        if given.library is None:
            write_library(folder, [prepared(wanted(given.filter))], on_progress=print)
        text = CMAKE.format(library=folder.resolve(), source=HERE / "cpp_dispatch.cpp")
        Path(scratch, "CMakeLists.txt").write_text(text)
        build = Path(scratch, "build")
        configure = ["cmake", "-S", scratch, "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
        for command in (configure, ["cmake", "--build", str(build), "-j"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"cpp_dispatch cannot be built:\n{(done.stdout + done.stderr)[-3000:]}")
                return 1
        code = subprocess.run([build / "cpp_dispatch"]).returncode
    print(f"Python's scorer alone: {scorer_us(given.filter):.3f} us")
    return code


if __name__ == "__main__":
    sys.exit(main())
