"""Starts compiled GPU kernels: all but addresses and the stream is fixed beforehand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from tilewise.core.arch import Arch
from tilewise.engines.gpu.objects import over_limit
from tilewise.engines.triton_build import (
    compile_or_raise,
    resources_of,
    source_key,
    target_of,
)
from tilewise.errors import ExecutionError, TensorError
from tilewise.ops.launch import Descriptor, Launch, Pointer, Scratch, Source

MAX_REMEMBERED_DESCRIPTORS = 1024
STREAM = 3
"""Where a launcher takes the stream, after the three sizes of the grid."""
NO_WORKSPACE = (0, 0, 0, 0)
"""Address and room of the zeroed head, then of the rest."""


class BoundKernel:
    """A loaded kernel with the arguments of one problem; addresses are filled in per call."""

    def __init__(self, launch: Launch, arch: Arch, name: str, epilogue: Any = None) -> None:
        import torch

        self._device = torch.cuda.current_device()
        loaded = load(launch.source, arch, name)
        self._loaded = loaded  # keeps the module loaded
        self._start = loaded.start
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._workspace = (launch.zeroed_bytes, launch.workspace_bytes - launch.zeroed_bytes)
        self.needs_scratch = launch.workspace_bytes > 0
        # The order of a call's addresses: A, B, C, then what the epilogue reads.
        positions = {0: 0, 1: 1, 2: 2}
        for at, tensor in enumerate(getattr(epilogue, "tensors", ())):
            positions[tensor] = 3 + at
        self._template: list[Any] = [*launch.grid, 1, None, loaded.function, *loaded.fixed]
        self._pointers: list[tuple[int, int]] = []
        self._zeroed: list[tuple[int, int]] = []
        self._sums: list[tuple[int, int]] = []
        self._descriptors: list[tuple[int, int, Descriptors]] = []
        boxes = iter(loaded.boxes)
        for argument in launch.arguments:
            at = len(self._template)
            if isinstance(argument, Pointer):
                self._pointers.append((at, positions[argument.tensor]))
                self._template.append(0)
            elif isinstance(argument, Scratch):
                # The head that must be zero and the rest come from two pieces of memory.
                if argument.offset < launch.zeroed_bytes:
                    self._zeroed.append((at, argument.offset))
                else:
                    self._sums.append((at, argument.offset - launch.zeroed_bytes))
                self._template.append(0)
            elif isinstance(argument, Descriptor):
                made = Descriptors(argument, next(boxes))
                self._descriptors.append((at, positions[argument.tensor], made))
                self._template += [None, *argument.shape, *argument.strides]
            else:
                self._template.append(argument)

    def start(self, addresses: Sequence[int], workspace: Any = None) -> None:
        """Launches on the current stream of the kernel's device."""
        device = self._device
        if self._current_device() != device:
            import torch

            with torch.cuda.device(device):
                return self.start(addresses, workspace)
        values = self._template.copy()
        stream = values[STREAM] = self._current_stream(device)
        for at, tensor in self._pointers:
            values[at] = addresses[tensor]
        for at, tensor, descriptors in self._descriptors:
            values[at] = descriptors[addresses[tensor]]
        if self.needs_scratch:
            if workspace is None:
                zeroed, sums = WORKSPACES.addresses(device, stream, *self._workspace)
            else:
                zeroed, sums = _given(workspace, *self._workspace)
            for at, offset in self._zeroed:
                values[at] = zeroed + offset
            for at, offset in self._sums:
                values[at] = sums + offset
        self._start(*values)
        return None

    def launcher(self) -> Callable[..., None]:
        """`launch(out, a, b, *vectors)` on tensors; all that `start` looks up is at hand."""
        start, device, template = self._start, self._device, self._template
        current_device, current_stream = self._current_device, self._current_stream
        pointers, descriptors = self._pointers, self._descriptors
        needs_scratch = self.needs_scratch

        def launch(out: Any, a: Any, b: Any, *vectors: Any) -> None:
            addresses = (a.data_ptr(), b.data_ptr(), out.data_ptr())
            if vectors:
                addresses += tuple([vector.data_ptr() for vector in vectors])
            if needs_scratch or current_device() != device:
                return self.start(addresses)
            values = template.copy()
            values[STREAM] = current_stream(device)
            for at, tensor in pointers:
                values[at] = addresses[tensor]
            for at, tensor, made in descriptors:
                values[at] = made[addresses[tensor]]
            start(*values)
            return None

        return launch

    def fixed(self, addresses: Sequence[int]) -> Callable[[], None]:
        """A launch with all addresses fixed, for kernels without scratch memory."""
        start, device, current_stream = self._start, self._device, self._current_stream
        values = self._template.copy()
        for at, tensor in self._pointers:
            values[at] = addresses[tensor]
        for at, tensor, descriptors in self._descriptors:
            values[at] = descriptors[addresses[tensor]]

        def call() -> None:
            values[STREAM] = current_stream(device)
            start(*values)

        return call


class Descriptors(dict[int, Any]):
    """TMA descriptors of one tensor's shape, by address; recent ones are kept."""

    def __init__(self, descriptor: Descriptor, box: Any) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
        from triton.runtime import driver

        super().__init__()
        self._fill = driver.active.utils.fill_tma_descriptor
        kind = TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]]
        self._box = (box["swizzle"], box["elem_size"], kind, box["block_size"])
        self._descriptor = descriptor

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_REMEMBERED_DESCRIPTORS:
            self.clear()
        shape, strides = self._descriptor.shape, self._descriptor.strides
        try:
            made = self[address] = self._fill(address, *self._box, shape, strides, 0)
        except RuntimeError as error:
            raise ExecutionError(f"TMA cannot address {shape} by {strides}: {error}") from error
        return made


class Workspaces:
    """Scratch memory, one piece per device and stream: launches on a stream follow each other.

    Kernels find their flags zero and leave them so; partial sums have memory of their own, so
    that no kernel's sums lie where the next one's flags are. Sizes double when they grow, and
    outgrown pieces stay: another thread may be about to launch with them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[Any] = []
        self._kept: dict[tuple[int, int], tuple[int, int, int, int]] = {}

    def addresses(self, device: int, stream: int, zeroed: int, sums: int) -> tuple[int, int]:
        """Where the zeroed head and the rest of a workspace are."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            # The memory belongs to the graph, which clears it on every replay.
            own = torch.empty(zeroed + sums, dtype=torch.uint8, device=f"cuda:{device}")
            own[:zeroed].zero_()
            return int(own.data_ptr()), int(own.data_ptr()) + zeroed
        head, head_room, rest, rest_room = self._kept.get((device, stream), NO_WORKSPACE)
        if head_room >= zeroed and rest_room >= sums:
            return head, rest
        return self._grow(device, stream, zeroed, sums)

    def _grow(self, device: int, stream: int, zeroed: int, sums: int) -> tuple[int, int]:
        import torch

        with self._lock:
            head, head_room, rest, rest_room = self._kept.get((device, stream), NO_WORKSPACE)
            if head_room < zeroed:
                head, head_room = self._piece(torch.zeros, zeroed, device)
            if rest_room < sums:
                rest, rest_room = self._piece(torch.empty, sums, device)
            self._kept[device, stream] = (head, head_room, rest, rest_room)
            return head, rest

    def _piece(self, make: Callable[..., Any], size: int, device: int) -> tuple[int, int]:
        import torch

        room = 1 << (size - 1).bit_length()
        self._pieces.append(make(room, dtype=torch.uint8, device=f"cuda:{device}"))
        return int(self._pieces[-1].data_ptr()), room


WORKSPACES = Workspaces()


def _given(workspace: Any, zeroed: int, sums: int) -> tuple[int, int]:
    """A caller's workspace, checked and cleared."""
    import torch

    if workspace.numel() * workspace.element_size() < zeroed + sums:
        raise TensorError(f"the workspace is under {zeroed + sums} bytes")
    head = workspace.view(torch.uint8).flatten()[:zeroed]
    head.zero_()
    return int(workspace.data_ptr()), int(workspace.data_ptr()) + zeroed


class Loaded:
    """A compiled kernel on the device, with a launcher that takes only what the kernel reads."""

    def __init__(self, source: Source, arch: Arch, name: str) -> None:
        compiled = compile_or_raise(source, arch, name, live_target(arch))
        broken = over_limit(resources_of(compiled, arch), arch)
        if broken:
            raise ExecutionError(f"{name} is over a limit: {broken}")
        _load(compiled, name)
        self.compiled = compiled
        self.function = compiled.function
        self.fixed: tuple[Any, ...] = (compiled.packed_metadata, None, None, None)
        """What every launch passes between the function and the kernel's own arguments."""
        self.boxes = getattr(compiled.metadata, "tensordesc_meta", None) or []
        self.start = self._launcher(source, arch)

    def _launcher(self, source: Source, arch: Arch) -> Callable[..., None]:
        """Descriptors are passed ready-made, which Triton's own launcher would encode each time."""
        from triton.runtime import driver

        flat: dict[int, str] = {}
        for kind in source.signature.values():
            if kind.startswith("tensordesc"):
                rank = kind.split("[")[1].split("]")[0].count(",") + 1
                kinds = ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
            else:
                kinds = [kind]
            for one in kinds:
                flat[len(flat)] = one
        metadata = SimpleNamespace(**self.compiled.metadata._asdict() | {"tensordesc_meta": None})
        plain = SimpleNamespace(signature=flat, constants={})
        launch: Callable[..., None] = driver.active.launcher_cls(plain, metadata).launch
        # Neither cooperative nor dependent launch, and no scratch of Triton's own.
        if arch.vendor == "nvidia":
            self.fixed = (False, False, None, None, *self.fixed)
            return launch
        self.fixed = (None, *self.fixed)
        return partial(launch, False)  # HIP asks for cooperation first, and knows one scratch


def live_target(arch: Arch) -> Any:
    """What to compile for on the current device, where `arch` may be the file nearest to it.

    Objects run on their own generation only: a GPU of 12.0 takes kernels that are legal on sm_80,
    but compiled for itself.
    """
    import torch
    from triton.backends.compiler import GPUTarget

    if arch.vendor != "nvidia":
        return target_of(arch)
    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", 10 * major + minor, arch.warp_size)


def _load(compiled: Any, name: str) -> None:
    """Puts a compiled kernel on the current device; the driver's refusal as an ExecutionError."""
    from triton.runtime.errors import TritonError

    try:
        compiled._init_handles()
    except (RuntimeError, TritonError) as error:
        raise ExecutionError(f"{name} cannot be loaded: {error}") from error


_LOADED: dict[Any, Loaded] = {}


def load(source: Source, arch: Arch, name: str) -> Loaded:
    """The source compiled and loaded on the current device; problems of one kind share it."""
    import torch

    key = (arch.name, torch.cuda.current_device(), source_key(source))
    if key not in _LOADED:
        _LOADED[key] = Loaded(source, arch, name)
    return _LOADED[key]
