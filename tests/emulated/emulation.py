"""Runs CUDA kernels without a GPU: compiles them with g++ over an emulation of `ops/cuda/ptx.cuh`.

`run(launch, tensors)` does what the driver would do with a `Launch`, on NumPy arrays. Everything a
kernel writes outside of its tensors, reads before it was written, forgets to wait for or waits for
in vain raises `EmulationError` with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from guarded import FILL, GuardedArray
from map_limits import why_not_encoded

import tilewise.ops
from tilewise.core.dtypes import dtype as element
from tilewise.ops.launch import CudaSource, Launch, Pointer, Scratch, Step, TensorMap, Zero

HERE = Path(__file__).parent
OPS = Path(tilewise.ops.__path__[0])
MACHINE = ("machine", "barriers", "fiber", "copies", "matrix")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-fno-gnu-unique")
MAGIC = 0x7457696C65
REPORT_BYTES = 16384
Edits = tuple[tuple[str, str], ...]
"""Texts of a kernel's own file to replace, each occurring in it once: how tests sabotage it."""


class EmulationError(Exception):
    """What went wrong inside the machine, and where."""


class _Hidden(ctypes.Structure):
    """What is missing until a kernel waits for the steps before it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("at", "bytes", "is_missing")),
        ("count", ctypes.c_uint64),
    )


class _Grid(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("smem_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("hidden", ctypes.POINTER(_Hidden)),
        ("hidden_count", ctypes.c_uint32),
    )


class _Map(ctypes.Structure):
    """`TensorMap` of machine/tensor_map.hpp."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("base", ctypes.c_void_p),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("steps", ctypes.c_uint32 * 5),
        *((name, ctypes.c_uint32) for name in ("rank", "element_bytes", "swizzle")),
        *((name, ctypes.c_uint32) for name in ("im2col_pixels", "im2col_channels")),
        ("lower", ctypes.c_int32 * 3),
        ("upper", ctypes.c_int32 * 3),
    )


def run(
    launch: Launch,
    tensors: Sequence[np.ndarray[Any, Any]],
    *,
    seed: int = 0,
    edits: Edits = (),
) -> list[np.ndarray[Any, Any]]:
    """Every tensor of the call after the launch; those given are left as they are.

    Seed 0 lets copies land as late as they can, any other lets them and the warps run at random.
    Steps that overlap find nothing of what those before them write until they wait for it.
    """
    memory = [GuardedArray(tensor) for tensor in tensors]
    workspace = GuardedArray(np.full(launch.workspace_bytes, 0xA5, np.uint8))
    workspace.array[: launch.zeroed_bytes] = 0
    before: list[np.ndarray[Any, Any]] = []  # the first of the steps that overlap
    for step in launch.steps:
        if isinstance(step, Zero):
            at = _address(step.target, memory, workspace)
            ctypes.memset(at, 0, step.size)
            continue
        if not step.overlaps:
            before = [_bytes(guarded).copy() for guarded in (*memory, workspace)]
        hidden = _hide((*memory, workspace), before) if step.overlaps else []
        _run_step(step, memory, workspace, seed, edits, [one for one, *_ in hidden])
    for guarded in (*memory, workspace):
        if guarded.is_torn():
            raise EmulationError("a kernel wrote just before or behind a tensor")
    if workspace.array[: launch.zeroed_bytes].any():
        raise EmulationError("the head of the workspace was not left zero")
    return [guarded.array.copy() for guarded in memory]


def _bytes(guarded: GuardedArray) -> np.ndarray[Any, Any]:
    return guarded.array.reshape(-1).view(np.uint8)


def _hide(
    memory: Sequence[GuardedArray], before: Sequence[np.ndarray[Any, Any]]
) -> list[tuple[_Hidden, Any, Any]]:
    """Spoils what has changed; how to bring it back, and what that reads."""
    hidden = []
    for guarded, was in zip(memory, before, strict=True):
        now = _bytes(guarded).copy()
        is_missing = now != was
        _bytes(guarded)[is_missing] = FILL
        one = _Hidden(guarded.address, now.ctypes.data, is_missing.ctypes.data, now.size)
        hidden.append((one, now, is_missing))
    return hidden


def _run_step(
    step: Step,
    memory: list[GuardedArray],
    workspace: GuardedArray,
    seed: int,
    edits: Edits,
    hidden: Sequence[_Hidden],
) -> None:
    assert isinstance(step.source, CudaSource)
    library = _library(step.source, edits)
    kinds = list(step.source.signature.values())
    if len(kinds) != len(step.arguments):
        raise EmulationError(f"{len(step.arguments)} arguments for a signature of {kinds}")
    kept: list[Any] = []
    pairs = zip(kinds, step.arguments, strict=True)
    values = [_argument(kind, given, memory, workspace, kept) for kind, given in pairs]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    triple = ctypes.c_uint32 * 3
    found = (_Hidden * len(hidden))(*hidden)
    grid = _Grid(
        *(triple(*step.grid), triple(*step.cluster), step.threads, step.smem_bytes, seed),
        *(found, len(hidden)),
    )
    report = ctypes.create_string_buffer(REPORT_BYTES)
    if library.emulated_run(ctypes.byref(grid), addresses, report, REPORT_BYTES):
        raise EmulationError(f"{step.source.function}: {report.value.decode()}")


def _address(
    where: Pointer | Scratch | TensorMap, memory: list[GuardedArray], workspace: GuardedArray
) -> int:
    if isinstance(where, Scratch):
        return workspace.address + where.offset
    return memory[where.tensor].address + getattr(where, "offset", 0)


def _argument(
    kind: str, given: Any, memory: list[GuardedArray], workspace: GuardedArray, kept: list[Any]
) -> Any:
    """The argument as it lies in memory; what it points to is kept in `kept`."""
    if kind == "map":
        made = _tensor_map(given, memory)
        kept.append(made)
        # 128 bytes, as the driver's own; the machine reads the address that it begins with.
        return (ctypes.c_uint64 * 16)(ctypes.addressof(made))
    if kind.startswith("*"):
        return ctypes.c_uint64(_address(given, memory, workspace))
    return {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}[kind](given)


def _tensor_map(given: TensorMap, memory: list[GuardedArray]) -> _Map:
    if reason := why_not_encoded(given):
        raise EmulationError(f"{given}: {reason}")
    size, rank = element(given.dtype).bytes, len(given.sizes)
    made = _Map(MAGIC, _address(given, memory, memory[0]))
    made.rank, made.element_bytes, made.swizzle = rank, size, given.swizzle
    strides = (size, *given.strides)
    steps = given.steps or (1,) * rank
    for name, values in (("sizes", given.sizes), ("strides", strides), ("steps", steps)):
        getattr(made, name)[:rank] = values
    if given.im2col is None:
        made.box[:rank] = given.box
    else:
        walk = given.im2col
        made.im2col_pixels, made.im2col_channels = walk.pixels, walk.channels
        made.lower[: rank - 2], made.upper[: rank - 2] = walk.lower, walk.upper
    reach = sum((n - 1) * s for n, s in zip(given.sizes, strides, strict=True))
    if given.offset + reach + size > memory[given.tensor].array.nbytes:
        raise EmulationError(f"{given}: it reaches out of the tensor")
    return made


_loaded: dict[Path, ctypes.CDLL] = {}


def _library(source: CudaSource, edits: Edits) -> ctypes.CDLL:
    path = build(source, edits)
    if path not in _loaded:
        _loaded[path] = ctypes.CDLL(str(path))
    return _loaded[path]


def build(source: CudaSource, edits: Edits = ()) -> Path:
    """The kernel as a shared library, compiled once for each text."""
    with tempfile.TemporaryDirectory() as folder:
        includes = ["-I", str(HERE / "include"), "-I", str(HERE), "-I", str(OPS)]
        if edits:
            _write_edited(Path(folder), source.file, edits)
            includes = ["-I", folder, *includes]
        entry = Path(folder) / "entry.cpp"
        entry.write_text(
            f'#include "{source.file}"\n#include "machine/entry.hpp"\n'
            f"EMULATED_ENTRY({source.function})\n"
        )
        macros = [f"-D{name}={value}" for name, value in sorted(source.constants.items())]
        objects = [str(_object(name)) for name in MACHINE]
        return _compiled(
            [*includes, *macros, str(entry)], [*objects, "-shared", "-Wl,-Bsymbolic"], edits, ".so"
        )


def _write_edited(folder: Path, file: str, edits: Edits) -> None:
    text = (OPS / file).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        text = text.replace(old, new)
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@cache
def _object(name: str) -> Path:
    return _compiled(["-O2", "-c", str(HERE / "machine" / f"{name}.cpp")], [], (), ".o")


@cache
def _texts(is_kernel: bool) -> bytes:
    """Everything that the machine, or an emulated kernel, may include."""
    files = [*HERE.glob("machine/*.[hc]pp")]
    if is_kernel:
        files += [*HERE.glob("include/**/*.cuh"), *OPS.glob("**/*.cuh")]
    return b"\0".join(str(path.name).encode() + path.read_bytes() for path in sorted(files))


def _compiled(sources: list[str], link: list[str], edits: Edits, suffix: str) -> Path:
    stable = [word for word in sources if word.startswith("-D")]
    stable += [Path(word).name for word in sources if word.endswith(".cpp")]
    entry = next((Path(word).read_text() for word in sources if word.endswith("entry.cpp")), "")
    text = repr((stable, entry, link, edits, FLAGS)).encode() + _texts(suffix == ".so")
    folder = Path(os.environ["TILEWISE_CACHE_DIR"]) / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{hashlib.sha256(text).hexdigest()[:24]}{suffix}"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}{suffix}")
        done = subprocess.run(
            ["g++", *FLAGS, *sources, *link, "-o", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            raise EmulationError(f"g++ cannot compile the kernel:\n{done.stderr[:4000]}")
        made.rename(target)
    return target
