"""A model's ranking as C++: the scorer that Python compiles, its tables as bytes beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.features import ABSENT
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, Measured, Model
from tilewise.core.source import identifier, number
from tilewise.ops.contract import get_op
from tilewise.selection.codegen import Layout
from tilewise.selection.compiled import Tables
from tilewise.selection.scorer import facts_of
from tilewise.selection.scorer_source import scorer_source

ALIGNMENT = 64
_WRITTEN = ("order", "score", "info", "keys", "far")
"""What a ranking writes to; each thread brings its own."""
_UNUSED = ("lead", "walk", "shuffled", "point", "axis_value")
"""What ranking all kernels does not look at."""


@dataclass(slots=True)
class Blob:
    """Bytes that are linked into the library, and where each array lies in them."""

    data: bytearray

    def place(self, array: Any) -> str:
        """C++ for a pointer to the array."""
        self.data.extend(b"\0" * (-len(self.data) % ALIGNMENT))
        at = len(self.data)
        self.data.extend(np.ascontiguousarray(array).tobytes())
        return f"At{{{at}}}"


def served_model(model: Model) -> Model:
    """The part of a model that ranks kernels of ours: no vendor, no places of measured problems."""
    none = np.zeros((0, 0))
    measured = Measured(axes=(), points=none, efficiency=none[:, :0], reach=0.0, problems=())
    forests = {name: forest for name, forest in model.forests.items() if name != VENDOR}
    return replace(model, forests=forests, measured=measured)


def ranking_source(model: Model, kernels: Sequence[Kernel], arch: Arch, blob: Blob) -> str:
    """The scorer, its tables, and `rank_problem`, which fills in a problem."""
    served = served_model(model)
    layout = Layout(served, facts_of(kernels, arch))
    tables = Tables(layout, kernels, arch)
    parts = [scorer_source(layout)]
    parts += _structs(tables, blob)
    parts.append(_packer(layout, served))
    return "\n".join(parts)


def _structs(tables: Tables, blob: Blob) -> Iterator[str]:
    """Every struct of the tables as C++ that points into the blob, the context last."""
    held = {_address(one): one for one in tables.held}
    names: dict[int, str] = {}

    def pointer(address: int | None) -> str:
        if not address:
            return "nullptr"
        if address in names:
            return f"&{names[address]}"
        return blob.place(held[address])

    context = tables.context
    for name in ("rank", "valid"):
        address = getattr(context, name)
        if not address:
            continue
        forest = held[address]
        bounds = [pointer(int(a)) for a in held[forest.thresholds]]
        listed = ", ".join(bounds) or "nullptr"
        yield f"const double *const {name}_thresholds[] = {{{listed}}};"
        own = {"thresholds": f"{name}_thresholds"}
        yield f"const tw_forest {name}_forest = {{{_members(forest, pointer, own)}}};"
        names[address] = f"{name}_forest"
    own = dict.fromkeys((*_WRITTEN, *_UNUSED), "nullptr") | {"points": "0", "axes": "0"}
    yield f"const tw_context context_of_model = {{{_members(context, pointer, own)}}};"


def _members(struct: Any, pointer: Any, own: Mapping[str, str]) -> str:
    found = []
    for name, kind in struct._fields_:
        value = getattr(struct, name)
        if name in own:
            found.append(own[name])
        elif kind is ctypes.c_void_p:
            found.append(pointer(value))
        else:
            found.append(number(value))
    return ", ".join(found)


def _address(held: Any) -> int:
    if isinstance(held, np.ndarray):
        return int(held.ctypes.data)
    return ctypes.addressof(held)


def _packer(layout: Layout, model: Model) -> str:
    """`rank_problem`: the fields of a problem in the order that the features want."""
    lines = []
    words = model.features.words
    implied = {f"p_{name}": value for name, value in get_op(model.op).implied_fields.items()}
    for at, name in enumerate(layout.problem_fields):
        plain = name.removeprefix("p_")
        if name in implied:
            code = float(words[name].index(implied[name]) + 1) if name in words else 0.0
            source = number(code)
        elif name in words:
            source = f"code_of_{identifier(plain)}(w[word_{identifier(plain)}])"
        elif name.startswith("p_"):
            source = f"(double)p[{identifier(plain)}_]"
        else:
            source = number(ABSENT)
        lines.append(f"  fields[{at}] = {source};")
    body = "\n".join(lines)
    return f"""\
void rank_problem(const int64_t *p, const int32_t *w, int32_t *order, double *us) {{
  double fields[{len(layout.problem_fields) + 1}], info[3];
  (void)p, (void)w;
{body}
  Scratch &own = scratch_for(context_of_model.blocks * TW_BLOCK);
  tw_context c = context_of_model;
  c.order = own.order.data();
  c.score = own.score.data();
  c.keys = own.keys.data();
  c.info = info;
  tw_rank(&c, fields);
  tw_level(&c, fields);
  for (int64_t i = 0; i < c.kernels; ++i) {{
    order[i] = c.order[i];
    us[i] = std::exp2(info[0] - c.score[c.order[i]]);
  }}
}}
"""


def word_codes(model: Model, field: str, words: Sequence[str]) -> str:
    """`code_of_*`: the model's number of each word that the front numbers from 0."""
    known = model.features.words.get(f"p_{field}", ())
    codes = [float(known.index(word) + 1) if word in known else 0.0 for word in words]
    listed = ", ".join(map(number, codes))
    return (
        f"double code_of_{identifier(field)}(int32_t word) {{\n"
        f"  constexpr double codes[] = {{{listed}}};\n  return codes[word];\n}}\n"
    )
