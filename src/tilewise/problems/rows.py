"""One row of a problem file, whatever the format, as a problem and its labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from tilewise.core.problem import Problem
from tilewise.core.words import pairs_of
from tilewise.errors import InputError, ProblemError
from tilewise.ops.contract import all_ops, get_op
from tilewise.problems.problem_set import Labels

_COMMON_ALIASES: dict[str, tuple[str, ...]] = {
    "data_type": ("dtype",),
    "datatype": ("dtype",),
    "output_dtype": ("out_dtype",),
    "splitk": ("split_k",),
}
_DTYPE_ALIASES = {
    "float": "fp32",
    "float32": "fp32",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "bfp16": "bf16",
    "float8_e4m3fn": "fp8",
    "e4m3": "fp8",
    "float8_e5m2": "bf8",
    "e5m2": "bf8",
    "bfp8": "bf8",
    "i8": "int8",
}
_COMMON_WORDS: dict[str, Mapping[str, str]] = {
    "dtype": _DTYPE_ALIASES,
    "out_dtype": _DTYPE_ALIASES,
    "op": {},
}


class RowReader:
    """Turns rows into problems of one op, or of the op that each row names when `op` is empty."""

    def __init__(self, op: str = "", **defaults: Any) -> None:
        if op:
            get_op(op)
        self.op = op
        self.defaults = {k: v for k, v in defaults.items() if v not in (None, "")}
        self._texts: dict[tuple[str, str, str], Any] = {}
        self._names: dict[tuple[str, str], tuple[str, ...]] = {}
        self._required: dict[str, tuple[str, ...]] = {}
        if op:
            self._refuse_unknown_defaults()

    def _refuse_unknown_defaults(self) -> None:
        unknown = [key for key in self.defaults if not self.names(self.op, key)]
        if unknown:
            known = ", ".join(get_op(self.op).problem.KEYS)
            raise InputError(f"{self.op} problems have no {', '.join(unknown)}; they have {known}")

    def names(self, op: str, key: str) -> tuple[str, ...]:
        """The file keys that `key` stands for; none where it is a label."""
        found = self._names.get((op, key))
        if found is None:
            found = self._names[op, key] = _names(op, key)
        return found

    def missing_from(self, header: Iterable[str]) -> list[str]:
        """The keys that a problem needs and neither `header` nor the defaults give."""
        if not self.op:
            return []
        given = {name for key in (*header, *self.defaults) for name in self.names(self.op, key)}
        return [key for key in self._needed(self.op) if key not in given]

    def read(self, row: Mapping[str, Any]) -> tuple[Problem, Labels]:
        """The problem and the labels of one row; raises ProblemError with the reason."""
        op = self._op_of(row)
        values: dict[str, Any] = {}
        labels: Labels = {}
        for key, value in row.items():
            names = self.names(op, key)
            if not names and value not in (None, ""):
                labels[key] = value
            for name in names:
                parsed = value if type(value) is int else self._parsed(op, name, value)
                if parsed is None:
                    continue
                if values.setdefault(name, parsed) != parsed:
                    raise ProblemError(f"{name} is {values[name]} and again, by {key}, {parsed}")
        for key, value in self.defaults.items():
            for name in self.names(op, key):
                values.setdefault(name, _value(op, name, value))
        return self._make(op, values), labels

    def _parsed(self, op: str, name: str, value: Any) -> Any:
        """A cell's value, None where it is empty. Cells repeat, so that text is parsed once."""
        if type(value) is not str:
            return _value(op, name, value)
        try:
            return self._texts[op, name, value]
        except KeyError:
            if len(self._texts) > 100_000:
                self._texts.clear()
            parsed = self._texts[op, name, value] = _value(op, name, value)
            return parsed

    def _op_of(self, row: Mapping[str, Any]) -> str:
        named = row.get("op") or row.get("OP") or row.get("Op")
        named = named or _implied(row)
        if not named:
            if not self.op:
                raise ProblemError("no op is given; name it in the row or, for all rows, by --op")
            return self.op
        named = str(named).strip().lower()
        if self.op and named != self.op:
            raise ProblemError(f"it is a {named} problem; {self.op} was asked for")
        try:
            get_op(named)
        except InputError as error:
            raise ProblemError(str(error)) from None
        return named

    def _needed(self, op: str) -> tuple[str, ...]:
        if op not in self._required:
            self._required[op] = _required(op)
        return self._required[op]

    def _make(self, op: str, values: dict[str, Any]) -> Problem:
        missing = [key for key in self._needed(op) if key not in values]
        if missing:
            needed = ", ".join(self._needed(op))
            raise ProblemError(f"{', '.join(missing)} missing; {op} needs at least {needed}")
        values.pop("op", None)
        return get_op(op).make_problem(**values)


def problem_from_words(words: Iterable[str], op: str, **defaults: Any) -> Problem:
    """The problem spelled as `KEY=VALUE` words, for example `M=128 N=1536 K=7168`."""
    row = pairs_of(words, "M=128 or Hi=56")
    problem, labels = RowReader(op, **defaults).read(row)
    if labels:
        known = ", ".join(get_op(op).problem.KEYS)
        raise ProblemError(f"{op} has no {', '.join(labels)}; it takes {known}")
    return problem


def _names(op: str, key: str) -> tuple[str, ...]:
    folded = key.strip().lower()
    if folded == "op":
        return ("op",)
    problem = get_op(op).problem
    for name, field in problem.KEYS.items():
        if folded in (name.lower(), field):
            return (name,)
    aliases = {**_COMMON_ALIASES, **get_op(op).problems.aliases}
    return tuple(name for name in aliases.get(folded, ()) if name in problem.KEYS)


def _required(op: str) -> tuple[str, ...]:
    problem = get_op(op).problem
    without_default = {f.name for f in fields(problem) if f.default is MISSING}
    return tuple(key for key, field in problem.KEYS.items() if field in without_default)


def _implied(row: Mapping[str, Any]) -> str:
    """The op whose own keys a row gives, such as a convolution's direction; else what it gives."""
    for op in all_ops().values():
        for key, implied in op.implied.items():
            if row.get(key) and _value(op.name, key, row[key]) == implied:
                return op.name
    keys = {key for op in all_ops().values() for key in op.implied}
    return next((f"{key} {row[key]}" for key in sorted(keys) if row.get(key)), "")


def _value(op: str, name: str, value: Any) -> Any:
    """A cell's value under the file key `name`; None where it is empty and may be."""
    problems = get_op(op).problems
    if value is None or (isinstance(value, str) and not value.strip()):
        if name in problems.never_empty:
            raise ProblemError(f"{name} is empty; it must be an integer")
        return None
    words = _COMMON_WORDS.get(name, problems.words.get(name))
    if words is not None:
        text = str(value).strip().lower().removeprefix("torch.")
        return words.get(text, text)
    if type(value) is int:
        return value
    return _integer(name, value)


def _integer(name: str, value: Any) -> int:
    """An integer from `16`, `16.0` or their text; anything else is refused, not rounded."""
    if isinstance(value, str):
        value = _number(value.strip())
        if isinstance(value, int):
            return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    shown = f"{value!r}"
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    raise ProblemError(f"{name} is {shown}; it must be an integer that fits in 63 bits")


def _number(text: str) -> int | float | str:
    """What a text says where that is a number, else the text."""
    for kind in (int, float) if len(text) < 20 else (float,):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
