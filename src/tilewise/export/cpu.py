"""CPU kernels of an exported library: sources that CMake compiles, and how they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilewise.core.kernel import Kernel
from tilewise.core.source import comment, identifier
from tilewise.core.tensors import TensorView
from tilewise.core.trace import Examples, Leaf, Tree, trace
from tilewise.engines.cpu import engine as cpu_engine
from tilewise.engines.includes import headers_of
from tilewise.engines.toolchain import BASE_FLAGS
from tilewise.errors import InputError
from tilewise.export.cases import Case, examples
from tilewise.export.render import Constants, LeafSource, value
from tilewise.export.rules import OpExport
from tilewise.ops.contract import Op

_NOT_STATIC = ("-shared",)
_QUIET = "-Wno-sign-conversion -Wno-shadow"
"""What Clang counts to -Wconversion, and to -Wshadow, of kernels as they were measured."""


class CpuLaunches:
    """The numbers that kernels are called with; workspace they say themselves."""

    def __call__(
        self, kernel: Kernel, case: Case, seen: Examples
    ) -> tuple[Tree | None, LeafSource]:
        abi = case.op.module("abi")
        if not hasattr(abi, "numbers"):
            raise InputError(f"{case.op.name} has no `numbers` in its abi.py: it is not exported")
        return trace(lambda: tuple(abi.numbers(case.problem()))), _numbers

    def tell(self, line: str) -> None:
        """Nothing is left out."""

    def compile(self) -> None:
        """Nothing: CMake does."""


def _numbers(leaf: Leaf, constants: Constants) -> list[str]:
    listed = ", ".join(f"int64_t({value(one, constants)})" for one in leaf.value)
    return [f"if (made) made->numbers = {{{listed}}};", "return true;"]


def files(exports: Sequence[OpExport], facts: str) -> Iterator[tuple[str, str]]:
    """Path and text of every kernel, of the headers they include, and of the table of kernels."""
    headers: dict[str, str] = {}
    for export in exports:
        for at, kernel in enumerate(export.kernels):
            unit = cpu_engine.unit(kernel)
            headers |= headers_of(unit.source, None, unit.include_dirs)
            yield f"kernels/{_stem(export, at)}.cpp", _translation(export, at, unit.source, facts)
    team = (cpu_engine.HERE / "team.cpp").read_text()
    headers |= headers_of(team, None, (cpu_engine.HERE / "include",))
    yield "kernels/team.cpp", team
    yield from ((f"kernels/include/{name}", text) for name, text in headers.items())
    yield "src/cpu_kernels.hpp", _table(exports, facts)


def _stem(export: OpExport, at: int) -> str:
    return f"{export.name}_{at:03d}"


def _translation(export: OpExport, at: int, source: str, facts: str) -> str:
    """A kernel's source with names of its own; one set of names for each instruction set."""
    isa = identifier(export.kernels[at].isa)  # type: ignore[attr-defined]  # every CPU kernel has it
    return (
        f"// {comment(facts)}\n"
        f"#define tw tw_{isa}\n"
        f"#define tw_workspace tw_workspace_{_stem(export, at)}\n"
        f"#define tw_run tw_run_{_stem(export, at)}\n{source}"
    )


def _table(exports: Sequence[OpExport], facts: str) -> str:
    declared, tables, places = [], [], []
    is_512 = False
    for export in exports:
        entries = []
        for at, kernel in enumerate(export.kernels):
            stem = _stem(export, at)
            declared.append(f"int64_t tw_workspace_{stem}(const void *);\n")
            declared.append(f"int32_t tw_run_{stem}(const void *);\n")
            entries.append(f"{{tw_workspace_{stem}, tw_run_{stem}}}")
            is_512 |= getattr(kernel, "isa", "") == "avx512"
        listed = ",\n    ".join(entries)
        tables.append(f"const CpuKernel {export.name}_kernels[] = {{\n    {listed}}};\n")
        order = ", ".join(map(str, tensor_places(export.op, export.cases[0])))
        places.append(f"const int32_t {export.name}_places[] = {{{order}}};\n")
    tables.append(_pointers("CpuKernel", "kernels", exports))
    places.append(_pointers("int32_t", "places", exports))
    return f"""\
// {comment(facts)}
// Every CPU kernel: how much scratch memory it needs, and its call.
#pragma once
#include <cstdint>

struct CpuKernel {{
  int64_t (*workspace)(const void *);
  int32_t (*run)(const void *);
}};

extern "C" {{
{"".join(declared)}}}

constexpr bool kNeedsAvx512 = {str(is_512).lower()};
{"".join(tables)}
// Which of a call's tensors (operands, then the result) a kernel takes first, second, ...
{"".join(places)}"""


def _pointers(kind: str, name: str, exports: Sequence[OpExport]) -> str:
    listed = ", ".join(f"{export.name}_{name}" for export in exports)
    return f"const {kind} *const cpu_{name}[] = {{{listed}}};\n"


def tensor_places(op: Op, case: Case) -> list[int]:
    """Which tensor of a call stands at each address that a kernel takes."""
    abi: Any = op.module("abi")
    seen = examples(case, None)
    problem = case.at({name: int(values[0]) for name, values in seen.fields.items()})
    views = [
        TensorView(at, shape, tuple(_dense(shape)), problem.dtype, "cpu")
        for at, shape in enumerate(op.shapes(problem))
    ]
    filled = abi.fill(problem, views[:-1], views[-1])
    return [getattr(filled, name) or 0 for name, *_ in filled._fields_[: len(views)]]


def _dense(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def cmake(exports: Sequence[OpExport]) -> str:
    """What builds the kernels as a static library."""
    flags = " ".join(flag for flag in BASE_FLAGS if flag not in _NOT_STATIC and "std" not in flag)
    by_isa: dict[str, list[str]] = {}
    for export in exports:
        for at, kernel in enumerate(export.kernels):
            isa = str(getattr(kernel, "isa", "avx2"))
            by_isa.setdefault(isa, []).append(f"kernels/{_stem(export, at)}.cpp")
    sources = "\n  ".join(path for paths in by_isa.values() for path in paths)
    lines = [
        f"add_library(tilewise_kernels STATIC\n  kernels/team.cpp\n  {sources})",
        "target_include_directories(tilewise_kernels PRIVATE kernels/include)",
        f"target_compile_options(tilewise_kernels PRIVATE {flags} {_QUIET})",
        "target_compile_features(tilewise_kernels PRIVATE cxx_std_17)",
    ]
    for isa, paths in by_isa.items():
        own = " ".join(cpu_engine.ISA_FLAGS[isa])
        listed = "\n  ".join(paths)
        lines.append(
            f'set_source_files_properties(\n  {listed}\n  PROPERTIES COMPILE_FLAGS "{own}")'
        )
    lines.append("target_link_libraries(tilewise PRIVATE tilewise_kernels)")
    lines.append("target_include_directories(tilewise PRIVATE kernels/include)")
    return "\n".join(lines) + "\n"
