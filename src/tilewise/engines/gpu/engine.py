"""Runs GPU kernels: compiled once, launched with little Python in the way."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import with_sources
from tilewise.core.problem import Problem
from tilewise.engines.contract import Build, Engine, Plan, digest_of, versions
from tilewise.engines.gpu.bound import BoundLaunch, live_target
from tilewise.engines.gpu.build import AnySource, build_all, compile_ahead, launch_module
from tilewise.engines.gpu.nvrtc import OPS, nvrtc_version, sources, why_no_nvrtc
from tilewise.engines.gpu.triton_build import why_no_triton
from tilewise.errors import ExecutionError, TensorError
from tilewise.ops import launch as shared
from tilewise.ops.contract import Op, get_op
from tilewise.ops.launch import Launch


class GpuEngine(Engine):
    """Builds anywhere, for any GPU; plans where there is one."""

    kinds = ("gpu",)
    takes_epilogue = True

    @abstractmethod
    def sources(self, op: Op, family: str) -> list[Path]:
        """Files and folders that the op's kernels, or those of a family, are made of."""

    def toolchain(self, op: Op, family: str = "") -> str:
        parts = [*self.sources(op, family), *_launches(op, self._module(op, family))]
        lender = op.lenders.get(family)
        sources = digest_of([*parts, *(self.lent(lender) if lender else ())])
        return with_sources(self.compiler(), sources)

    def lent(self, folder: Path) -> list[Path]:
        """What the kernels of another op's folder are made of, where an op launches them, too."""
        return []

    def families(self, op: Op) -> tuple[str, ...]:
        """Those that the op's launch module has modules of their own for."""
        if not (op.folder / "launch.py").is_file():
            return ()
        modules = getattr(op.module("launch"), "MODULES", {})
        return tuple(family for engine, family in modules if engine == self.name)

    def _module(self, op: Op, family: str) -> str:
        found: str = op.module("launch").MODULES[self.name, family] if family else ""
        return found

    @abstractmethod
    def compiler(self) -> str:
        """What compiles, with versions."""

    def why_unavailable(self) -> str | None:
        if find_spec("torch") is None:
            return "torch is not installed"
        import torch

        return self.why_no_build() if torch.cuda.is_available() else "there is no GPU here"

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
            source
            for kernel, problem in pairs
            for source in launch_module(kernel.op).launch(kernel, problem, arch).sources
        ]
        target = live_target(arch) if self.why_unavailable() is None else arch.name
        return compile_ahead(sources, target, max_workers)

    def fuses(self, kernel: Kernel, problem: Problem, epilogue: Any) -> bool:
        why = getattr(launch_module(kernel.op), "why_unfused", None)
        return why is None or why(kernel, problem, epilogue) is None

    def plan(
        self, kernel: Kernel, problem: Problem, arch: Arch, *, epilogue: Any = None
    ) -> GpuPlan:
        """The kernel bound to a problem; `epilogue` is the op's own, where it has one."""
        reason = self.why_unavailable()
        if reason:
            raise ExecutionError(f"{kernel.name} cannot run: {reason}")
        if epilogue is not None and not self.fuses(kernel, problem, epilogue):
            epilogue = None  # the plan says so, and the caller does it after
        return GpuPlan(kernel, problem, arch, epilogue)


class TritonEngine(GpuEngine):
    """Kernels in Triton and Gluon."""

    name = "triton"

    def compiler(self) -> str:
        return versions("triton", "torch")

    def sources(self, op: Op, family: str) -> list[Path]:
        return [*_written(op.folder), *_SHARED.glob("*_pieces.py"), _SHARED / "gluon_names.py"]

    def lent(self, folder: Path) -> list[Path]:
        deciding = [path for name in _DECIDING for path in folder.glob(name)]
        return [*_written(folder), *deciding]

    def why_no_build(self) -> str | None:
        return why_no_triton()


class CudaEngine(GpuEngine):
    """Kernels in CUDA C++."""

    name = "cuda"

    def compiler(self) -> str:
        own = "" if why_no_nvrtc() else nvrtc_version()  # whichever wheel or toolkit it came with
        return ", ".join(filter(None, (own, versions("torch"))))

    def sources(self, op: Op, family: str) -> list[Path]:
        """A family's files, and every header that they include."""
        if not family:
            return [op.folder / "cuda", _SHARED / "cuda"]
        files = op.module("launch").cuda_files(op.name, family)
        return [OPS / name for file in files for name in (file, *sources(file)[1])]

    def why_no_build(self) -> str | None:
        return why_no_nvrtc()


_SHARED = Path(shared.__file__).parent
"""What the ops share."""


_DECIDING = ("launch*.py", "arguments.py", "epilogue.py", "patches.py", "strides.py", "walk.py")
_IMPORTED = re.compile(r"^from tilewise\.ops\.(\w+\.)?(\w+) import", re.MULTILINE)


def _written(folder: Path) -> list[Path]:
    """Kernels in Triton and Gluon."""
    return [*folder.glob("triton*"), *folder.glob("gluon*")]


def _launches(op: Op, module: str) -> list[Path]:
    """What decides how kernels are specialised and launched; by `module` and what it imports."""
    own = {path.stem: path for name in _DECIDING for path in op.folder.glob(name)}
    if module:
        needed, left = set(), [module]
        while left:
            name = left.pop()
            if name in own and name not in needed:
                needed.add(name)
                left += [found[2] for found in _IMPORTED.finditer(own[name].read_text())]
        own = {name: own[name] for name in sorted(needed)}
    return [*own.values(), _SHARED / "launch.py", _SHARED / "arguments.py"]


class GpuPlan(Plan):
    """A kernel bound to a problem; strides are looked at on every call, and remembered."""

    reads_addresses = True

    def __init__(self, kernel: Kernel, problem: Problem, arch: Arch, epilogue: Any = None) -> None:
        self.kernel = kernel
        self.problem = problem
        self.epilogue = epilogue
        self._arch = arch
        self._module = launch_module(kernel.op)
        self._operands = len(get_op(kernel.op).operands)
        self._launches: dict[Any, Launch] = {}
        self._calls: dict[Any, BoundLaunch] = {}
        self.workspace_bytes = self._launch(None, True).workspace_bytes

    def prepare(self, operands: Sequence[Any], out: Any) -> None:
        self._call(operands, out)

    def sources(self, operands: Sequence[Any], out: Any) -> Sequence[AnySource]:
        return self._specialised(self._layout(operands, out)).sources

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        key = self._layout(operands, out)
        if key in self._calls:
            return None
        try:
            self._specialised(key)
        except TensorError as error:
            return str(error)
        return None

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        self._call(operands, out).start(_addresses(operands, out), workspace)

    def launcher(self, operands: Sequence[Any], out: Any) -> Callable[..., None]:
        return self._call(operands, out).launcher()

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        """A launch with everything fixed, on the stream that is current at each call."""
        call, addresses = self._call(operands, out), _addresses(operands, out)
        if call.needs_scratch:
            return lambda: call.start(addresses, workspace)
        return call.fixed(addresses)

    def _call(self, operands: Sequence[Any], out: Any) -> BoundLaunch:
        key = self._layout(operands, out)
        call = self._calls.get(key)
        if call is None:
            import torch

            with torch.cuda.device(out.get_device()):
                launch = self._specialised(key)
                call = BoundLaunch(launch, self._arch, self.kernel.name, self._order())
            self._calls[key] = call
        return call

    def _layout(self, operands: Sequence[Any], out: Any) -> Any:
        """What a specialisation depends on: strides, alignment to 16 bytes, and the device."""
        strides, bits = [], 0
        for tensor in (*operands[: self._operands], out):
            strides.append(tensor.stride())
            bits |= tensor.data_ptr()
        return *strides, not bits & 15, out.get_device()

    def _order(self) -> tuple[int, ...]:
        """The numbers of a call's tensors: the result, the operands, what the epilogue reads."""
        read = getattr(self.epilogue, "tensors", ())
        return (self._operands, *range(self._operands), *read)

    def _specialised(self, layout: Any) -> Launch:
        *strides, is_aligned, _ = layout
        return self._launch(self._module.strides_of(self.problem, strides), is_aligned)

    def _launch(self, strides: Any, is_aligned: bool) -> Launch:
        """Worked out once for each set of strides; dense ones are the usual set."""
        key = (strides or self._module.default_strides(self.problem), is_aligned)
        made = self._launches.get(key)
        if made is None:
            made = self._launches[key] = self._module.launch(
                *(self.kernel, self.problem, self._arch),
                strides=strides,
                is_aligned=is_aligned,
                epilogue=self.epilogue,
            )
        return made


def _addresses(operands: Sequence[Any], out: Any) -> list[int]:
    return [out.data_ptr(), *[tensor.data_ptr() for tensor in operands]]
