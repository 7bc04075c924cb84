"""Feature sets: numbers that describe a kernel on a problem on an architecture.

A set has fields (`p_` of the problem, `v_` of how the vendor's library would serve it, `k_` of the
kernel, `a_` of the architecture), helpers and features, both expressions over fields and earlier
helpers. What depends on the problem alone or on the kernel alone is known and evaluated once per
problem or per kernel. A set is JSON: a model carries the definitions it was trained with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array, check_compiles, encode, evaluate
from tilewise.core.expressions import MAX_WEIGHT, Expression, parse
from tilewise.core.source import identifier, word
from tilewise.errors import ExpressionError
from tilewise.forks import cached_property

ARCH, PROBLEM, KERNEL, MIXED = 0, 1, 2, 3
"""Scopes; the scope of an expression is the bitwise union of those of its parts."""
_PREFIX = {"p": PROBLEM, "v": PROBLEM, "k": KERNEL, "a": ARCH}
ABSENT = -1.0
"""A numeric trait that a kind of kernel does not have; absent text is an unknown word, 0."""
MOST_NAMES = 2048
"""Fields, helpers and features of one set together: compiled code keeps their values on a stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One input; `words` are the known values of a text field, whose codes count from 1."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def is_asked(self) -> bool:
        """Whether it is the vendor's library that knows."""
        return self.name.startswith("v_")

    @property
    def scope(self) -> int:
        return _PREFIX[self.name.partition("_")[0]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Field values of problems, kernels and one architecture, and which rows pair them up.

    Where problems were measured on several devices, those of the architecture go by problem.
    """

    problems: Mapping[str, Array]
    kernels: Mapping[str, Array]
    arch: Mapping[str, float] | Mapping[str, Array]
    problem_index: NDArray[np.int64]
    kernel_index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.problem_index)

    def only(self, which: NDArray[np.bool_] | slice) -> Rows:
        """Some of the rows."""
        pairs = self.problem_index[which], self.kernel_index[which]
        return Rows(self.problems, self.kernels, self.arch, *pairs)


@dataclass(frozen=True)
class FeatureSet:
    """Definitions in order; names are unique across fields, helpers and features."""

    fields: tuple[Field, ...]
    helpers: Mapping[str, str]
    features: Mapping[str, str]

    @cached_property
    def words(self) -> dict[str, tuple[str, ...]]:
        """Text fields and their known words."""
        return {f.name: f.words for f in self.fields if f.words}

    @cached_property
    def expressions(self) -> dict[str, Expression]:
        """Every helper and feature, parsed; each may use fields and what stands before it."""
        known = {f.name for f in self.fields}
        parsed: dict[str, Expression] = {}
        for name, source in (*self.helpers.items(), *self.features.items()):
            if name in known:
                raise ExpressionError(f"{name!r} is defined twice")
            parsed[name] = parse(source, known)
            known.add(name)
        return parsed

    @cached_property
    def scopes(self) -> dict[str, int]:
        """What each field, helper and feature depends on."""
        scopes = {f.name: f.scope for f in self.fields}
        for name, expression in self.expressions.items():
            scope = ARCH
            for used in expression.fields:
                scope |= scopes[used]
            scopes[name] = scope
        return scopes

    @cached_property
    def asked(self) -> frozenset[str]:
        """Features that depend on what the vendor's library would do."""
        fields = {f.name for f in self.fields if f.is_asked}
        return frozenset(n for n in self.features if fields & self._needed([n]))

    def fields_of(self, scope: int) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if f.scope == scope)

    def restricted(self, features: Iterable[str], keep: Iterable[str] = ()) -> FeatureSet:
        """The same definitions for fewer features, without what they do not need."""
        wanted = dict.fromkeys(features)
        needed = self._needed([*wanted, *keep])
        return FeatureSet(
            tuple(f for f in self.fields if f.name in needed),
            {n: s for n, s in self.helpers.items() if n in needed},
            {n: self.features[n] for n in wanted},
        )

    def _needed(self, names: Sequence[str]) -> set[str]:
        needed, pending = set(names), list(names)
        while pending:
            expression = self.expressions.get(pending.pop())
            fresh = (expression.fields if expression else frozenset()) - needed
            needed |= fresh
            pending += fresh
        return needed

    def evaluate(
        self,
        rows: Rows,
        names: Sequence[str],
        given: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """The named features or helpers, one value per row; `given` replaces helpers by rows."""
        given = given or {}
        needed = self._needed([n for n in names if n not in given])
        held: dict[str, Array] = {k: np.asarray(v, np.float64) for k, v in rows.problems.items()}
        held |= {k: np.asarray(v, np.float64) for k, v in rows.kernels.items()}
        held |= {k: np.asarray(v, np.float64) for k, v in rows.arch.items()}
        by_problem = [name for name in rows.arch if held[name].ndim]
        scopes = {
            **self.scopes,
            **dict.fromkeys(by_problem, PROBLEM),
            **dict.fromkeys(given, MIXED),
        }
        spread: dict[str, Array] = dict(given)
        sizes = {PROBLEM: _length(rows.problems), KERNEL: _length(rows.kernels)}

        def by_row(name: str) -> Array:
            if name not in spread:
                value, scope = held[name], scopes[name]
                index = rows.problem_index if scope == PROBLEM else rows.kernel_index
                spread[name] = value[index] if scope in (PROBLEM, KERNEL) else value
            return spread[name]

        for name, expression in self.expressions.items():
            if name not in needed or name in given:
                continue
            scope = ARCH
            for used in expression.fields:
                scope |= scopes[used]
            scopes[name] = scope
            if scope == MIXED:
                value = evaluate(expression, {n: by_row(n) for n in expression.fields}, self.words)
                spread[name] = np.broadcast_to(value, (len(rows),))
            else:
                value = evaluate(expression, {n: held[n] for n in expression.fields}, self.words)
                held[name] = np.broadcast_to(value, (sizes[scope],)) if scope in sizes else value
        return {
            name: np.array(np.broadcast_to(by_row(name), (len(rows),)), np.float64)
            for name in names
        }

    def matrix(self, rows: Rows, given: Mapping[str, Array] | None = None) -> Array:
        """Every feature as a column."""
        columns = self.evaluate(rows, list(self.features), given)
        return np.column_stack([columns[name] for name in self.features])

    def check(self) -> None:
        """Raises unless every name, word and definition can be evaluated and written as source."""
        names = [*(f.name for f in self.fields), *self.helpers, *self.features]
        if len(names) > MOST_NAMES:
            raise ExpressionError(f"{len(names)} names are defined; {MOST_NAMES} are allowed")
        for name in names:
            identifier(name)
        for field in self.fields:
            if field.name.partition("_")[0] not in _PREFIX:
                raise ExpressionError(f"the field {field.name!r} starts with none of p_ v_ k_ a_")
            for each in field.words:
                word(each)
        if len(set(names)) < len(names):
            raise ExpressionError("a name is defined twice")
        weight = sum(expression.weight for expression in self.expressions.values())
        if weight > MAX_WEIGHT:
            raise ExpressionError(f"{weight} operations are defined; {MAX_WEIGHT} are allowed")
        for expression in self.expressions.values():
            check_compiles(expression, self.words)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; definitions are lists because their order matters."""
        return {
            "fields": [{"name": f.name, "words": list(f.words)} for f in self.fields],
            "helpers": [[name, source] for name, source in self.helpers.items()],
            "features": [[name, source] for name, source in self.features.items()],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The set that `to_dict` wrote; what cannot be evaluated and compiled is refused."""
        helpers, features = _definitions(values["helpers"]), _definitions(values["features"])
        made = cls(
            tuple(Field(name=f["name"], words=tuple(f["words"])) for f in values["fields"]),
            dict(helpers),
            dict(features),
        )
        if len(made.helpers) + len(made.features) < len(helpers) + len(features):
            raise ExpressionError("a name is defined twice")
        made.check()
        return made


def _definitions(listed: Any) -> list[tuple[str, str]]:
    found = [(name, source) for name, source in listed]
    if not all(isinstance(text, str) for pair in found for text in pair):
        raise ExpressionError("a definition is a name and an expression, both text")
    return found


def _length(columns: Mapping[str, Array]) -> int:
    return len(next(iter(columns.values()))) if columns else 0


def columns(fields: Sequence[Field], values: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Field values of several things as columns of numbers; what is missing is absent."""
    return {
        f.name: np.array(
            [encode(v.get(f.name, "" if f.words else ABSENT), f.words or None) for v in values],
            np.float64,
        )
        for f in fields
    }
