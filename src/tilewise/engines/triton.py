"""Runs Triton and Gluon kernels: compiled once, launched with little Python in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.engines.contract import Build, Engine, Plan
from tilewise.engines.triton_build import (
    build_all,
    compile_ahead,
    compile_or_raise,
    launch_module,
    over_limit,
    resources_of,
    source_key,
)
from tilewise.errors import ExecutionError, TensorError
from tilewise.ops.launch import Descriptor, Launch, Pointer, Scratch, Source

MAX_REMEMBERED_DESCRIPTORS = 256


class TritonEngine(Engine):
    """Builds anywhere, for any GPU; plans where there is one."""

    name = "triton"

    def why_unavailable(self) -> str | None:
        for package in ("torch", "triton"):
            if find_spec(package) is None:
                return f"{package} is not installed"
        import torch

        return None if torch.cuda.is_available() else "there is no GPU here"

    def why_no_build(self) -> str | None:
        return None if find_spec("triton") else "triton is not installed"

    def build(
        self,
        kernels: Sequence[Kernel],
        arch: Arch,
        *,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        return build_all(kernels, arch, max_workers, on_done)

    def compile_ahead(
        self,
        pairs: Iterable[tuple[Kernel, Problem]],
        arch: Arch,
        *,
        max_workers: int | None = None,
    ) -> list[str]:
        """Compiles what plans for these pairs will need, in parallel; the failures, one a line."""
        sources = [
            launch_module(kernel.op).launch(kernel, problem, arch).source
            for kernel, problem in pairs
        ]
        return compile_ahead(sources, arch, max_workers)

    def plan(
        self, kernel: Kernel, problem: Problem, arch: Arch, *, epilogue: Any = None
    ) -> TritonPlan:
        """The kernel bound to a problem; `epilogue` is the op's own, where it has one."""
        reason = self.why_unavailable()
        if reason:
            raise ExecutionError(f"{kernel.name} cannot run: {reason}")
        return TritonPlan(kernel, problem, arch, epilogue)


class TritonPlan(Plan):
    """A kernel bound to a problem; strides are looked at on every call, and remembered."""

    def __init__(self, kernel: Kernel, problem: Problem, arch: Arch, epilogue: Any = None) -> None:
        self.kernel = kernel
        self.problem = problem
        self._arch = arch
        self._epilogue = epilogue
        self._module = launch_module(kernel.op)
        usual = self._module.launch(kernel, problem, arch, epilogue=epilogue)
        self.workspace_bytes = usual.workspace_bytes
        self._calls: dict[Any, BoundKernel] = {}
        self._workspaces: dict[int, Any] = {}

    def prepare(self, operands: Sequence[Any], out: Any) -> None:
        _, key = self._look_at(operands, out)
        if key not in self._calls:
            self._bind(key)

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        addresses, key = self._look_at(operands, out)
        call = self._calls.get(key)
        if call is None:
            call = self._bind(key)
        stream = current_stream(out.get_device())
        scratch = 0
        if call.needs_scratch:
            scratch = self._scratch(call.launch, stream, workspace, out.device)
        call.start(stream, call.arguments(addresses, scratch))

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        """A launch with everything fixed, on the stream that is current at each call."""
        self.prepare(operands, out)
        addresses, key = self._look_at(operands, out)
        call, device = self._calls[key], out.get_device()
        if call.needs_scratch:
            return lambda: self.execute(operands, out, workspace)
        fixed = call.arguments(addresses, 0)
        return lambda: call.start(current_stream(device), fixed)

    def _look_at(self, operands: Sequence[Any], out: Any) -> tuple[list[int], Any]:
        """Addresses of all tensors, C third, and what a specialisation depends on."""
        a, b = operands[0], operands[1]
        first, second, third = a.data_ptr(), b.data_ptr(), out.data_ptr()
        addresses = [first, second, third]
        if len(operands) > 2:
            addresses += [tensor.data_ptr() for tensor in operands[2:]]
        is_aligned = not (first | second | third) & 15
        return addresses, (a.stride(), b.stride(), out.stride(), is_aligned)

    def _bind(self, key: Any) -> BoundKernel:
        *strides, is_aligned = key
        launch = self._module.launch(
            self.kernel,
            self.problem,
            self._arch,
            strides=self._module.strides_of(self.problem, strides),
            is_aligned=is_aligned,
            epilogue=self._epilogue,
        )
        call = BoundKernel(launch, self._arch, self.kernel.name, self._epilogue)
        self._calls[key] = call
        return call

    def _scratch(self, launch: Launch, stream: int, workspace: Any, device: Any) -> int:
        """The workspace's address; its head is zero and every launch leaves it so.

        One per stream, as launches on different streams may overlap. While a graph is captured
        the workspace belongs to the graph, which then clears it on every replay.
        """
        import torch

        if workspace is not None:
            if workspace.numel() * workspace.element_size() < launch.workspace_bytes:
                raise TensorError(f"the workspace is under {launch.workspace_bytes} bytes")
            head = workspace.view(torch.uint8).flatten()[: launch.zeroed_bytes]
            head.zero_()
            return int(head.data_ptr())
        if torch.cuda.is_current_stream_capturing():
            own = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device=device)
            own[: launch.zeroed_bytes].zero_()
            return int(own.data_ptr())
        kept = self._workspaces.get(stream)
        if kept is None or kept.numel() < launch.workspace_bytes:
            kept = torch.zeros(launch.workspace_bytes, dtype=torch.uint8, device=device)
            self._workspaces[stream] = kept
        return int(kept.data_ptr())


class BoundKernel:
    """A loaded kernel with the arguments of one problem; addresses are filled in per call."""

    def __init__(self, launch: Launch, arch: Arch, name: str, epilogue: Any = None) -> None:
        self.launch = launch
        loaded = load(launch.source, arch, name)
        self.needs_scratch = launch.workspace_bytes > 0
        self._start = loaded.start
        self._function = loaded.function
        self._fixed = loaded.fixed
        self._x, self._y = launch.grid
        positions = {0: 0, 1: 1, 2: 2}
        for at, tensor in enumerate(getattr(epilogue, "tensors", ())):
            positions[tensor] = 3 + at
        self._template: list[Any] = []
        self._pointers: list[tuple[int, int]] = []
        self._scratches: list[tuple[int, int]] = []
        self._descriptors: list[tuple[int, int, Callable[[int], Any]]] = []
        described = iter(loaded.boxes)
        for argument in launch.arguments:
            at = len(self._template)
            if isinstance(argument, Pointer):
                self._pointers.append((at, positions[argument.tensor]))
                self._template.append(0)
            elif isinstance(argument, Scratch):
                self._scratches.append((at, argument.offset))
                self._template.append(0)
            elif isinstance(argument, Descriptor):
                encode = DescriptorMaker(argument, next(described))
                self._descriptors.append((at, positions[argument.tensor], encode))
                self._template += [None, *argument.shape, *argument.strides]
            else:
                self._template.append(argument)

    def arguments(self, addresses: Sequence[int], scratch: int) -> list[Any]:
        """The kernel's arguments for tensors at these addresses."""
        values = self._template.copy()
        for at, tensor in self._pointers:
            values[at] = addresses[tensor]
        for at, offset in self._scratches:
            values[at] = scratch + offset
        for at, tensor, encode in self._descriptors:
            values[at] = encode(addresses[tensor])
        return values

    def start(self, stream: int, arguments: Sequence[Any]) -> None:
        self._start(self._x, self._y, 1, stream, self._function, *self._fixed, *arguments)


class DescriptorMaker:
    """TMA descriptors of one tensor's shape, by address; recent ones are kept."""

    def __init__(self, descriptor: Descriptor, box: Any) -> None:
        self._descriptor = descriptor
        self._box = box
        self._known: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        known = self._known.get(address)
        if known is None:
            if len(self._known) >= MAX_REMEMBERED_DESCRIPTORS:
                self._known.clear()
            known = self._known[address] = self._encode(address)
        return known

    def _encode(self, address: int) -> Any:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
        from triton.runtime import driver

        box = self._box
        return driver.active.utils.fill_tma_descriptor(
            address,
            box["swizzle"],
            box["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]],
            box["block_size"],
            self._descriptor.shape,
            self._descriptor.strides,
            0,
        )


class Loaded:
    """A compiled kernel on the device, with a launcher that takes only what the kernel reads."""

    def __init__(self, source: Source, arch: Arch, name: str) -> None:
        compiled = compile_or_raise(source, arch, name)
        broken = over_limit(resources_of(compiled, arch), arch)
        if broken:
            raise ExecutionError(f"{name} is over a limit: {broken}")
        compiled._init_handles()
        self.compiled = compiled  # keeps the module loaded
        self.function = compiled.function
        self.fixed: tuple[Any, ...] = (compiled.packed_metadata, None, None, None)
        """What every launch passes between the function and the kernel's own arguments."""
        self.boxes = getattr(compiled.metadata, "tensordesc_meta", None) or []
        if arch.vendor == "nvidia":
            self.start = self._nvidia_launcher(source)
        else:
            self.start = self._amd_launcher(source)

    def _nvidia_launcher(self, source: Source) -> Callable[..., None]:
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
        self.fixed = (False, False, None, None, *self.fixed)
        return launch

    def _amd_launcher(self, source: Source) -> Callable[..., None]:
        """Triton's own launcher, which also wants the constants in their places."""
        run = self.compiled.run
        passed = [name in source.signature for name in self.compiled.src.fn.arg_names]

        def start(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            given = iter(rest[len(self.fixed) :])
            full = [next(given) if is_passed else None for is_passed in passed]
            run(x, y, z, stream, function, *self.fixed, *full)

        return start


_LOADED: dict[Any, Loaded] = {}


def load(source: Source, arch: Arch, name: str) -> Loaded:
    """The source compiled and loaded; problems of one kind share it."""
    key = (arch.name, _current_device(), source_key(source))
    if key not in _LOADED:
        _LOADED[key] = Loaded(source, arch, name)
    return _LOADED[key]


def _current_device() -> int:
    import torch

    return torch.cuda.current_device()


@cache
def _raw_stream() -> Callable[[int], int]:
    import torch

    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


def current_stream(device: int) -> int:
    """The handle of the stream that work on the device is queued on."""
    return _raw_stream()(device)
