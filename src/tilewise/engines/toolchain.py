"""C++ source to shared library: parallel, cached by content, safe with many processes at once.

What goes wrong is either a fact about the source or a fault of the machine. Before a source is
blamed, one that is known to be good is compiled and loaded in the same way: where that fails too,
it is the machine, which is asked once in a process and then remembered.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import NoReturn

from tilewise.core.faults import ATTEMPTS, fault_in, first_line, signal_name
from tilewise.core.identity import digest
from tilewise.core.plain_files import open_plain, path_of, read_plain
from tilewise.core.strict_json import loads
from tilewise.engines.gpu.elf import read_elf
from tilewise.engines.includes import headers_of, include_names
from tilewise.errors import BuildError, MachineError
from tilewise.forks import make_lock
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
    """The compiler to use, or None where there is none that answers."""
    wanted = settings().compiler
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            shown = subprocess.run(
                [path, "--version"], capture_output=True, text=True, errors="replace", timeout=30
            )
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
def _headers_digest(names: tuple[str, ...], folders: tuple[Path, ...]) -> str:
    """Identity of all that sources see which include these names."""
    text = "".join(f'#include "{name}"\n' for name in names)
    return digest({"headers": headers_of(text, None, folders)})


def unit_key(unit: Unit, compiler: Compiler) -> str:
    """Identity of the library a unit compiles to, wherever the package is installed."""
    return digest(
        {
            "source": unit.source,
            "headers": _headers_digest(tuple(include_names(unit.source)), unit.include_dirs),
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
        raise MachineError(
            f"the cache folder {path} cannot be used ({error.strerror}); "
            "set TILEWISE_CACHE_DIR to a writable folder"
        ) from None
    if status.st_uid != os.getuid():
        raise MachineError(
            f"the cache folder {path} belongs to another user; set TILEWISE_CACHE_DIR to your own"
        )
    if status.st_mode & 0o022:
        raise MachineError(
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
    A fault of the machine ends it with a MachineError.
    """
    compiler = find_compiler()
    if compiler is None:
        raise MachineError(str(why_no_compiler()))
    folder = cache_folder()

    def one(index: int) -> Compiled:
        done = _compile(units[index], compiler, folder)
        if on_done is not None:
            on_done(index, done)
        return done

    workers = max_workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(workers, len(units) or 1))) as crew:
        return list(crew.map(one, range(len(units))))


def library_of(
    unit: Unit, what: str, *symbols: str, kind: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL:
    """A unit's library with these functions; a BuildError says that `what` cannot be had."""
    (made,) = compile_units([unit])
    if made.library is None:
        raise BuildError(f"{what} does not compile", log=made.log)
    return load(made.library, *symbols, kind=kind)


def cache_folder() -> Path:
    """Where libraries are kept."""
    return private_folder(private_folder(settings().cache_dir) / "cpu")


def load(library: Path, *symbols: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """A library of the cache with these functions; the machine's fault where none can be had."""
    compiler, folder = find_compiler(), library.parent.parent
    try:
        loaded = _loaded(library, kind)
        for symbol in symbols:
            getattr(loaded, symbol)
        return loaded
    except (OSError, AttributeError) as error:
        if isinstance(error, AttributeError):  # not what the source says: to be compiled again
            shutil.rmtree(library.parent, ignore_errors=True)
        if compiler is not None:
            _blame(compiler, folder, f"{error}")
        raise BuildError(f"the library cannot be loaded: {error}") from None


def _loaded(library: Path, kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    """The library, opened once: the bytes that are loaded are those that were hashed."""
    descriptor = open_plain(library, is_private=True)
    with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor, not a path
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != _seal(library.parent).get("sha256"):
            raise OSError(f"{library} is not what was compiled; remove it")
        return kind(path_of(descriptor) or str(library))


def _seal(target: Path) -> dict[str, str]:
    """What an entry of the cache says of itself; nothing where it cannot be read."""
    try:
        seal = loads(read_plain(target / "key.json", most=4096, is_private=True))
    except (OSError, ValueError):
        return {}
    return seal if isinstance(seal, dict) else {}


def _compile(unit: Unit, compiler: Compiler, folder: Path) -> Compiled:
    key = unit_key(unit, compiler)
    target = folder / key
    library = _trusted(target, key)
    if library is not None:
        return Compiled(library=library, was_cached=True)
    known = _faults.get((compiler.path, folder))
    if known is not None:
        raise MachineError(known)
    try:
        made = _make(unit, compiler, folder, key)
    except OSError as error:  # a full disk, a cache folder that vanished
        _remember(compiler, folder, f"{folder}: {error.strerror or error}")
    if made.library is None:
        _blame(compiler, folder, made.log)
    return made


def _make(unit: Unit, compiler: Compiler, folder: Path, key: str) -> Compiled:
    """The library in its place in the cache, or the compiler's complaint."""
    started = time.perf_counter()
    target = folder / key
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir(mode=0o700)
        log, is_made = _run_compiler(unit, compiler, made)
        seconds = time.perf_counter() - started
        if not is_made:
            return Compiled(library=None, log=log, seconds=seconds)
        seal = hashlib.sha256((made / "kernel.so").read_bytes()).hexdigest()
        (made / "key.json").write_text(json.dumps({"key": key, "sha256": seal}))
        for file in made.iterdir():
            file.chmod(0o600)  # whatever the umask
        _publish(made, target, key)
    library = _trusted(target, key)
    if library is None:
        return Compiled(library=None, log=f"{target} was damaged while it was written")
    return Compiled(library=library, log=log, seconds=seconds)


def _run_compiler(unit: Unit, compiler: Compiler, made: Path) -> tuple[str, bool]:
    """What the compiler printed, and whether it left a library in the folder `made`.

    A compiler that was killed is started again, as workers are.
    """
    source, library = made / "kernel.cpp", made / "kernel.so"
    source.write_text(unit.source)
    includes = [f"-I{path}" for path in unit.include_dirs]
    command = [compiler.path, *BASE_FLAGS, *unit.flags, *includes, str(source)]
    log = ""
    for _ in range(ATTEMPTS):
        try:
            ran = subprocess.run(
                [*command, "-o", str(library)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_TIMEOUT_S,
                env={**os.environ, "LC_ALL": "C"},  # faults are known by their English names
            )
        except subprocess.TimeoutExpired:
            return f"no result after {COMPILE_TIMEOUT_S} s", False
        log = ran.stderr
        if ran.returncode < 0:
            log += f"\nthe compiler was killed by {signal_name(-ran.returncode)}"
        elif "signal terminated program" not in log:
            break
    if ran.returncode:
        return log or f"the compiler ended with status {ran.returncode}", False
    if not library.exists():
        return f"{compiler.path} wrote no library", False
    try:
        read_elf(library.read_bytes())  # one that is cut off would crash the process
    except BuildError as error:
        return f"{compiler.path} wrote a library that is {error}", False
    return log, True


_faults: dict[tuple[str, Path], str] = {}
"""What keeps this process from compiling, by compiler and folder."""
_asking = make_lock()
CANARY = Unit(
    source='extern "C" __attribute__((visibility("default"))) int tw_canary() { return 42; }\n'
)


def _blame(compiler: Compiler, folder: Path, log: str) -> None:
    """Raises where a failure is the machine's, and returns where it must be the source's."""
    found = fault_in(log)
    with _asking:
        known = _faults.get((compiler.path, folder))
        why = known or (f"{folder}: {found}" if found else why_canary_fails(compiler, folder))
    if why is not None:
        _remember(compiler, folder, why)


def _remember(compiler: Compiler, folder: Path, why: str) -> NoReturn:
    raise MachineError(_faults.setdefault((compiler.path, folder), why))


def why_canary_fails(compiler: Compiler, folder: Path) -> str | None:
    """Why not even the simplest source can be compiled, loaded and run from `folder`, or None."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
            log, is_made = _run_compiler(CANARY, compiler, Path(scratch))
            if not is_made:
                return f"{compiler.path} cannot compile: {first_line([log])}"
            answer = ctypes.CDLL(str(Path(scratch) / "kernel.so")).tw_canary()
    except OSError as error:
        return f"{folder} cannot hold what is compiled: {error}"
    return None if answer == 42 else f"{compiler.path} compiles to code that computes {answer}"


def why_no_build() -> str | None:
    """Why nothing can be compiled, loaded and run here, found by trying; or None."""
    compiler = find_compiler()
    if compiler is None:
        return why_no_compiler()
    try:
        return why_canary_fails(compiler, cache_folder())
    except MachineError as error:
        return str(error)


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
        body = read_plain(library, is_private=True)
    except OSError:
        return None
    whole = _seal(target) == {"key": key, "sha256": hashlib.sha256(body).hexdigest()}
    return library if whole else None
