"""Writes the library: all files are made first, then put in place at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tilewise import __version__
from tilewise.core.arch import Arch
from tilewise.core.dtypes import OPERAND_DTYPES
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.plain_files import resolved
from tilewise.core.problem import Problem, check_dtypes
from tilewise.core.sizes import TraceError
from tilewise.core.source import comment
from tilewise.engines import is_foreign
from tilewise.engines.gpu import bound
from tilewise.errors import FileError, InputError
from tilewise.export import cpu, gpu
from tilewise.export.cases import Case, cases, known_names, parse_where
from tilewise.export.example import example_texts
from tilewise.export.front import dtype_enum, op_enum, op_fields, problem_structs, words_of
from tilewise.export.gpu import Compiling
from tilewise.export.ranking import Blob
from tilewise.export.rules import OpExport, op_sources
from tilewise.export.top import Loss, strongest
from tilewise.ops.configs import filter_kernels
from tilewise.ops.contract import get_op
from tilewise.selection import scorer_source
from tilewise.selection.models import load_models
from tilewise.selection.opening import measured_kernels, measured_problem

RUNTIME = Path(__file__).parent / "runtime"
GPU_ENGINE = Path(bound.__file__).parent
SCORER_FILES = ("bins.hpp", "forest.hpp", "lead.hpp", "order.hpp", "scorer.hpp", "trees.hpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a library shall serve."""

    op: str
    arch: Arch
    dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...] = ()
    """By default what each dtype gives."""
    layouts: tuple[str, ...] = ()
    """By default all."""
    expression: str = ""
    """Which kernels; by default all that the model was trained on."""
    where: str = ""
    """Which sizes; by default all."""
    problems: tuple[Problem, ...] = ()
    """What kernels shall win on, and be compiled for where that takes layers; by default, where
    either is asked for, the problems behind the model."""
    top: int | None = None
    """At most so many kernels; by default all, or all that win."""
    model: Model | None = None


@dataclass(slots=True)
class Written:
    """What an export came to."""

    kernels: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    object_bytes: int = 0
    total_bytes: int = 0


def find_model(wanted: Wanted) -> Model:
    """The model that ranks; raises where there is none for all of the dtypes."""
    if wanted.model is not None:
        found = [wanted.model]
    else:
        found = load_models(wanted.op, wanted.arch)
    known = sorted({dtype for model in found for dtype in model.dtypes})
    for model in found:
        if set(wanted.dtypes) <= set(model.dtypes):
            return model
    raise InputError(
        f"there is no model of {wanted.op} on {wanted.arch.name} for {', '.join(wanted.dtypes)}; "
        + (
            f"models there know {', '.join(known)}"
            if known
            else "train one, or name another --arch"
        )
    )


def prepared(wanted: Wanted) -> OpExport:
    """An op with its model, kernels and cases; raises where something is not to be had."""
    op = get_op(wanted.op)
    if not wanted.dtypes:
        raise InputError("--dtype is missing; name at least one, such as bf16")
    model = find_model(wanted)
    arch = model.figures_for(wanted.arch)
    words = words_of(op, model)
    return OpExport(
        op=op,
        model=model,
        arch=arch,
        kernels=_kernels(wanted, model, arch),
        cases=_cases(wanted, words),
        where=parse_where(wanted.where, op),
        words=words,
    )


def narrowed(export: OpExport, wanted: Wanted) -> tuple[OpExport, Loss | None]:
    """The export for given problems, where such are asked for or needed, and what that costs."""
    is_asked = bool(wanted.problems) or wanted.top is not None
    if not is_asked and not known_names(export.op, export.arch):
        return export, None
    problems = wanted.problems or _measured(export.model, wanted.dtypes)
    if not problems:
        raise InputError(
            f"{export.model.name} names no problems that it was measured on; give --problems"
        )
    return strongest(export, problems, wanted.top)


def _measured(model: Model, dtypes: Sequence[str]) -> tuple[Problem, ...]:
    """The problems behind a model."""
    found = [measured_problem(model, at) for at in range(len(model.measured.problems))]
    return tuple(problem for problem in found if problem.dtype in dtypes)


def _kernels(wanted: Wanted, model: Model, arch: Arch) -> tuple[Kernel, ...]:
    op = get_op(wanted.op)
    known = measured_kernels(model)
    pool = [k for k in known if k.engine != "vendor" and not is_foreign(k.engine)]
    if known and not pool:
        engines = ", ".join(sorted({kernel.engine for kernel in known}))
        raise InputError(
            f"{model.name} ranks kernels that others build ({engines}), which cannot be exported; "
            "export-c writes its ranking as a C header"
        )
    pool = [k for k in pool if getattr(k, "dtype", wanted.dtypes[0]) in wanted.dtypes]
    pool = [k for k in pool if op.why_unusable(k, None, arch) is None]
    kept = filter_kernels(pool, wanted.expression) if wanted.expression else pool
    if not kept:
        raise InputError(
            f"none of {len(pool)} kernels of {wanted.op} on {arch.label} is left; loosen --filter"
        )
    return tuple(kept)


def _cases(wanted: Wanted, words: Mapping[str, Sequence[str]]) -> tuple[Case, ...]:
    op = get_op(wanted.op)
    found = []
    for dtype in wanted.dtypes:
        results = wanted.out_dtypes or (element(dtype).result,)
        for result in results:
            check_dtypes(dtype, result, OPERAND_DTYPES)
        asked = {"dtype": (dtype,), "out_dtype": results}
        for name, known in words.items():
            if name in asked:
                continue
            chosen = wanted.layouts if name == "layout" and wanted.layouts else known
            unknown = sorted(set(chosen) - set(known))
            if unknown:
                raise InputError(
                    f"{name} is {unknown[0]!r}; {op.name} has {', '.join(known)}; one that is for "
                    f"another op is written as op:{unknown[0]}"
                )
            asked[name] = tuple(chosen)
        found += cases(op, asked)
    return tuple(found)


def facts_line(exports: Sequence[OpExport]) -> str:
    """What every file says on top."""
    arch = exports[0].arch
    models = ", ".join(export.model.name for export in exports)
    return f"Written by tilewise {__version__} for {arch.label}, models: {models}; do not edit."


def write_library(
    out: Path,
    exports: Sequence[OpExport],
    *,
    max_workers: int | None = None,
    max_objects: int = gpu.MAX_OBJECTS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Written:
    """The library as a new folder; whatever goes wrong, nothing is left behind."""
    try:
        place = resolved(out)
    except OSError as error:
        raise FileError(f"{out} cannot be written: {error.strerror}") from None
    if place.exists():
        raise FileError(f"{out} already exists; choose a new folder")
    around = next(folder for folder in place.parents if folder.exists())
    if not around.is_dir() or not os.access(around, os.W_OK):
        raise FileError(f"{out} cannot be written: nothing can be made in {around}")
    written = Written()
    compiling = gpu.Compiling(max_workers, max_objects, on_progress)
    files = _files(exports, written, compiling)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
            fresh = Path(scratch, "new")
            for path, body in files.items():
                target = fresh / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(body)
            if place.exists():
                raise FileError(f"{out} already exists; choose a new folder")
            fresh.rename(place)
    except OSError as error:
        raise FileError(f"{out} cannot be written: {error.strerror or error}") from None
    written.total_bytes = sum(map(len, files.values()))
    return written


@dataclass(slots=True)
class Parts:
    """What a library is made of: files, and what the templates have filled in."""

    facts: str
    texts: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)

    def take(self, *names: str, into: str = "", out_of: Path = RUNTIME) -> None:
        """Files as they are."""
        self.texts |= {f"{into}{name}": (out_of / name).read_text() for name in names}


def _files(exports: Sequence[OpExport], written: Written, compiling: Compiling) -> dict[str, bytes]:
    """Every file by its path, templates filled in."""
    parts = Parts(facts_line(exports))
    is_gpu = exports[0].arch.kind == "gpu"
    objects = gpu.Objects(exports[0].arch)
    for export in exports:
        written.kernels[export.op.name] = len(export.kernels)
        compiling.on_progress(
            f"{export.op.name}: following rules and launches of {len(export.kernels)} kernels"
        )
        blob = Blob(bytearray())
        launches = gpu.GpuLaunches(export, objects, compiling) if is_gpu else cpu.CpuLaunches()
        try:
            parts.texts |= op_sources(export, launches, blob, parts.facts)
        except TraceError as error:
            raise InputError(f"{export.op.name} cannot be exported: {error}") from error
        parts.blobs[f"data/{export.name}.bin"] = bytes(blob.data)
    if is_gpu:
        parts.blobs |= objects.files()
        parts.texts |= dict(gpu.files(objects, parts.facts))
        written.objects, written.object_bytes = objects.count, objects.total_bytes
    else:
        parts.texts |= dict(cpu.files(exports, parts.facts))
    parts.filled["KERNELS"] = "" if is_gpu else cpu.cmake(exports)
    _runtime(parts, exports, objects.sources)
    for path, text in parts.texts.items():
        for key, value in parts.filled.items():
            text = text.replace(f"@{key}@", value)
        parts.blobs[path] = text.encode()
    return parts.blobs


def _runtime(parts: Parts, exports: Sequence[OpExport], objects: Sequence[str]) -> None:
    """What all libraries have alike."""
    backend = "gpu" if exports[0].arch.kind == "gpu" else "cpu"
    parts.take("tilewise.cpp", "internal.hpp", f"{backend}.cpp", into="src/")
    parts.take("launching.hpp", into="src/", out_of=GPU_ENGINE)
    parts.take(*SCORER_FILES, into="src/scorer/", out_of=scorer_source.INCLUDE)
    parts.take("tilewise.h", "tilewise.hpp", into="include/")
    parts.take("CMakeLists.txt")
    parts.take("example.cpp", into="example/")
    parts.texts["example/memory.hpp"] = (RUNTIME / f"memory_{backend}.hpp").read_text()
    parts.texts["src/registry.cpp"] = _registry(exports, parts.facts)
    parts.texts["src/data.S"] = _data(parts.blobs, objects, parts.facts)
    parts.filled |= {
        "FACTS": comment(parts.facts),
        "OP_ENUM": op_enum(exports),
        "OP_FIELDS": op_fields(exports),
        "DTYPES": dtype_enum(),
        "PROBLEMS": problem_structs(exports),
        "BACKEND": backend,
        "RANKINGS": " ".join(f"src/{export.name}.cpp" for export in exports),
        "RULES": " ".join(f"src/{export.name}_rules.cpp" for export in exports),
        "DATA_FILES": ";".join(f"${{CMAKE_CURRENT_SOURCE_DIR}}/{path}" for path in parts.blobs),
        **example_texts(exports[0]),
    }


def _registry(exports: Sequence[OpExport], facts: str) -> str:
    declared = "".join(f"extern const Op {export.name}_op;\n" for export in exports)
    listed = ", ".join(f"&{export.name}_op" for export in exports)
    return f"""\
// {comment(facts)}
// The ops of this library.
#include "internal.hpp"

namespace tilewise::detail {{
{declared}extern const Op *const ops[] = {{{listed}}};
extern const char about[] = "{comment(facts)}";
}}  // namespace tilewise::detail
"""


def _data(blobs: Mapping[str, bytes], objects: Sequence[str], facts: str) -> str:
    """Tables and objects as they are, linked into the library."""
    lines = [f"/* {comment(facts)} */", "/* Tables of rankings, and kernels as objects. */"]
    lines.append('.section .rodata,"a",@progbits')
    names = {path: f"tilewise_data_{Path(path).stem}" for path in blobs if path.endswith(".bin")}
    names |= {path: f"tilewise_object_{at}" for at, path in enumerate(objects)}
    for path, name in names.items():
        lines += [f".global {name}", ".balign 64", f"{name}:", f'.incbin "{path}"', ".byte 0"]
    lines.append('.section .note.GNU-stack,"",@progbits')
    return "\n".join(lines) + "\n"
