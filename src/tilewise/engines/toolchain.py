"""C++ source to shared library: parallel, cached by content, safe with many processes at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewise.core.identity import digest
from tilewise.errors import BuildError
from tilewise.settings import settings

COMPILE_TIMEOUT_S = 300
BASE_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast"),
    *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-plt", "-Wall", "-pthread"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One translation unit: its text, flags and the folders its includes come from."""

    source: str
    flags: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of one unit: a library, or the compiler's complaint."""

    library: Path | None
    log: str = ""
    seconds: float = 0.0
    was_cached: bool = False


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler and its version, which is part of every cache key."""

    path: str
    version: str


@cache
def find_compiler() -> Compiler | None:
    """The compiler to use, or None where there is none that runs."""
    wanted = settings().compiler
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if shown.returncode == 0 and shown.stdout.strip():
            return Compiler(path, shown.stdout.strip().splitlines()[0])
    return None


def why_no_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    if find_compiler() is not None:
        return None
    wanted = settings().compiler
    return (
        f"TILEWISE_CXX is {wanted!r}, which does not run"
        if wanted
        else "no C++ compiler on the PATH (looked for g++, clang++, c++); install one"
    )


@cache
def _headers_digest(folder: Path) -> str:
    text = hashlib.sha256()
    for path in sorted(folder.rglob("*.hpp")):
        text.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return text.hexdigest()


def unit_key(unit: Unit, compiler: Compiler) -> str:
    """Identity of the library a unit compiles to, wherever the package is installed."""
    return digest(
        {
            "source": unit.source,
            "headers": [_headers_digest(folder) for folder in unit.include_dirs],
            "flags": [*BASE_FLAGS, *unit.flags],
            "compiler": compiler.version,
        }
    )


def private_folder(path: Path) -> Path:
    """`path`, made if needed (0700), and refused unless only this user can write there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise BuildError(
            f"the cache folder {path} cannot be used ({error.strerror}); "
            "set TILEWISE_CACHE_DIR to a writable folder"
        ) from None
    if status.st_uid != os.getuid():
        raise BuildError(
            f"the cache folder {path} belongs to another user; set TILEWISE_CACHE_DIR to your own"
        )
    if status.st_mode & 0o022:
        raise BuildError(
            f"others may write to the cache folder {path}; run `chmod 700 {path}` or set "
            "TILEWISE_CACHE_DIR to a private folder"
        )
    return path


def compile_units(
    units: Sequence[Unit],
    *,
    max_workers: int | None = None,
    on_done: Callable[[int, Compiled], None] | None = None,
) -> list[Compiled]:
    """Compiles every unit not yet in the cache; results are in the order given.

    Threads wait for compiler processes: nothing is forked from a process that may hold a GPU.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(str(why_no_compiler()))
    folder = private_folder(private_folder(settings().cache_dir) / "cpu")

    def one(index: int) -> Compiled:
        try:
            done = _compile(units[index], compiler, folder)
        except OSError as error:  # a full disk, a cache folder that vanished
            done = Compiled(library=None, log=f"{folder}: {error.strerror or error}")
        if on_done is not None:
            on_done(index, done)
        return done

    workers = max_workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(workers, len(units) or 1))) as pool:
        return list(pool.map(one, range(len(units))))


def _compile(unit: Unit, compiler: Compiler, folder: Path) -> Compiled:
    key = unit_key(unit, compiler)
    target = folder / key
    library = _trusted(target, key)
    if library is not None:
        return Compiled(library=library, was_cached=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir(mode=0o700)
        source = made / "kernel.cpp"
        source.write_text(unit.source)
        includes = [f"-I{path}" for path in unit.include_dirs]
        command = [compiler.path, *BASE_FLAGS, *unit.flags, *includes, str(source)]
        try:
            ran = subprocess.run(
                [*command, "-o", str(made / "kernel.so")],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Compiled(library=None, log=f"no result after {COMPILE_TIMEOUT_S} s")
        seconds = time.perf_counter() - started
        if ran.returncode != 0:
            log = ran.stderr or f"the compiler ended with status {ran.returncode}"
            return Compiled(library=None, log=log, seconds=seconds)
        if not (made / "kernel.so").exists():
            return Compiled(library=None, log=f"{compiler.path} wrote no library", seconds=seconds)
        seal = hashlib.sha256((made / "kernel.so").read_bytes()).hexdigest()
        (made / "key.json").write_text(json.dumps({"key": key, "sha256": seal}))
        _publish(made, target, key)
    library = _trusted(target, key)
    if library is None:
        raise BuildError(f"{target} was damaged while it was written; remove it and build again")
    return Compiled(library=library, log=ran.stderr, seconds=seconds)


def _publish(made: Path, target: Path, key: str) -> None:
    """Renames a finished folder into place; another process may have been first."""
    for _ in range(8):
        try:
            made.rename(target)
            return
        except OSError:
            if _trusted(target, key) is not None:
                return
        broken = target.with_name(f".broken-{os.getpid()}-{time.monotonic_ns()}")
        with contextlib.suppress(OSError):  # somebody else may have moved it just now
            target.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)


def _trusted(target: Path, key: str) -> Path | None:
    """The cached library if the entry is whole and says it is what was asked for."""
    library = target / "kernel.so"
    try:
        seal = json.loads((target / "key.json").read_text())
        body = library.read_bytes()
    except (OSError, ValueError):
        return None
    whole = seal == {"key": key, "sha256": hashlib.sha256(body).hexdigest()}
    return library if whole else None
