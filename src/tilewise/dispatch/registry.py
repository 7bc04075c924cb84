"""Registries: kernels declared, built and looked up. Several live side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.strict_json import loads
from tilewise.dispatch.dispatcher import Dispatcher, Result
from tilewise.dispatch.remembered import CALLS
from tilewise.engines import Build, get_engine, is_foreign
from tilewise.errors import FileError, InputError, KernelError
from tilewise.forks import cached_property, make_rlock
from tilewise.ops.configs import expand, filter_kernels
from tilewise.ops.contract import Op, get_op
from tilewise.selection.choice import Choice, Ranker
from tilewise.selection.measured import measured_rankers
from tilewise.selection.models import model_rankers

SCHEMA = 1


class Priority(IntEnum):
    """Kernels of a higher priority are tried before all others, whatever is predicted."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


def _priority(given: Priority | str) -> Priority:
    try:
        return Priority[given.upper()] if isinstance(given, str) else Priority(given)
    except (KeyError, ValueError):
        allowed = ", ".join(each.name.lower() for each in Priority)
        raise InputError(f"priority is {given!r}; use one of {allowed}") from None


class Registry:
    """The kernels considered for one op on one architecture. Safe to share between threads."""

    def __init__(self, op: str, arch: str | Arch, *, name: str = "default") -> None:
        self.op: Op = get_op(op)
        self.arch = load_arch(arch) if isinstance(arch, str) else arch
        self.name = name
        self._lock = make_rlock()
        self._kernels: dict[Kernel, Priority] = {}
        self._builds: dict[Kernel, Build] = {}
        self._names: dict[str, Kernel] = {}
        self.version = 0
        """Grows with every change, so that remembered choices know when they are stale."""

    def declare(
        self,
        kernels: Kernel | str | Iterable[Kernel | str] | None = None,
        *,
        priority: Priority | str = Priority.NORMAL,
        **traits: Any,
    ) -> list[Kernel]:
        """Adds kernels: values, a name, or traits such as `engine="cpu", family="packed"`.

        Traits are expanded as in a pool file: lists, ranges and wildcards. A kernel that cannot
        run on this architecture is refused. Declaring again changes only the priority.
        """
        wanted = _priority(priority)
        found = self._resolve(kernels, traits)
        for kernel in found:
            why = self.op.why_unusable(kernel, None, self.arch)
            if why is not None:
                raise KernelError(f"{kernel.name} cannot run on {self.arch.label}: {why}")
        with self._lock:
            for kernel in found:
                self._kernels[kernel] = wanted
                self._names[kernel.name] = kernel
        self._changed()
        return found

    def _resolve(
        self, kernels: Kernel | str | Iterable[Kernel | str] | None, traits: dict[str, Any]
    ) -> list[Kernel]:
        if kernels is not None and traits:
            raise InputError(f"declare() takes kernels or traits, not both: {sorted(traits)}")
        if kernels is None:
            if "engine" not in traits:
                raise InputError("declare() needs kernels, a name, or engine= and traits")
            engine = traits.pop("engine")
            found = expand([{"engine": engine, "traits": traits}], self.op, self.arch)
            if not found:
                raise InputError(
                    f"no {engine} kernel of {self.op.name} with {traits} is legal on "
                    f"{self.arch.label}; `kernels check` says why"
                )
            return found
        given = [kernels] if isinstance(kernels, Kernel | str) else list(kernels)
        found = [self.op.kernel_from_name(k) if isinstance(k, str) else k for k in given]
        for kernel in found:
            if not isinstance(kernel, Kernel):
                raise InputError(f"{kernel!r} is neither a kernel nor a kernel's name")
            if kernel.op != self.op.name:
                raise KernelError(f"{kernel.name} computes {kernel.op}, not {self.op.name}")
        return found

    def build(
        self,
        max_workers: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        """Compiles every declared kernel in parallel; failures are kept as facts, not raised."""
        with self._lock:
            by_engine: dict[str, list[Kernel]] = {}
            for kernel in self._kernels:
                by_engine.setdefault(kernel.engine, []).append(kernel)
        done: list[Build] = []
        for engine, kernels in by_engine.items():
            if is_foreign(engine):
                continue
            why = get_engine(engine).why_no_build()
            if why is not None:
                done += [Build(kernel=k, status="compile_error", message=why) for k in kernels]
                continue
            done += get_engine(engine).build(
                kernels, self.arch, max_workers=max_workers, on_done=on_done
            )
        with self._lock:
            self._builds.update({build.kernel: build for build in done})
        self._changed()
        return done

    def _changed(self) -> None:
        with self._lock:
            self.version += 1
        CALLS.forget()

    def note_build(self, build: Build) -> None:
        """Remembers what became of a kernel on first use; where `build` knows more, that stays."""
        with self._lock:
            if build.status == "ok":
                self._builds.setdefault(build.kernel, build)
            else:
                self._builds[build.kernel] = build

    def build_of(self, kernel: Kernel) -> Build | None:
        """What became of `kernel` in the last build, or None where it was never built."""
        return self._builds.get(kernel)

    @property
    def has_builds(self) -> bool:
        """Whether any kernel was built, or failed to."""
        return bool(self._builds)

    def priority_of(self, kernel: Kernel) -> Priority:
        return self._kernels[kernel]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Everything declared, in the order of declaration."""
        with self._lock:
            return tuple(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self.kernels)

    def __contains__(self, kernel: Kernel | str) -> bool:
        return kernel in (self._names if isinstance(kernel, str) else self._kernels)

    def __getitem__(self, name: str) -> Kernel:
        try:
            return self._names[name]
        except KeyError:
            raise KernelError(
                f"no kernel {name!r} in registry {self.name!r} of {len(self)} kernels"
            ) from None

    def filter(self, keep: str | Callable[[Kernel], bool]) -> Registry:
        """A new registry with the kernels that an expression or a function keeps."""
        kept = (
            filter_kernels(self.kernels, keep, self.op.kernel_types)
            if isinstance(keep, str)
            else [kernel for kernel in self.kernels if keep(kernel)]
        )
        return self._with(kept)

    def merge(self, other: Registry) -> Registry:
        """A new registry with both sets; where both declare a kernel the higher priority holds."""
        if (other.op.name, other.arch.name) != (self.op.name, self.arch.name):
            raise InputError(
                f"cannot merge {other.op.name} on {other.arch.name} into {self.op.name} on "
                f"{self.arch.name}; a registry serves one op on one architecture"
            )
        merged = self._with(self.kernels)
        for kernel in other.kernels:
            mine = merged._kernels.get(kernel, Priority.LOW)
            merged.declare(kernel, priority=max(mine, other.priority_of(kernel)))
            if kernel in other._builds:
                merged._builds.setdefault(kernel, other._builds[kernel])
        return merged

    def _with(self, kernels: Sequence[Kernel]) -> Registry:
        made = Registry(self.op.name, self.arch, name=self.name)
        for kernel in kernels:
            made._kernels[kernel] = self._kernels[kernel]
            made._names[kernel.name] = kernel
            if kernel in self._builds:
                made._builds[kernel] = self._builds[kernel]
        return made

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """Chooses and runs the kernels of this registry."""
        of = (self.op.name, self.arch)
        rankers: list[Ranker] = [*measured_rankers(*of), *model_rankers(*of)]
        return Dispatcher(self, rankers=rankers)

    def select(self, problem: Problem, **options: Any) -> Choice:
        """The kernel to use for `problem`; options as in `Dispatcher.select`."""
        return self.dispatcher.select(problem, **options)

    def run(self, problem: Problem, *tensors: Any, out: Any = None, **options: Any) -> Result:
        """Computes `problem` on the tensors; options as in `Dispatcher.run`."""
        return self.dispatcher.run(problem, *tensors, out=out, **options)

    def to_json(self) -> str:
        """Everything declared, without loss."""
        kernels = [
            {"priority": priority.name.lower(), **kernel.to_dict()}
            for kernel, priority in self._kernels.items()
        ]
        head: dict[str, Any] = {"schema": SCHEMA, "name": self.name, "op": self.op.name}
        head["arch"] = self.arch.to_dict()
        return json.dumps({**head, "kernels": kernels}, indent=1)

    @classmethod
    def from_json(cls, source: str | Path) -> Registry:
        """The registry that `to_json` wrote, from its text or a file."""
        try:
            text = source.read_text() if isinstance(source, Path) else source
            data = loads(text)
            if data["schema"] != SCHEMA:
                raise FileError(
                    f"registry schema {data['schema']} is not {SCHEMA}; export it again"
                )
            made = cls(data["op"], Arch.from_dict(data["arch"]), name=data["name"])
            for entry in data["kernels"]:
                priority = entry.pop("priority", "normal")
                made.declare(made.op.kernel_from_dict(entry), priority=priority)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"not a registry written by to_json: {error!r}") from None
        return made
