#!/usr/bin/env python3
"""What choosing and launching cost in C++: an exported library beside cublasLtMatmul.

usage: python benchmarks/cpp_dispatch.py [--top N] [--filter EXPR] [--library FOLDER [--compile]]

Exports the strongest kernels of the H200's GEMM model, builds them with `cpp_dispatch.cpp` by the
C++ compiler alone, and runs it. Microseconds of host time, each the median over rounds: `plan new`
of problems never seen, `plan kept` of a remembered one, `execute` until the launch returns, `bare`
for cuLaunchKernelEx on a kernel that does nothing, cuBLASLt's heuristic alone and `cublasLtMatmul`
with what it found. Below them, Python's scorer alone on the same kernels. Needs an sm_90 GPU and
the headers of CUDA and cuBLASLt, as PyTorch's wheels bring them; says so where there are none.

--library keeps the exported library in a folder, and takes the one that is there: choosing kernels
and compiling them takes minutes, and --compile does no more than that, on any machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "unit"))
from exported import compiled  # noqa: E402

from tilewise.core.arch import load_arch  # noqa: E402
from tilewise.export.library import Wanted, narrowed, prepared, write_library  # noqa: E402
from tilewise.export.rules import OpExport  # noqa: E402
from tilewise.ops.contract import get_op  # noqa: E402
from tilewise.ops.gemm.problem import GemmProblem  # noqa: E402
from tilewise.selection.compiled import CompiledScorer  # noqa: E402
from tilewise.selection.models import load_models  # noqa: E402
from tilewise.selection.selector import Selector  # noqa: E402

WHERE = "batch == 1 and n % 64 == 0 and k % 64 == 0 and n >= 64 and k < 1048576 and n < 1048576"
HEADERS = ("cublasLt.h", "cuda_runtime.h")
LIBRARIES = ("libcublasLt.so", "libcudart.so")


def exported(expression: str, top: int) -> OpExport:
    wanted = Wanted(
        op="gemm",
        arch=load_arch("sm_90:H200"),
        dtypes=("bf16",),
        layouts=("rcr",),
        expression=expression,
        where=WHERE,
        top=top,
    )
    return narrowed(prepared(wanted), wanted)[0]


def found(names: tuple[str, ...]) -> list[Path]:
    """The first of each: in a toolkit, or among Python's packages."""
    packages, nvcc = Path(sysconfig.get_path("purelib")), shutil.which("nvcc")
    toolkits = [
        *([Path(nvcc).resolve().parents[1]] if nvcc else []),
        *Path("/usr/local").glob("cuda*"),
    ]
    roots = [*toolkits, packages / "nvidia", packages / "triton"]
    paths = []
    for name in names:
        every = (path for root in roots for path in sorted(root.rglob(f"{name}*")))
        first = next(every, None)
        if first is None:
            raise FileNotFoundError(f"there is no {name}; install PyTorch for CUDA, or a toolkit")
        paths.append(first)
    return paths


def program(library: Path) -> Path:
    """The benchmark, built beside the library."""
    shutil.rmtree(library / "build", ignore_errors=True)
    build, compiler = compiled(library), shutil.which("c++") or "g++"
    folders = [path.parent for path in found(HEADERS)]
    # Since CUDA 13 headers of cuBLASLt's include some of C++, which only nvcc finds by itself.
    includes = [f"-I{path}" for folder in folders for path in (folder, folder / "cccl")]
    libraries = found(LIBRARIES)
    command = [compiler, "-std=c++17", "-O2", *includes, f"-I{library / 'include'}"]
    command += [str(HERE / "cpp_dispatch.cpp"), str(build / "libtilewise.so")]
    command += [*map(str, libraries), "-ldl", "-o", str(build / "cpp_dispatch")]
    command += [f"-Wl,-rpath,{folder}" for folder in (build, *(p.parent for p in libraries))]
    subprocess.run(command, check=True)
    return build / "cpp_dispatch"


def scorer_us(names: Sequence[str]) -> float:
    """Python's compiled scorer alone on the same kernels."""
    op, arch = get_op("gemm"), load_arch("sm_90:H200")
    model = next(m for m in load_models("gemm", arch) if "bf16" in m.dtypes)
    kernels = [op.kernel_from_name(name) for name in names]
    scorer = Selector(model, kernels, arch, compiled=True).scorer
    assert isinstance(scorer, CompiledScorer)
    times = []
    for m in range(128, 1128):
        problem = GemmProblem(m=m, n=2048, k=2048, dtype="bf16")
        start = time.perf_counter()
        scorer.rank(problem)
        times.append(1e6 * (time.perf_counter() - start))
    return median(times)


def kept(folder: Path, given: argparse.Namespace) -> list[str]:
    """The library in a folder, exported where there is none; the names of its kernels."""
    listed = folder / "kernels.txt"
    if not listed.exists():
        export = exported(given.filter, given.top)
        write_library(folder, [export], on_progress=print)
        listed.write_text("".join(f"{kernel.name}\n" for kernel in export.kernels))
    return listed.read_text().split()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--top", type=int, default=12, help="how many kernels to export")
    parser.add_argument("--filter", default="", help="of which kernels")
    parser.add_argument("--library", type=Path, help="a folder that keeps what was exported")
    parser.add_argument("--compile", action="store_true", help="only exports it")
    given = parser.parse_args()
    if given.compile:
        if given.library is None:
            parser.error("--compile needs --library, where it leaves what it exports")
        kept(given.library, given)
        return 0
    try:
        found((*HEADERS, *LIBRARIES))
    except FileNotFoundError as error:
        print(f"cpp_dispatch cannot be built: {error}")
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.library or Path(scratch, "library")).resolve()
        names = kept(folder, given)
        code = subprocess.run([program(folder)]).returncode
    print(f"Python's scorer alone: {scorer_us(names):.3f} us")
    return code


if __name__ == "__main__":
    sys.exit(main())
