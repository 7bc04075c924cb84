"""Problems in C and C++: one struct for each kind, with the fields that Python's has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields
from textwrap import wrap

from tilewise.core.dtypes import DTYPES
from tilewise.core.model import Model
from tilewise.core.source import identifier, word
from tilewise.errors import InputError
from tilewise.export.cases import size_fields, word_fields
from tilewise.export.rules import OpExport
from tilewise.ops.contract import Op

MOST_SIZES, MOST_WORDS = 20, 4
"""Room in `tilewise_problem`."""
DTYPE_FIELDS = ("dtype", "out_dtype")


def words_of(op: Op, model: Model) -> dict[str, tuple[str, ...]]:
    """Text field -> the words that the front numbers from 0."""
    if len(size_fields(op)) > MOST_SIZES or len(word_fields(op)) > MOST_WORDS:
        raise InputError(
            f"{op.name} has {len(size_fields(op))} sizes and {len(word_fields(op))} text fields; "
            f"{MOST_SIZES} and {MOST_WORDS} can be exported"
        )
    return {
        name: tuple(DTYPES)
        if name in DTYPE_FIELDS
        else tuple(model.features.words.get(f"p_{name}", ()))
        for name in word_fields(op)
    }


def dtype_enum() -> str:
    """The names of element types, in order."""
    return ", ".join(map(word, DTYPES))


def op_enum(exports: Sequence[OpExport]) -> str:
    """C names of the ops."""
    return ", ".join(f"TILEWISE_{export.name.upper()} = {at}" for at, export in enumerate(exports))


def op_fields(exports: Sequence[OpExport]) -> str:
    """What the numbers of a problem mean in C, as lines of a comment."""
    lines = [f"dtypes: {', '.join(map(word, DTYPES))}"]
    for export in exports:
        named = []
        for name in word_fields(export.op):
            listed = (
                "" if name in DTYPE_FIELDS else f" ({', '.join(map(word, export.words[name]))})"
            )
            named.append(f"{identifier(name)}{listed}")
        sizes = ", ".join(map(identifier, size_fields(export.op)))
        lines.append(f"{export.name}: words {', '.join(named)}; sizes {sizes}; {_tensors(export)}")
    wrapped = (wrap(line, 96, subsequent_indent="  ") for line in lines)
    return "".join(f"\n   {part}" for parts in wrapped for part in parts)


def _tensors(export: OpExport) -> str:
    return f"tensors {', '.join(map(identifier, export.op.operands))}, then the result"


def problem_structs(exports: Sequence[OpExport]) -> str:
    """A struct for each kind of problem; ops of one kind differ in what they imply."""
    kinds: dict[type, list[OpExport]] = {}
    for export in exports:
        kinds.setdefault(export.op.problem, []).append(export)
    return "\n".join(_struct(kind.__name__, own) for kind, own in kinds.items())


def _struct(name: str, exports: Sequence[OpExport]) -> str:
    op = exports[0].op
    enums, members = [], []
    implied = list(op.implied_fields)
    for field in implied:
        listed = [str(export.op.implied_fields[field]) for export in exports]
        enums.append(_enum(field, listed))
        members.append(
            f"  {enum_name(field)} {identifier(field)} = {enum_name(field)}::{word(listed[0])};"
        )
    for f in fields(op.problem):
        if f.name in implied:
            continue
        if f.name in DTYPE_FIELDS:
            first = exports[0].cases[0].words[f.name]
            usual = "automatic" if f.name == "out_dtype" else word(first)
            members.append(f"  Dtype {identifier(f.name)} = Dtype::{usual};")
        elif f.name in word_fields(op):
            enums.append(_enum(f.name, exports[0].words[f.name]))
            kind = enum_name(f.name)
            members.append(f"  {kind} {identifier(f.name)} = {kind}::{word(f.default)};")
        else:
            usual = "0" if f.default is MISSING else str(int(f.default))
            members.append(f"  int64_t {identifier(f.name)} = {usual};")
    told = inspect.getdoc(op.problem) or ""
    lines = [*told.replace("\\", "/").splitlines(), ""]
    lines += [f"{export.name}: {_tensors(export)}." for export in exports]
    return f"""\
{"".join(f"// {line}".rstrip() + chr(10) for line in lines)}\
struct {identifier(name)} {{
{"".join(enums)}{chr(10).join(members)}

  operator tilewise_problem() const {{
    tilewise_problem made{{}};
{_conversion(op, exports, implied)}    return made;
  }}
}};
"""


def _conversion(op: Op, exports: Sequence[OpExport], implied: Sequence[str]) -> str:
    lines = []
    if implied:
        ops = ", ".join(f"TILEWISE_{export.name.upper()}" for export in exports)
        lines.append(f"    constexpr int32_t ops[] = {{{ops}}};")
        lines.append(f"    const auto which = static_cast<size_t>({identifier(implied[0])});")
        lines.append(f"    made.op = which < {len(exports)} ? ops[which] : TILEWISE_OPS;")
    else:
        lines.append(f"    made.op = TILEWISE_{exports[0].name.upper()};")
    for at, name in enumerate(word_fields(op)):
        if name == "out_dtype":
            count = len(DTYPES)
            results = ", ".join(f"Dtype::{word(d.result)}" for d in DTYPES.values())
            lines.append(f"    constexpr Dtype results[] = {{{results}}};")
            lines.append(
                "    const auto given = static_cast<size_t>(dtype);\n"
                f"    const bool is_usual = out_dtype == Dtype::automatic && given < {count};\n"
                "    const Dtype stored = is_usual ? results[given] : out_dtype;"
            )
            lines.append(f"    made.words[{at}] = static_cast<int32_t>(stored);")
        else:
            lines.append(f"    made.words[{at}] = static_cast<int32_t>({identifier(name)});")
    for at, name in enumerate(size_fields(op)):
        lines.append(f"    made.sizes[{at}] = {identifier(name)};")
    return "".join(f"{line}\n" for line in lines)


def _enum(field: str, words: Sequence[str]) -> str:
    return f"  enum class {enum_name(field)} : int32_t {{ {', '.join(map(word, words))} }};\n"


def enum_name(field: str) -> str:
    """The C++ type of a text field."""
    return identifier("".join(part.capitalize() for part in field.split("_")))
