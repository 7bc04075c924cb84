"""A prepared launch as one function, `start(stream, *values) -> code`.

Compiled where there is a compiler, once for the machine; through ctypes elsewhere. Values are
addresses and, for tensor maps, their bytes; the code is the driver's, 0 for success.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewise.engines.gpu.driver import MAP_BYTES, Driver
from tilewise.engines.toolchain import Unit, library_of
from tilewise.errors import BuildError, ExecutionError

NUMBER, ADDRESS, MAP = range(3)
MOST_PARAMETERS, MOST_MAPS = 256, 16
"""As many as the compiled launcher has room for."""
CLUSTER_DIMENSION, OVERLAPPING = 4, 6
"""Numbers of launch attributes: blocks of a cluster, programmatic stream serialization."""
HERE = Path(__file__).parent
Start = Callable[..., int]
Run = Callable[[int, Any], int]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What a kernel is passed: a number's bits, or one of the call's values."""

    kind: int
    index: int = 0
    number: int = 0
    """The bits, or what is added to an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step whose kernel is loaded; without a function, memory to clear."""

    function: int = 0
    size: int = 0
    """Bytes to clear, from the first parameter on."""
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0
    smem_bytes: int = 0
    overlaps: bool = False
    """Whether it may begin before the kernel before it has ended."""
    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        maps = sum(one.kind == MAP for one in self.parameters)
        if len(self.parameters) > MOST_PARAMETERS or maps > MOST_MAPS:
            raise ExecutionError(
                f"a kernel takes {len(self.parameters)} parameters with {maps} tensor maps; "
                f"{MOST_PARAMETERS} with {MOST_MAPS} are possible"
            )


def make_start(steps: Sequence[Prepared], values: int, driver: Driver, context: int) -> Start:
    """The function that runs these steps; `values` is how many a call gives."""
    library = _launcher()
    if library is None:
        return _plain_start(steps, driver, context)
    starter = library.tw_starter
    starter.restype, starter.argtypes = ctypes.py_object, [ctypes.py_object]
    start: Start = starter(_packed(steps, values, driver, context))
    return start


@cache
def _launcher() -> ctypes.CDLL | None:
    """The compiled launcher, or None where it cannot be had."""
    unit = Unit(source='#include "launcher.hpp"\n', include_dirs=(HERE,))
    try:
        return library_of(unit, "the launcher", "tw_starter", kind=ctypes.PyDLL)
    except BuildError as error:  # no compiler, or a folder that may not hold programs, say
        why = (error.log or str(error)).splitlines()[0]
        log.warning("launches go through ctypes, which is slower: %s", why)
        return None


@cache
def _functions(driver: Driver) -> Any:
    """The driver's functions as the launcher reads them; kept for good."""
    return (ctypes.c_uint64 * 5)(driver.is_cuda, *driver.addresses())


def _packed(steps: Sequence[Prepared], values: int, driver: Driver, context: int) -> bytes:
    """The plan as `launcher.hpp` lays it out."""
    where = ctypes.addressof(_functions(driver))
    parts = [struct.pack("<4Q", where, context, values, len(steps))]
    for step in steps:
        shape = (*step.grid, *step.cluster, step.threads, step.smem_bytes, step.overlaps, 0)
        parts.append(struct.pack("<2Q10I", step.function, step.size, *shape))
        parts.append(struct.pack("<Q", len(step.parameters)))
        for one in step.parameters:
            parts.append(struct.pack("<2IQ", one.kind, one.index, one.number))
    return b"".join(parts)


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("cluster", ctypes.c_uint32 * 3),
        ("rest", ctypes.c_uint8 * 52),
    )


class _Configuration(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


def _plain_start(steps: Sequence[Prepared], driver: Driver, context: int) -> Start:
    runs = [_cleared(s, driver) if not s.function else _launched(s, driver) for s in steps]

    def start(stream: int, *values: Any) -> int:
        code = _enter(driver, context)
        for run in runs:
            code = code or run(stream, values)
        return code

    return start


def _enter(driver: Driver, context: int) -> int:
    """A thread that has not used the GPU yet has no context of NVIDIA's."""
    if not driver.is_cuda:
        return 0
    current = ctypes.c_void_p()
    failed = driver.library.cuCtxGetCurrent(ctypes.byref(current))
    if failed or current.value:
        return int(failed)
    return int(driver.library.cuCtxSetCurrent(ctypes.c_void_p(context)))


def _cleared(step: Prepared, driver: Driver) -> Run:
    (target,), size = step.parameters, ctypes.c_size_t(step.size)

    def run(stream: int, values: Sequence[Any]) -> int:
        at = ctypes.c_void_p(values[target.index] + target.number)
        return int(driver.clear(at, 0, size, ctypes.c_void_p(stream)))

    return run


def _launched(step: Prepared, driver: Driver) -> Run:
    """Numbers are laid out once, and live as long as the launch that has their addresses; what a
    call gives gets memory of its own each time.
    """
    numbers = [ctypes.c_uint64(one.number) for one in step.parameters]
    table = ctypes.c_void_p * max(1, len(numbers))
    usual = table(*map(ctypes.addressof, numbers))
    given = [(at, one) for at, one in enumerate(step.parameters) if one.kind != NUMBER]
    launch = _cuda_launch(step, driver) if driver.is_cuda else _hip_launch(step, driver)

    def run(stream: int, values: Sequence[Any], keep: Any = numbers) -> int:
        held = [_held(one, values) for _, one in given]
        pointers = table.from_buffer_copy(usual)
        for (at, _), one in zip(given, held, strict=True):
            pointers[at] = ctypes.addressof(one)
        return launch(stream, pointers)

    return run


def _held(one: Parameter, values: Sequence[Any]) -> Any:
    if one.kind == MAP:
        return ctypes.create_string_buffer(values[one.index], MAP_BYTES)
    return ctypes.c_uint64(values[one.index] + one.number)


def _hip_launch(step: Prepared, driver: Driver) -> Run:
    function, shape = ctypes.c_void_p(step.function), (*step.grid, step.threads, 1, 1)

    def launch(stream: int, pointers: Any) -> int:
        where = ctypes.c_void_p(stream)
        return int(driver.launch(function, *shape, step.smem_bytes, where, pointers, None))

    return launch


def _cuda_launch(step: Prepared, driver: Driver) -> Run:
    function = ctypes.c_void_p(step.function)
    wanted = []
    if step.cluster != (1, 1, 1):
        wanted.append(_Attribute(id=CLUSTER_DIMENSION, cluster=step.cluster))
    if step.overlaps:
        wanted.append(_Attribute(id=OVERLAPPING, cluster=(1, 0, 0)))
    attributes = (_Attribute * len(wanted))(*wanted)
    usual = _Configuration(
        grid=step.grid,
        block=(step.threads, 1, 1),
        smem_bytes=step.smem_bytes,
        attributes=ctypes.cast(attributes, ctypes.POINTER(_Attribute)) if wanted else None,
        count=len(wanted),
    )

    def launch(stream: int, pointers: Any, keep: Any = attributes) -> int:
        made = _Configuration.from_buffer_copy(usual)
        made.stream = stream
        return int(driver.launch(ctypes.byref(made), function, pointers, None))

    return launch
