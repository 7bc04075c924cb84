"""What an op's folder provides, and how ops are found.

A folder under `ops/` that defines `OPS` is picked up by name: adding an op edits nothing else.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.features import FeatureSet
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import Storage
from tilewise.errors import InputError, KernelError, nearest
from tilewise.ops.buckets import Bucket, Buckets
from tilewise.ops.capturing import Reader
from tilewise.ops.commands import DriverCommand
from tilewise.ops.draws import Draw, Fields, scaled
from tilewise.ops.vendor import Tactic
from tilewise.settings import settings

WhyUnusable = Callable[[Kernel, Problem | None, Arch], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """Which problems of an op are worth looking at, and how files and tables say them."""

    families: Mapping[str, Draw]
    """Named ways to draw problem fields, each stressing something else."""
    uniform: Callable[[int], Draw]
    """`uniform(align)`: log-uniform sizes, multiples of `align` where that matters."""
    largest: int
    """The largest `align`."""
    edges: Callable[[], Iterable[tuple[str, Fields]]]
    """Family and fields of every problem with an edge dimension; some need not exist."""
    sizes: tuple[str, ...]
    """Fields that may be scaled to get a problem near another."""
    scaled: Callable[[Fields, str, float], dict[str, int]] = scaled
    """`scaled(fields, name, factor)`: the fields that change with the one called `name`."""
    axes: tuple[Buckets, ...]
    """What coverage sorts problems by."""
    excluded: frozenset[frozenset[Bucket]] = frozenset()
    """Pairs of buckets that no problem can be in."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of file keys, in lower case -> the keys they stand for."""
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """File keys whose values are text (besides dtypes) -> other words for those values."""
    never_empty: frozenset[str] = frozenset()
    """File keys with a default that an empty cell does not stand for."""
    shape: Callable[[Any], str]
    """The kind of a problem's shape, to judge a model by."""
    slices: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """Further ways to sort problems, to judge a model by."""
    columns: tuple[str, ...]
    """File keys that an exported table has."""
    rates: tuple[str, ...] = ("latency_ms", "tflops", "bandwidth_gb_s")
    """What an exported table says of a measurement."""
    brief: Callable[[Any], dict[str, Any]]
    """A problem in few words, for a narrow table."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """PyTorch's calls that compute such problems, and how each is read."""
    commands: Mapping[str, DriverCommand] = field(default_factory=dict)
    """MIOpenDriver's commands that compute such problems, by name without a type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: its problems, its kernels and the rules between them."""

    name: str
    package: str
    """Where its modules are imported from on first use: `problems`, `features`, `cpu`, ..."""
    folder: Path
    problem: type[Problem]
    operands: tuple[str, ...]
    """Names of the input tensors, in order."""
    shapes: Callable[[Any], tuple[tuple[int, ...], ...]]
    """Logical shapes of the operands and, last, of the result."""
    unit_axis: int
    """Where tensors may carry extra dimensions of one, such as a batch of one."""
    storage: Callable[[Any], tuple[Storage, ...]]
    """How the operands and, last, the result are laid out in memory."""
    kernel_types: tuple[type[Kernel], ...]
    """One or several for an engine; several differ in their trait `family`."""
    why_unusable: WhyUnusable
    """The first rule that keeps a kernel from a problem on an arch, or None.

    Without a problem: whether the kernel could serve any problem on the arch.
    """
    padded: Callable[[Any, tuple[int, ...]], Problem] | None = None
    """`padded(problem, alignment)`: the smallest larger problem of aligned sizes, whose result
    holds the smaller one's in its first corner when the operands are filled up with zeros."""
    reshaped: Callable[[Any], Problem] | None = None
    """`reshaped(problem)`: the simplest problem that is the same on the same memory, or itself."""
    lenders: Mapping[str, Path] = field(default_factory=dict)
    """Family -> the folder of the op whose GPU kernels it launches; their sources are its own."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Keys that every problem of this op has, such as a convolution's direction."""
    reference: Callable[..., Any]
    """`reference(problem, *operands)` in float64 NumPy."""

    def make_problem(self, **values: Any) -> Problem:
        """A problem of this op from file keys such as `M=128`."""
        return self.problem.from_dict({**self.implied, **values})

    @property
    def implied_fields(self) -> dict[str, Any]:
        """`implied` by the problem's fields."""
        return {self.problem.KEYS[key]: value for key, value in self.implied.items()}

    def __post_init__(self) -> None:
        for engine in {kind.engine for kind in self.kernel_types}:
            kinds = self.types_of(engine)
            families = [family for kind in kinds for family in kind.families()]
            clear = len(set(families)) == len(families) and all(k.families() for k in kinds)
            if len(kinds) > 1 and not clear:
                raise KernelError(
                    f"{self.name} has several types of {engine} kernels; each must have a trait "
                    f"`family` whose choices no other has, not {families}"
                )

    def module(self, name: str) -> ModuleType:
        """The op's module called `name`."""
        return import_module(f"{self.package}.{name}")

    @property
    def problems(self) -> Problems:
        """Families, edges, buckets and columns: `PROBLEMS` of its module `problems`."""
        found: Problems = self.module("problems").PROBLEMS
        return found

    @property
    def features(self) -> FeatureSet:
        """What a problem and a kernel look like together: `FEATURES` of its module `features`."""
        found: FeatureSet = self.module("features").FEATURES
        return found

    def tactic(self, problem: Problem, arch: Arch) -> Tactic:
        """What the vendor's library would do on this process's device, an `arch`.

        Its module `tactics` says, where it has one.
        """
        if not _has_tactics(self.package):
            return {}
        found: Tactic = self.module("tactics").tactic(problem, arch)
        return found

    def types_of(self, engine: str) -> tuple[type[Kernel], ...]:
        """The types of kernel that `engine` runs for this op; raises where there is none."""
        kinds = tuple(kind for kind in self.kernel_types if kind.engine == engine)
        if not kinds:
            known = list(dict.fromkeys(kind.engine for kind in self.kernel_types))
            meant = f"{', '.join(known)}{nearest(engine, known)}"
            raise KernelError(f"{self.name} has no kernels for engine {engine!r}; it has {meant}")
        return kinds

    def kernel_type(self, engine: str, family: object = None) -> type[Kernel]:
        """The one type of kernel that `engine` runs for this op, or the one of a `family`."""
        kinds = self.types_of(engine)
        if len(kinds) == 1:
            return kinds[0]  # which says itself what it thinks of the family
        for kind in kinds:
            if family in kind.families():
                return kind
        known = ", ".join(word for kind in kinds for word in kind.families())
        what = "is missing" if family is None else f"is {family!r}"
        raise KernelError(f"family {what}; {engine} kernels of {self.name} have one of {known}")

    def kernel_from_dict(self, values: dict[str, Any]) -> Kernel:
        """The kernel that `Kernel.to_dict` wrote."""
        return self.kernel_type(str(values.get("engine")), values.get("family")).from_dict(values)

    def kernel_from_name(self, name: str) -> Kernel:
        """The kernel called `name`, whatever engine and family it belongs to."""
        words = set(name.split("_"))
        alike = [kind for kind in self.kernel_types if name.startswith(kind.prefix(self.name))]
        meant = alike if len(alike) < 2 else [k for k in alike if words & set(k.families())]
        if alike and not meant:
            known = ", ".join(family for kind in alike for family in kind.families())
            raise KernelError(f"{name!r} has no family of {alike[0].engine} kernels: {known}")
        wrong: KernelError | None = None
        for kind in meant or self.kernel_types:
            try:
                kernel = kind.from_name(name)
            except KernelError as error:
                wrong = wrong or error
                continue
            if kernel.op != self.name:
                raise KernelError(f"{name!r} is a kernel of {kernel.op}, not of {self.name}")
            return kernel
        if meant and wrong:
            raise wrong  # it is of this kind, and the message says what is wrong with it
        shown = repr(str(name)[:200])
        raise KernelError(f"{shown} names no {self.name} kernel; `kernels list` shows some")


@cache
def _has_tactics(package: str) -> bool:
    return find_spec(f"{package}.tactics") is not None


@cache
def all_ops() -> dict[str, Op]:
    """Every op, by name: of the folders here, then of the packages that TILEWISE_OPS names."""
    here = import_module("tilewise.ops").__path__
    own = [f"tilewise.ops.{module.name}" for module in pkgutil.iter_modules(here) if module.ispkg]
    found: dict[str, Op] = {}
    for package in (*own, *settings().ops):
        for op in _ops_of(package):
            if found.setdefault(op.name, op) is not op:
                raise InputError(f"{package} has an op {op.name!r}; {op.name} exists already")
    return found


def _ops_of(package: str) -> tuple[Op, ...]:
    try:
        found = import_module(package)
    except (ImportError, TypeError, ValueError) as error:  # of names that only packages may say
        raise InputError(
            f"TILEWISE_OPS names {package!r}, which is not a package: {error}"
        ) from None
    if not hasattr(found, "OPS"):
        raise InputError(f"TILEWISE_OPS names {package!r}, which has no ops: it defines no OPS")
    return tuple(found.OPS)


def get_op(name: str) -> Op:
    """The op called `name`."""
    try:
        return all_ops()[name]
    except KeyError:
        known = f"use one of {', '.join(all_ops())}"
        raise InputError(f"op {name!r} is unknown; {known}{nearest(name, all_ops())}") from None
