"""A launch bound to loaded kernels: all but addresses and the stream is fixed beforehand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tilewise.core.arch import Arch
from tilewise.engines.gpu.build import compile_or_raise, source_key
from tilewise.engines.gpu.driver import CudaDriver, Driver, driver_for
from tilewise.engines.gpu.layout import Passed, laid_out
from tilewise.engines.gpu.maps import TensorMaps
from tilewise.engines.gpu.objects import Box, over_limit
from tilewise.engines.gpu.starting import ADDRESS, MAP, NUMBER, Parameter, Prepared, make_start
from tilewise.engines.gpu.workspaces import WORKSPACES, given_workspace
from tilewise.errors import ExecutionError
from tilewise.ops.launch import (
    Launch,
    Pointer,
    Scratch,
    Step,
    TensorMap,
    Zero,
)

FORMS = {"i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "f32": "<f", "fp32": "<f"}
"""How numbers of a signature lie in memory."""


class BoundLaunch:
    """The kernels of a launch on the current device, with the arguments of one problem.

    A call's addresses come in the order (result, operands, what the epilogue reads); `order` gives
    the number that the launch knows each by.
    """

    def __init__(self, launch: Launch, arch: Arch, name: str, order: Sequence[int]) -> None:
        import torch

        self._device: int = torch.cuda.current_device()
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._name = name
        self._driver = driver_for(arch.vendor)
        self._launch = launch
        self._places = {tensor: at for at, tensor in enumerate(order)}
        self._maps: list[tuple[int, TensorMaps]] = []
        self._workspace = (launch.zeroed_bytes, launch.workspace_bytes - launch.zeroed_bytes)
        self.needs_scratch = launch.workspace_bytes > 0
        steps = [self._prepare(step, arch) for step in launch.steps]
        values = len(order) + 2 * self.needs_scratch + len(self._maps)
        context = self._driver.context(self._device)
        self._start = make_start(steps, values, self._driver, context)

    def _prepare(self, step: Step | Zero, arch: Arch) -> Prepared:
        if isinstance(step, Zero):
            return Prepared(size=step.size, parameters=(self._address(step.target),))
        loaded = load(step, arch, self._name, self._device)
        return Prepared(
            function=loaded.function,
            grid=step.grid,
            cluster=step.cluster,
            overlaps=step.overlaps,
            threads=loaded.made.resources.threads,
            smem_bytes=loaded.made.dynamic_smem_bytes,
            parameters=tuple(map(self._parameter, laid_out(step, loaded.made, self._name))),
        )

    def _parameter(self, passed: Passed) -> Parameter:
        if isinstance(passed.value, TensorMap):
            return self._mapped(passed.value, passed.box)
        if isinstance(passed.value, Pointer | Scratch):
            return self._address(passed.value)
        packed = struct.pack(FORMS[passed.kind], passed.value)
        return Parameter(kind=NUMBER, number=int.from_bytes(packed, "little"))

    def _address(self, argument: Pointer | Scratch) -> Parameter:
        tensors, zeroed = len(self._places), self._launch.zeroed_bytes
        if isinstance(argument, Pointer):
            return Parameter(kind=ADDRESS, index=self._places[argument.tensor])
        # The head that must be zero and the rest come from two pieces of memory.
        if argument.offset < zeroed:
            return Parameter(kind=ADDRESS, index=tensors, number=argument.offset)
        return Parameter(kind=ADDRESS, index=tensors + 1, number=argument.offset - zeroed)

    def _mapped(self, wanted: TensorMap, box: Box | None) -> Parameter:
        assert isinstance(self._driver, CudaDriver)
        self._maps.append((self._places[wanted.tensor], TensorMaps(wanted, self._driver, box)))
        before = len(self._places) + 2 * self.needs_scratch
        return Parameter(kind=MAP, index=before + len(self._maps) - 1)

    def start(self, addresses: Sequence[int], workspace: Any = None) -> None:
        """Launches on the current stream of the kernels' device."""
        device = self._device
        if self._current_device() != device:
            import torch

            with torch.cuda.device(device):
                return self.start(addresses, workspace)
        stream = self._current_stream(device)
        values: list[Any] = [*addresses]
        if self.needs_scratch:
            if workspace is None:
                values += WORKSPACES.addresses(device, stream, *self._workspace)
            else:
                values += given_workspace(workspace, *self._workspace)
        for at, maps in self._maps:
            values.append(maps[addresses[at]])
        code = self._start(stream, *values)
        if code:
            self._fail(code)
        return None

    def launcher(self) -> Callable[..., None]:
        """`launch(out, *operands)` on tensors; all that `start` looks up is at hand."""
        start, device, maps, fail = self._start, self._device, self._maps, self._fail
        current_device, current_stream = self._current_device, self._current_stream
        if self.needs_scratch:
            return lambda *tensors: self.start([tensor.data_ptr() for tensor in tensors])

        def launch(*tensors: Any) -> None:
            if current_device() != device:
                return self.start([tensor.data_ptr() for tensor in tensors])
            values = [tensor.data_ptr() for tensor in tensors]
            for at, made in maps:
                values.append(made[values[at]])
            code = start(current_stream(device), *values)
            if code:
                fail(code)
            return None

        return launch

    def fixed(self, addresses: Sequence[int]) -> Callable[[], None]:
        """A launch with all addresses fixed, for kernels without scratch memory."""
        start, device, fail = self._start, self._device, self._fail
        current_stream = self._current_stream
        values = (*addresses, *(maps[addresses[at]] for at, maps in self._maps))

        def call() -> None:
            code = start(current_stream(device), *values)
            if code:
                fail(code)

        return call

    def _fail(self, code: int) -> None:
        raise ExecutionError(f"{self._name} cannot be launched: {self._driver.why(code)}")


class Loaded:
    """A compiled kernel on a device."""

    def __init__(self, step: Step, arch: Arch, name: str, device: int, driver: Driver) -> None:
        self.made = compile_or_raise(step, live_target(arch), name)
        broken = over_limit(self.made.resources, arch)
        if broken:
            raise ExecutionError(f"{name} is over a limit: {broken}")
        asked = self.made.dynamic_smem_bytes, prod(step.cluster)
        driver.enter(device)
        try:
            self.function = driver.load(self.made.image, self.made.function, *asked)
        except ExecutionError as error:
            raise ExecutionError(f"{name} cannot be loaded: {error}") from error


def live_target(arch: Arch) -> str:
    """What to compile for on the current device, where `arch` may be the file nearest to it.

    Objects run on their own generation only: a GPU of 12.0 takes kernels that are legal on sm_80,
    but compiled for itself.
    """
    import torch

    if arch.vendor != "nvidia":
        return arch.name
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


_LOADED: dict[Any, Loaded] = {}


def load(step: Step, arch: Arch, name: str, device: int) -> Loaded:
    """The kernel of a step, compiled and loaded on a device; problems of one kind share it."""
    key = (arch.name, device, step.threads, step.smem_bytes, step.cluster, source_key(step.source))
    if key not in _LOADED:
        _LOADED[key] = Loaded(step, arch, name, device, driver_for(arch.vendor))
    return _LOADED[key]
