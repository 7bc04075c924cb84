"""Kernels as values: fields declared once give names, JSON, the search space and filters."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, ClassVar, Self

from tilewise.core.arch import Arch
from tilewise.core.identity import digest
from tilewise.errors import KernelError

Value = int | str | bool
MOST = 10**18
"""Numbers of a kernel lie below: as many digits as its name has room for."""


def trait(tag: str, choices: Sequence[Value], *, default: Any = MISSING, doc: str = "") -> Any:
    """A kernel field: `tag` marks it in names, `choices` is every value worth building.

    Text is written bare in names and so takes no tag; a false flag is left out.
    """
    metadata = {"tag": tag, "choices": tuple(choices), "doc": doc}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel(ABC):
    """One structured way to compute an op. Subclasses are frozen dataclasses of traits."""

    engine: ClassVar[str]
    """What turns it into a callable: cpu, triton, cuda, vendor, or a foreign library's name."""
    keeps_values: ClassVar[bool] = True
    """Whether a kernel holds the very values it was given; some kinds fill in derived ones."""

    @property
    def op(self) -> str:
        """The op this kernel computes."""
        return self.only_op()

    @property
    def tile(self) -> tuple[int, int, int]:
        """What it computes at a time of the op's m x n result, and of the reduction."""
        raise NotImplementedError

    @classmethod
    def traits(cls) -> tuple[Field[Any], ...]:
        """The fields that make up this kind of kernel, in the order of its name."""
        return _traits(cls)

    @classmethod
    def space(cls) -> dict[str, tuple[Value, ...]]:
        """Every trait with every value worth building."""
        return {f.name: f.metadata["choices"] for f in cls.traits()}

    @classmethod
    def families(cls) -> tuple[str, ...]:
        """The families of this kind of kernel, by which it differs from others of its engine."""
        return tuple(map(str, cls.space().get("family", ())))

    @classmethod
    def is_dead_end(cls, values: dict[str, Any], arch: Arch) -> bool:
        """Whether no kernel with these trait values is legal on `arch`.

        `values` holds the first traits only, the newest last: a kind of kernel whose space is far
        larger than its legal part cuts whole branches here, by the rules that judge a kernel.
        """
        return False

    def check_choices(self) -> None:
        """Raises where a text or flag trait is outside its choices; numbers are free."""
        for f in self.traits():
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if type(value) is not type(choices[0]):
                raise KernelError(
                    f"{f.name} is {value!r}; it must be {type(choices[0]).__name__}, like {choices}"
                )
            if isinstance(value, str) and value not in choices:
                raise KernelError(
                    f"{f.name} is {value!r}; use one of {', '.join(map(str, choices))}"
                )
            if type(value) is int and value < 0:
                raise KernelError(f"{f.name} is {value}; it cannot be negative")
            if type(value) is int and value >= MOST:
                raise KernelError(f"{f.name} is {value}; it must be below {MOST:g}")

    @property
    def name(self) -> str:
        """Derived from the fields; `from_name` gives the same value back."""
        return _name(self)

    @classmethod
    def prefix(cls, op: str) -> str:
        return f"{op}_{cls.engine}_"

    @classmethod
    def from_name(cls, name: str) -> Self:
        """The kernel called `name`."""
        op_field = next((f for f in fields(cls) if f.name == "op_name"), None)
        ops: Iterable[str] = op_field.metadata["choices"] if op_field else (cls.only_op(),)
        for op in ops:
            if name.startswith(cls.prefix(op)):
                values = _parse(cls, name, name.removeprefix(cls.prefix(op)).split("_"))
                return cls(**values, **({"op_name": op} if op_field else {}))
        raise KernelError(
            f"{name!r} is not the name of a {cls.__name__}; "
            f"such names start with {' or '.join(cls.prefix(op) for op in ops)}"
        )

    @classmethod
    def spelled(cls, name: str, values: Mapping[str, Any]) -> Self:
        """The kernel of these values, for kinds that read `name` by rules of their own."""
        kernel = cls(**values)
        if kernel.name != name:
            raise KernelError(f"{name!r} is written {kernel.name!r}")
        return kernel

    @classmethod
    def only_op(cls) -> str:
        """The op, for kinds of kernel that serve a single one."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: op, engine and every field."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "op_name"}
        return {"op": self.op, "engine": self.engine, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The kernel that `to_dict` wrote."""
        given = {k: v for k, v in values.items() if k not in ("op", "engine")}
        known = {f.name for f in fields(cls)}
        unknown = set(given) - known
        if unknown:
            raise KernelError(
                f"unknown traits {sorted(unknown)}; a {cls.__name__} has {', '.join(sorted(known))}"
            )
        missing = {
            f.name for f in fields(cls) if f.default is MISSING and f.name != "op_name"
        } - set(given)
        if missing:
            raise KernelError(f"traits {sorted(missing)} are missing for a {cls.__name__}")
        if "op_name" in known:
            given["op_name"] = values.get("op")
        return cls(**given)

    @property
    def key(self) -> str:
        """Identity on disk."""
        return digest({"kernel": self.to_dict()})

    def alignment(self, problem: Any) -> tuple[int, ...]:
        """Multiples that the sizes an op pads must be of (`Op.padded`); empty where any will do.

        Of the problem only the layout counts, so that a pool is asked once for each.
        """
        return ()

    @property
    def problem_layout(self) -> str:
        """The layout of the problems it serves where its name tells; rows need not repeat it."""
        return ""

    @property
    def is_deterministic(self) -> bool:
        """Whether equal inputs give equal bits every time."""
        return True


@cache
def _traits(cls: type[Kernel]) -> tuple[Field[Any], ...]:
    return tuple(f for f in fields(cls) if "tag" in f.metadata)


@lru_cache(maxsize=65536)
def _name(kernel: Kernel) -> str:
    tokens = []
    for f in kernel.traits():
        value, tag = getattr(kernel, f.name), f.metadata["tag"]
        if isinstance(value, bool):
            tokens += [tag] if value else []
        else:
            tokens.append(f"{tag}{value}")
    return kernel.prefix(kernel.op) + "_".join(tokens)


def _parse(cls: type[Kernel], name: str, tokens: list[str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    at = 0
    for f in cls.traits():
        tag, sample = f.metadata["tag"], f.metadata["choices"][0]
        token = tokens[at] if at < len(tokens) else ""
        if isinstance(sample, bool):
            values[f.name] = token == tag
            at += token == tag
            continue
        pattern = rf"{tag}(0|[1-9]\d{{0,17}})" if isinstance(sample, int) else rf"{tag}(.+)"
        found = re.fullmatch(pattern, token)
        if not found:
            raise KernelError(f"{name!r}: expected {f.name} ({tag}...) where {token!r} stands")
        values[f.name] = int(found[1]) if isinstance(sample, int) else found[1]
        at += 1
    if at != len(tokens):
        raise KernelError(f"{name!r}: nothing in a {cls.__name__} is called {tokens[at]!r}")
    return values
