"""Exported libraries in tests: built by CMake, called through their C interface."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.problem import Problem
from tilewise.export.cases import size_fields, word_fields
from tilewise.export.front import words_of
from tilewise.export.rules import OpExport

ROOM = 512
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
"""All that is exported is compiled so in tests."""


class CProblem(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int32),
        ("words", ctypes.c_int32 * 4),
        ("unused", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 20),
    )


class CRanked(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_int32), ("expected_us", ctypes.c_double))


class CFacts(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int32),
        ("kernel", ctypes.c_int32),
        ("kernel_name", ctypes.c_char_p),
        ("expected_us", ctypes.c_double),
        ("workspace_bytes", ctypes.c_int64),
        ("zeroed_bytes", ctypes.c_int64),
    )


class COptions(ctypes.Structure):
    _fields_ = (("device", ctypes.c_int32), ("threads", ctypes.c_int32))


def built(folder: Path, *options: str) -> Path:
    """The library's build folder; by default with a shared library that Python can open."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    build = folder / "build"
    options = options or ("-DBUILD_SHARED_LIBS=ON", f"-DCMAKE_CXX_FLAGS={' '.join(STRICT)}")
    configure = ["cmake", "-S", str(folder), "-B", str(build), *options]
    for command in (configure, ["cmake", "--build", str(build), "-j", str(os.cpu_count() or 1)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return build


def compiled(folder: Path) -> Path:
    """A GPU library's build folder, made by the compiler alone where there is no CMake."""
    build = folder / "build"
    build.mkdir()
    compiler = shutil.which("c++") or shutil.which("g++") or pytest.skip("no C++ compiler")
    usual = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-c"]
    usual += [f"-I{folder / part}" for part in ("include", "src", "src/scorer", "")]
    objects, running = [], []
    for source in [
        *folder.glob("src/*.cpp"),
        folder / "src/data.S",
        folder / "example/example.cpp",
    ]:
        level = ["-O1"] if source.stem.endswith("_rules") else ["-O2"]
        if (folder / "data" / f"{source.stem}.bin").exists():  # a ranking, as CMake compiles it
            level = ["-O3", "-march=native", "-fno-trapping-math"]
        made = str(build / f"{source.stem}.o")
        objects.append(made)
        command = [compiler, *usual, *level, str(source), "-o", made]
        running.append(subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True))
    for process in running:
        said = process.communicate()[1]
        assert process.returncode == 0, said[-4000:]
    *parts, example = objects
    ends = ["-ldl", "-lpthread"]
    shared = [compiler, "-shared", *parts, "-o", str(build / "libtilewise.so"), *ends]
    linked = [compiler, example, *parts, "-o", str(build / "example"), *ends]
    for command in (shared, linked):
        subprocess.run(command, check=True)
    return build


class Exported:
    """A library that was built, for the ops in their order."""

    def __init__(self, build: Path, exports: Sequence[OpExport]) -> None:
        self.exports = {export.op.name: (at, export) for at, export in enumerate(exports)}
        self.c = ctypes.CDLL(str(build / "libtilewise.so"))
        self.c.tilewise_kernel_name.restype = ctypes.c_char_p
        self.c.tilewise_about.restype = ctypes.c_char_p
        self.c.tilewise_facts.restype = CFacts
        self.c.tilewise_facts.argtypes = [ctypes.c_void_p]
        self.c.tilewise_release.argtypes = self.c.tilewise_close.argtypes = [ctypes.c_void_p]
        self.c.tilewise_execute.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t),
        ]
        self.why = ctypes.create_string_buffer(ROOM)

    def problem(self, problem: Problem) -> CProblem:
        at, export = self.exports[problem.op]
        made = CProblem(op=at)
        for place, name in enumerate(word_fields(export.op)):
            words = words_of(export.op, export.model)[name]
            made.words[place] = words.index(getattr(problem, name))
        for place, name in enumerate(size_fields(export.op)):
            made.sizes[place] = getattr(problem, name)
        return made

    def call(self, name: str, *arguments: Any) -> int:
        """A function's code; what it said is in `said`."""
        self.why.value = b""
        function = getattr(self.c, name)
        return int(function(*arguments, self.why, ctypes.c_size_t(ROOM)))

    @property
    def said(self) -> str:
        return self.why.value.decode()

    def why_unusable(self, problem: Problem, kernel: int) -> str | None:
        code = self.call("tilewise_why_unusable", ctypes.byref(self.problem(problem)), kernel)
        return self.said if code else None

    def rank(self, problem: Problem) -> list[tuple[str, float]]:
        at, export = self.exports[problem.op]
        count = ctypes.c_int32(len(export.kernels))
        found = (CRanked * len(export.kernels))()
        given = ctypes.byref(self.problem(problem))
        code = self.call("tilewise_rank", given, found, ctypes.byref(count))
        assert code == 0, self.said
        names = [self.c.tilewise_kernel_name(at, one.kernel).decode() for one in found]
        return [(names[i], found[i].expected_us) for i in range(count.value)]

    def open(self, **options: int) -> ctypes.c_void_p:
        library = ctypes.c_void_p()
        given = ctypes.byref(COptions(**options))
        code = self.call("tilewise_open", given, ctypes.byref(library))
        if code:
            pytest.skip(f"the library cannot be opened here: {self.said}")
        return library

    def plan(self, library: Any, problem: Problem, kernel: int | None = None) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        given = ctypes.byref(self.problem(problem))
        if kernel is None:
            code = self.call("tilewise_plan_for", library, given, ctypes.byref(made))
        else:
            code = self.call("tilewise_plan_kernel", library, given, kernel, ctypes.byref(made))
        assert code == 0, self.said
        return made
