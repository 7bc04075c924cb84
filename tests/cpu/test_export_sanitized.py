"""Exported libraries under sanitizers: right calls by several threads, and wrong ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import driver_stub
from exported import STRICT, built
from shown_launches import write_unbuilt

from tilewise.core.arch import load_arch
from tilewise.export.library import Wanted, prepared, write_library

PROGRAM = Path(__file__).with_name("exported_calls.cpp")
SANITIZERS = ("address,undefined", "thread")
CANNOT_OPEN = 77
WANTED = {
    "cpu": Wanted(
        op="gemm",
        arch=load_arch("x86_avx512"),
        dtypes=("fp32",),
        layouts=("rcr",),
        expression='mr == 8 and mc == 192 and nc == 4096 or family == "unpacked" and mr == 6',
    ),
    "gpu": Wanted(
        op="gemm",
        arch=load_arch("sm_90:H200"),
        dtypes=("bf16",),
        layouts=("rcr",),
        expression='family == "tma" and tile_m == 64 or family == "splitk" and split_k == 4',
        where="batch == 1 and n % 64 == 0 and k % 64 == 0",
    ),
}


@pytest.fixture(scope="module", params=list(WANTED))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param) / request.param
    export = prepared(WANTED[request.param])
    if request.param == "gpu":
        write_unbuilt(export, folder)
        driver_stub.compiled(folder, "libcuda.so.1")
    else:
        write_library(folder, [export])
    return folder


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_calls_are_answered_and_nothing_is_amiss(library: Path, sanitizer: str) -> None:
    ran = run(program(library, sanitizer), library)
    if ran.returncode == CANNOT_OPEN:
        pytest.skip(f"the library cannot be opened here: {ran.stdout}")
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the thread sanitizer does not know this kernel's memory layout")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    assert "0 answers are wrong" in ran.stdout


def program(folder: Path, sanitizer: str) -> Path:
    """The calls, linked with the library; all of it sanitized."""
    flags = ["-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", *STRICT]
    shutil.rmtree(folder / "build", ignore_errors=True)
    build = built(folder, f"-DCMAKE_CXX_FLAGS={' '.join(flags)}", "-DCMAKE_BUILD_TYPE=Debug")
    made = build / "calls"
    stand_in = ["-DON_STAND_IN"] if folder.name == "gpu" else []
    command = ["c++", "-std=c++17", *flags, *stand_in, str(PROGRAM), f"-I{folder / 'include'}"]
    command += [str(build / "libtilewise.a"), *map(str, build.glob("libtilewise_kernels.a"))]
    done = subprocess.run(
        [*command, "-o", str(made), "-lpthread", "-ldl"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return made


def run(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    own = {"LD_LIBRARY_PATH": str(folder), "TW_SILENT": "1", "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run([program], env=os.environ | own, capture_output=True, text=True)


def test_the_sanitizers_are_awake(tmp_path: Path) -> None:
    """Each of them ends a program that does what it looks for."""
    told = {
        "address": "int *a = new int[2]; delete[] a; return a[1];",
        "undefined": "volatile int a = 2147483647; return (a + 1) == 0;",
        "thread": "int a = 0; std::thread b([&] { a = 1; }); a = 2; b.join(); return a < 0;",
    }
    for name, body in told.items():
        source, made = tmp_path / f"{name}.cpp", tmp_path / name
        source.write_text(f"#include <thread>\nint main() {{ {body} }}\n")
        flags = [f"-fsanitize={name}", "-fno-sanitize-recover=all", "-g", "-lpthread"]
        subprocess.run(["c++", str(source), *flags, "-o", str(made)], check=True)
        ran = subprocess.run([made], capture_output=True, text=True)
        assert ran.returncode != 0, name
        assert "ERROR" in ran.stderr or "WARNING" in ran.stderr or "runtime error" in ran.stderr
