"""CUDA C++ to cubin through NVRTC, the compiler that PyTorch brings: no toolkit, no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tilewise.ops
from tilewise.core.identity import digest
from tilewise.core.source import identifier, number
from tilewise.engines.gpu.layout import BYTES
from tilewise.engines.gpu.object_cache import cached
from tilewise.engines.gpu.objects import GpuObject, cubin_object
from tilewise.engines.includes import headers_of
from tilewise.errors import BuildError, ExpressionError
from tilewise.ops.launch import CudaSource

OPS = Path(tilewise.ops.__path__[0])
FLAGS = ("--std=c++17", "--fmad=true")
SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def compile_cuda(source: CudaSource, target: str) -> GpuObject:
    """The source as an object for `target` (such as `sm_90`), from the cache or compiled now."""
    wanted = recipe(source, target)
    return cached(wanted, lambda: _compile(source, tuple(wanted["options"])))


def recipe(source: CudaSource, target: str) -> dict[str, Any]:
    """All that an object is made from: what the cache knows it by."""
    return {
        "language": "cuda",
        "compiler": nvrtc_version(),
        "options": [f"--gpu-architecture={_architecture(target)}", *FLAGS, *_macros(source)],
        "file": source.file,
        "function": source.function,
        "signature": list(source.signature.values()),
        "sources": _digest(source.file),
    }


def _compile(source: CudaSource, options: tuple[str, ...]) -> GpuObject:
    text, headers = sources(source.file)
    cubin, log = _nvrtc().compile(text, source.file, headers, options)
    made = cubin_object(cubin, source.function, log=log)
    expected = tuple(BYTES[kind] for kind in source.signature.values())
    if made.parameters != expected:
        raise BuildError(
            f"{source.function} of {source.file} takes parameters of {made.parameters} bytes; "
            f"its signature {source.signature} says {expected}"
        )
    return made


def _architecture(target: str) -> str:
    """From Hopper on kernels use what is bound to their generation, such as wgmma."""
    return f"{target}a" if int(target.removeprefix("sm_")) >= 90 else target


def _macros(source: CudaSource) -> list[str]:
    try:
        return [f"-D{identifier(name)}={_value(v)}" for name, v in source.constants.items()]
    except ExpressionError as error:
        raise BuildError(f"{source.file}: a macro is no name or number: {error}") from None


def _value(value: int | str) -> str:
    return identifier(value) if isinstance(value, str) else number(int(value))


@cache
def _digest(file: str) -> str:
    """Of everything that `sources` gives."""
    text, headers = sources(file)
    return digest({"text": text, "headers": headers})


@cache
def sources(file: str) -> tuple[str, dict[str, str]]:
    """The text of a file below `ops/`, and every header it includes, by the name it is given.

    The compiler sees these texts and no disk, so what is compiled is what the cache's key says;
    they are read once, so all that a process compiles is of one version.
    """
    try:
        text = (OPS / file).read_text()
    except OSError as error:
        raise BuildError(f"{file} cannot be read: {error.strerror}") from None
    return text, headers_of(text, (OPS / file).parent, (OPS,), all_ours=True)


class Nvrtc:
    """The library's functions, with its failures as BuildErrors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"nvrtc {major.value}.{minor.value}"

    def compile(
        self, text: str, name: str, headers: dict[str, str], options: tuple[str, ...]
    ) -> tuple[bytes, str]:
        """The cubin and what the compiler said besides."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                *(ctypes.byref(program), text.encode(), name.encode(), len(headers)),
                *(_strings(headers.values()), _strings(headers)),
            )
        )
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                what = self._library.nvrtcGetErrorString(failed).decode()
                raise BuildError(f"{name} does not compile ({what})", log=log)
            return self._read(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, code: int) -> None:
        if code:
            raise BuildError(f"NVRTC failed: {self._library.nvrtcGetErrorString(code).decode()}")


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    given = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(given))(*given)


@cache
def _load() -> Nvrtc | str:
    """The library, or why there is none."""
    wheels = find_spec("nvidia")
    folders = [Path(f) for f in (wheels.submodule_search_locations or ())] if wheels else []
    inside = [path for f in folders for path in sorted(f.glob("*/lib/libnvrtc.so.*"), reverse=True)]
    for path in [*inside, *map(Path, SONAMES)]:
        try:
            for builtins in (
                path.parent.glob("libnvrtc-builtins.so.*") if path.is_absolute() else ()
            ):
                # NVRTC opens it by its bare name, which only works where it is loaded already.
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return Nvrtc(ctypes.CDLL(str(path)))
        except OSError:
            continue
    return "NVRTC is not installed; PyTorch for CUDA brings it, as does nvidia-cuda-nvrtc"


def why_no_nvrtc() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None."""
    found = _load()
    return found if isinstance(found, str) else None


def _nvrtc() -> Nvrtc:
    found = _load()
    if isinstance(found, str):
        raise BuildError(found)
    return found


def nvrtc_version() -> str:
    """Such as `nvrtc 13.0`."""
    return _nvrtc().version
