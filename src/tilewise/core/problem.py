"""What every problem can say about itself, whatever the op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from functools import cache
from operator import attrgetter, index
from typing import Any, ClassVar, Self

from tilewise.core.dtypes import dtype
from tilewise.core.identity import digest
from tilewise.core.sizes import Number, TraceError
from tilewise.errors import ProblemError


@dataclass(frozen=True, slots=True)
class GemmView:
    """A problem as `groups` independent products of an m x k by a k x n matrix."""

    groups: int
    m: int
    n: int
    k: int


class Problem(ABC):
    """What to compute: an op with sizes, dtype and layout.

    Subclasses are frozen dataclasses with `eq=False` that call `_settle` when they are made: a
    remembered problem is looked up by its hash, which is therefore computed once.
    """

    __slots__ = ("_hash", "_values")

    KEYS: ClassVar[Mapping[str, str]]
    """File key -> field, for example `{"M": "m"}`; the order is the order in files."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    dtype: str
    out_dtype: str
    _hash: int
    _values: tuple[Any, ...]

    def _settle(self) -> None:
        """Keeps the values and their hash; to be called once all fields are final."""
        values = _getter(type(self))(self)
        try:
            made = hash(values)
        except TraceError:  # sizes that are not known have none
            return
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_hash", made)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:  # unpickled: fields alone travel
            self._settle()
            return self._hash

    def __eq__(self, other: Any) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        try:
            return self._values == other._values
        except AttributeError:
            return hash(self) == hash(other) and self._values == other._values

    @property
    @abstractmethod
    def op(self) -> str:
        """The op's name, for example `gemm` or `conv_fwd`."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The fewest bytes through memory: every input read once, the output written once."""

    @property
    @abstractmethod
    def gemm(self) -> GemmView:
        """The same work as matrix products."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / max(1, self.bytes)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute because a size is zero."""
        return self.flops == 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, under the keys that problem files use."""
        return {"op": self.op, **{key: getattr(self, field) for key, field in self.KEYS.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The problem that `to_dict` wrote; absent keys take their defaults."""
        unknown = set(values) - set(cls.KEYS) - {"op"}
        if unknown:
            raise ProblemError(
                f"unknown keys {sorted(unknown)}; a {cls.__name__} takes {', '.join(cls.KEYS)}"
            )
        return cls(**{cls.KEYS[key]: value for key, value in values.items() if key != "op"})

    @property
    def key(self) -> str:
        """Identity on disk: the same problem has the same key on every machine."""
        return digest({"problem": self.to_dict()})


@cache
def _getter(kind: type[Problem]) -> Callable[[Problem], tuple[Any, ...]]:
    return attrgetter(*(f.name for f in fields(kind)))


def check_dtypes(operand: str, result: str, allowed: tuple[str, ...]) -> str:
    """The result dtype, defaulted; raises where either is impossible."""
    if operand not in allowed:
        raise ProblemError(f"dtype is {operand!r}; use one of {', '.join(allowed)}")
    if not result:
        return dtype(operand).result
    possible = ("int32", "fp32") if operand == "int8" else ("fp32", "fp16", "bf16")
    if result not in possible:
        raise ProblemError(
            f"out_dtype is {result!r}; {operand} operands can give {', '.join(possible)}"
        )
    return result


def check_size(name: str, value: Any, least: int) -> int:
    """`value` as a plain integer of at least `least`; raises where it is none."""
    try:
        size: Any = value if isinstance(value, Number) else index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise ProblemError(f"{name} is {value!r}; it must be an integer")
    if size < least:
        raise ProblemError(f"{name} is {size}; it must be at least {least}")
    if size >= 2**63:
        raise ProblemError(f"{name} is {size}; sizes must be below 2^63")
    return size  # type: ignore[no-any-return]  # a number, or one that is not known yet


def spell_problem(problem: Problem) -> str:
    """A problem as the words that `parse_problem` reads, less what goes without saying."""
    usual = {f.name: f.default for f in fields(problem)}
    # The op says the direction, --dtype the dtype.
    usual |= {name: getattr(problem, name) for name in ("dtype", "direction") if name in usual}
    usual["out_dtype"] = dtype(problem.dtype).result
    return " ".join(
        f"{key}={getattr(problem, name)}"
        for key, name in problem.KEYS.items()
        if getattr(problem, name) != usual[name]
    )
