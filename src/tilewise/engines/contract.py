"""What an engine promises: kernels are built, then bound to problems as plans, then executed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.contract import Op
from tilewise.ops.vendor import Tactic


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel needs; read from the compiler's output, before any launch."""

    registers: int = 0
    """Of each thread; on AMD all vector registers, those for accumulation included."""
    sgprs: int = 0
    """Scalar registers of a wave, on AMD."""
    agprs: int = 0
    """How many of the vector registers are for accumulation, on AMD."""
    spills: int = 0
    """Bytes of each thread that did not fit in registers."""
    smem_bytes: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What became of one kernel: a failure is a fact about that kernel, not the end."""

    kernel: Kernel
    status: str
    """`ok`, `compile_error` or `over_limit`."""
    message: str = ""
    seconds: float = 0.0
    was_cached: bool = False
    resources: Resources = Resources()


class Plan(ABC):
    """A compiled kernel bound to one problem."""

    kernel: Kernel
    problem: Problem
    workspace_bytes: int
    """Scratch memory that `execute` needs, known before any launch."""
    tactic: str = ""
    """How a vendor's library says it serves the problem, as JSON; empty where it does not say."""
    epilogue: Any = None
    """What is done to the result besides; its tensors follow the operands."""
    reads_addresses: ClassVar[bool] = False
    """Whether launches read only the addresses of tensors, whatever shape they are shown in."""

    @abstractmethod
    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        """Computes into `out`; all arrays are the engine's native kind, in the problem's layout.

        Without a `workspace` of `workspace_bytes` the plan takes one of its own.
        """

    def why_unfit(self, operands: Sequence[Any], out: Any) -> str | None:
        """Why tensors with these strides and addresses cannot be served, or None."""
        return None

    def launcher(self, operands: Sequence[Any], out: Any) -> Callable[..., None]:
        """`launch(out, *operands)` for tensors stored just like these, which it does not check."""
        return lambda out, *operands: self.execute(operands, out)

    def prepare(self, operands: Sequence[Any], out: Any) -> None:  # noqa: B027  # optional
        """Compiles and loads whatever the first call with such tensors would; launches nothing."""

    def sources(self, operands: Sequence[Any], out: Any) -> Sequence[Any]:
        """What a call with such tensors compiles for them alone, as the engine's compiler takes it.

        None where that is done when the plan is made.
        """
        return ()

    def bind(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> Callable[[], Any]:
        """A call with everything fixed, for timing and for repeating with little overhead."""
        return lambda: self.execute(operands, out, workspace)


def versions(*packages: str) -> str:
    """The installed ones of these packages, each with its version."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def digest_of(places: Iterable[Path]) -> str:
    """Twelve digits of what files, and all files in folders, hold; what is missing counts not."""
    found: dict[str, bytes] = {}
    for place in places:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in files:
            if path.is_file() and path.suffix in _SOURCES:
                found[f"{place.parent.name}/{path.relative_to(place.parent)}"] = path.read_bytes()
    whole = sha256()
    for name, text in sorted(found.items()):
        whole.update(f"{name} {len(text)}\n".encode() + text)
    return whole.hexdigest()[:12]


_SOURCES = frozenset((".py", ".hpp", ".cpp", ".cuh"))


class Engine(ABC):
    """Turns kernels into callables."""

    name: str
    kinds: ClassVar[tuple[str, ...]]
    """Kinds of device that it runs kernels on: `cpu`, `gpu`."""
    takes_epilogue: ClassVar[bool] = False
    """Whether `plan` takes an `epilogue` to fuse."""

    @abstractmethod
    def toolchain(self, op: Op, family: str = "") -> str:
        """What turns an op's kernels into machine code, with versions and a digest of sources.

        It is part of a measurement's identity: another compiler, or a kernel written anew, gives
        other rows. `family` is one of `families`, or empty for kernels of no such family.
        """

    def families(self, op: Op) -> tuple[str, ...]:
        """The families of the op's kernels whose sources are known apart from the others'."""
        return ()

    def tactic(self, problem: Problem, arch: Arch) -> Tactic:
        """How a vendor's library says it would serve a problem; empty where none can be asked."""
        return {}

    def why_unavailable(self) -> str | None:
        """Why this engine cannot run here, or None."""
        return None

    def why_no_build(self) -> str | None:
        """Why this engine cannot compile here, or None; some compile for devices not here."""
        return self.why_unavailable()

    def build(
        self,
        kernels: Sequence[Kernel],
        arch: Arch,
        *,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        """Compiles in parallel; cached kernels cost nothing. Results are in the order given."""
        builds = []
        for kernel in kernels:
            builds.append(self.build_one(kernel))
            if on_done is not None:
                on_done(builds[-1])
        return builds

    def compile_ahead(
        self,
        pairs: Iterable[tuple[Kernel, Problem]],
        arch: Arch,
        *,
        max_workers: int | None = None,
    ) -> list[str]:
        """Compiles what plans for these pairs will need, in parallel; the failures, one a line.

        For engines whose kernels are compiled anew for some problems.
        """
        return []

    def build_one(self, kernel: Kernel) -> Build:
        """What became of one kernel, for engines that have nothing to compile."""
        return Build(kernel=kernel, status="ok", was_cached=True)

    def fuses(self, kernel: Kernel, problem: Problem, epilogue: Any) -> bool:
        """Whether a kernel does to its result what `epilogue` says; the plan says it again."""
        return self.takes_epilogue

    @abstractmethod
    def plan(self, kernel: Kernel, problem: Problem, arch: Arch) -> Plan:
        """The kernel bound to a problem, built first where it is not."""
