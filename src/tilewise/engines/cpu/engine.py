"""Builds generated C++ kernels and binds them to problems."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter, methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import with_sources
from tilewise.core.problem import Problem
from tilewise.core.tensors import is_torch, view
from tilewise.engines.contract import Build, Engine, Plan, Resources, digest_of
from tilewise.engines.cpu.openmp import Runtime, pytorch_runtime
from tilewise.engines.device import detect
from tilewise.engines.toolchain import (
    Compiled,
    Unit,
    compile_units,
    find_compiler,
    library_of,
    load,
    why_no_compiler,
)
from tilewise.errors import BuildError, ExecutionError, MachineError
from tilewise.forks import make_lock
from tilewise.ops.contract import Op, get_op
from tilewise.settings import settings

HERE = Path(__file__).parent
ISA_FLAGS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mtune=haswell"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
        *("-mtune=icelake-server", "-mprefer-vector-width=512"),
    ),
}
ALIGNMENT = 64


def unit(kernel: Kernel, extra_flags: tuple[str, ...] = ()) -> Unit:
    """The translation unit of a kernel; its traits are checked once more, being its source."""
    kernel.check_choices()
    op = get_op(kernel.op)
    isa: str = kernel.isa  # type: ignore[attr-defined]  # every CPU kernel has one
    return Unit(
        source=_module(kernel.op, "cpu").source(kernel),
        flags=(*ISA_FLAGS[isa], *extra_flags),
        include_dirs=(HERE / "include", op.folder / "include"),
    )


@cache
def _module(op: str, name: str) -> ModuleType:
    return get_op(op).module(name)


class CpuEngine(Engine):
    """Compiles with the system compiler; kernels share one team of threads."""

    name = "cpu"
    kinds = ("cpu",)

    def __init__(self, threads: int | None = None, *, extra_flags: tuple[str, ...] = ()) -> None:
        self.threads = threads or settings().threads
        self.extra_flags = extra_flags
        self._lock = make_lock()
        self._libraries: dict[Kernel, ctypes.CDLL] = {}
        self._team: int | None = None
        self._lend: Any = None
        self.runtime: Runtime | None = None
        """Whose threads run kernels; None where the engine has its own."""

    def why_unavailable(self) -> str | None:
        return why_no_compiler()

    def toolchain(self, op: Op, family: str = "") -> str:
        compiler = find_compiler()
        own = (op.folder / name for name in ("include", "cpu.py", "abi.py"))
        sources = digest_of([*own, HERE / "include", HERE / "team.cpp"])
        return with_sources(compiler.version if compiler else "no compiler", sources)

    def build(
        self,
        kernels: Sequence[Kernel],
        arch: Arch,
        *,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        units = [unit(kernel, self.extra_flags) for kernel in kernels]
        done: list[Build] = []

        def report(index: int, compiled: Compiled) -> Build:
            return Build(
                kernel=kernels[index],
                status="ok" if compiled.library else "compile_error",
                message="" if compiled.library else compiled.log,
                seconds=compiled.seconds,
                was_cached=compiled.was_cached,
                resources=Resources(threads=self.threads),
            )

        def tell(index: int, compiled: Compiled) -> None:
            if on_done is not None:
                on_done(report(index, compiled))

        compiled = compile_units(units, max_workers=max_workers, on_done=tell)
        for index, one in enumerate(compiled):
            build = report(index, one)
            if one.library is not None:
                try:
                    self._load(kernels[index], one.library)
                except MachineError:  # a cache folder mounted noexec, for example
                    raise
                except BuildError as error:
                    build = replace(build, status="compile_error", message=str(error))
            done.append(build)
        return done

    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> CpuPlan:
        isa: str = kernel.isa  # type: ignore[attr-defined]
        if not detect("cpu").has(isa):
            raise ExecutionError(f"{kernel.name} needs {isa}, which this processor does not have")
        library = self._libraries.get(kernel)
        if library is None:
            (build,) = self.build([kernel], arch)
            if build.status != "ok":
                raise BuildError(f"{kernel.name} does not compile", log=build.message)
            library = self._libraries[kernel]
        return CpuPlan(kernel, problem, library, self.team())

    def team(self) -> int:
        """The address of this engine's `tw_team`, started on first use."""
        with self._lock:
            if self._team is None:
                unit = Unit(
                    source=(HERE / "team.cpp").read_text(), include_dirs=(HERE / "include",)
                )
                names = ("tw_team_create", "tw_team_borrow")
                library = library_of(unit, "the team of threads", *names)
                create = library.tw_team_create
                create.argtypes = (ctypes.c_int64, ctypes.c_int32)
                create.restype = ctypes.c_void_p
                library.tw_team_borrow.argtypes = (ctypes.c_void_p,) * 4
                library.tw_team_borrow.restype = None
                self._team = int(create(self.threads, self.runtime is not None))
                self._lend = library.tw_team_borrow
                self._borrow()
            return self._team

    def borrow(self, runtime: Runtime, threads: int) -> None:
        """Runs kernels on another library's threads from now on, `threads` of them."""
        with self._lock:
            self.runtime = runtime
            if self._team is None:
                self.threads = threads
            else:
                self._borrow()

    def share_with_pytorch(self) -> None:
        """Runs kernels on PyTorch's threads, as many as it uses: two teams fight for the cores."""
        import torch

        runtime = pytorch_runtime()
        if runtime is not None:
            self.borrow(runtime, min(settings().threads, torch.get_num_threads()))

    def _borrow(self) -> None:
        of = self.runtime
        if of is not None and self._lend is not None:
            self._lend(self._team, of.parallel, of.max_threads, of.in_parallel)

    def _load(self, kernel: Kernel, path: Path) -> None:
        with self._lock:
            if kernel not in self._libraries:
                library = load(path, "tw_workspace", "tw_run")
                library.tw_workspace.argtypes = library.tw_run.argtypes = (ctypes.c_void_p,)
                library.tw_workspace.restype = ctypes.c_int64
                library.tw_run.restype = ctypes.c_int32
                self._libraries[kernel] = library


class CpuPlan(Plan):
    """A compiled C++ kernel bound to one problem."""

    reads_addresses = True

    def __init__(self, kernel: Kernel, problem: Problem, library: ctypes.CDLL, team: int) -> None:
        self.kernel = kernel
        self.problem = problem
        self._abi = _module(kernel.op, "abi")
        self._run = library.tw_run
        self._team = team
        if problem.bytes >= 2**62:
            raise ExecutionError(f"{problem.op} over {problem.bytes} bytes cannot be addressed")
        sizes = self._abi.sizes(problem)
        sizes.team = team
        needed = int(library.tw_workspace(ctypes.byref(sizes)))
        # Kernels want it aligned; a caller's may have any address.
        self.workspace_bytes = needed + ALIGNMENT - 1 if needed else 0

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        scratch = _workspace(self.workspace_bytes) if workspace is None else workspace
        self.bind(operands, out, scratch)()

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], None]:
        """A call with everything fixed, for timing and for repeating without Python's overhead.

        Without a `workspace` the call keeps one of its own.
        """
        args = self._abi.fill(self.problem, [view(t) for t in operands], view(out))
        scratch = np.empty(self.workspace_bytes, np.uint8) if workspace is None else workspace
        if scratch.nbytes < self.workspace_bytes:
            raise ExecutionError(
                f"the workspace has {scratch.nbytes} bytes; {self.workspace_bytes} are needed"
            )
        args.team = self._team
        args.workspace = _aligned(scratch.ctypes.data)
        run, pointer, name = self._run, ctypes.addressof(args), self.kernel.name
        keep = (args, scratch, operands, out)

        def call(keep: Any = keep) -> None:
            status = run(pointer)
            if status:
                raise ExecutionError(f"{name} reported status {status}")

        return call

    def launcher(self, operands: Sequence[Any], out: Any) -> Callable[..., None]:
        """`launch(out, *operands)` for tensors stored just like these; only addresses are read."""
        address = _address_of_tensor if is_torch(out) else _address_of_array
        numbered = [replace(view(t), address=at) for at, t in enumerate((*operands, out))]
        args = self._abi.fill(self.problem, numbered[:-1], numbered[-1])
        # The three addresses come first; whose each is shows in the numbers given for them.
        pick = itemgetter(*(getattr(args, name) or 0 for name, *_ in args._fields_[:3]))
        rest, team, needed = bytes(args)[_HEAD.size :], self._team, self.workspace_bytes
        run, name = self._run, self.kernel.name

        def launch(out: Any, *tensors: Any) -> None:
            one, two, three = map(address, pick((*tensors, out)))
            if _scratch.size < needed:
                _workspace(needed)
            scratch = _scratch.address if needed else 0
            status = run(_HEAD.pack(one, two, three, scratch, team) + rest)
            if status:
                raise ExecutionError(f"{name} reported status {status}")

        return launch


_address_of_tensor: Callable[[Any], int] = methodcaller("data_ptr")


def _address_of_array(array: Any) -> int:
    at: int = array.ctypes.data
    return at


_HEAD = struct.Struct("5Q")
"""Three tensors, workspace and team: how the arguments of every op begin."""


def _aligned(address: int) -> int:
    return -(-address // ALIGNMENT) * ALIGNMENT


class _Scratch(threading.local):
    """A thread's scratch memory, and where its first aligned byte lies."""

    array: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
    size = 0
    address = 0


_scratch = _Scratch()


def _workspace(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """This thread's scratch memory, grown when needed and reused between calls."""
    if _scratch.size < size:
        try:
            held = np.empty(size, np.uint8)
        except MemoryError:
            raise ExecutionError(
                f"{size} bytes of workspace cannot be allocated; choose a kernel that needs less"
            ) from None
        _scratch.array, _scratch.address = held, _aligned(held.ctypes.data)
        _scratch.size = size
    return _scratch.array
