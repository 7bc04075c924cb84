"""The C++ of one op: which problems can be, which kernels can serve, and what launching takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import to_c
from tilewise.core.expressions import Expression
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.source import comment, identifier
from tilewise.core.trace import Examples, Leaf, Tree, trace
from tilewise.errors import InputError, TilewiseError
from tilewise.export.cases import Case, examples, size_fields, word_fields
from tilewise.export.ranking import Blob, ranking_source, word_codes
from tilewise.export.render import (
    Functions,
    LeafSource,
    Row,
    Texts,
    array,
    reason,
    rows_table,
    text_literal,
)
from tilewise.ops.contract import Op

RULE = "const int64_t *p, const int64_t *c, const double *f, Text *why"
LAUNCH = f"{RULE}, Launch *made"
_INCLUDES = (
    *("<immintrin.h>", "<algorithm>", "<cmath>", "<cstdint>", "<cstring>", "<numeric>"),
    '"internal.hpp"',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpExport:
    """What is exported of one op."""

    op: Op
    model: Model
    arch: Arch
    kernels: tuple[Kernel, ...]
    cases: tuple[Case, ...]
    where: Expression | None
    words: Mapping[str, Sequence[str]]
    """Text field -> every word, in the order of the front's numbers."""

    @property
    def name(self) -> str:
        return identifier(self.op.name)


def usable_examples(seen: Examples, rule: Tree | None) -> Examples:
    """The examples that a rule lets through."""
    result = np.zeros(seen.count, bool)

    def walk(tree: Tree | None, mask: NDArray[np.bool_]) -> None:
        if isinstance(tree, Leaf):
            if tree.value is None:
                result[mask] = True
        elif tree is not None and mask.any():
            holds = seen.evaluate(tree.test)
            walk(tree.yes, mask & holds)
            walk(tree.no, mask & ~holds)

    walk(rule, np.ones(seen.count, bool))
    return seen.where(result)


def _rule(export: OpExport, kernel: Kernel, case: Case) -> Tree | None:
    """Why a kernel cannot serve, over all sizes."""
    with following(kernel):
        return trace(lambda: export.op.why_unusable(kernel, case.problem(), export.arch))


@contextmanager
def following(kernel: Kernel) -> Iterator[None]:
    """Says of which kernel it is that something cannot be followed."""
    try:
        yield
    except (TilewiseError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{kernel.name} cannot be exported yet: {line}") from error


class Launches(Protocol):
    """Says what launching kernels takes."""

    def __call__(
        self, kernel: Kernel, case: Case, seen: Examples
    ) -> tuple[Tree | None, LeafSource]:
        """Launches of a kernel on problems of a case, as a tree, and what its leaves become."""

    def compile(self) -> None:
        """Called once all kernels were asked about, before leaves are written."""


def op_source(export: OpExport, launches: Launches, blob: Blob, facts: str) -> str:
    """The whole generated file of an op."""
    texts = Texts()
    possible = Functions("possible", RULE, texts)
    usable = Functions("usable", RULE, texts)
    launched = Functions("launch", LAUNCH, texts)
    possible_rows = [possible.add(case.why_impossible(), reason) for case in export.cases]
    usable_rows: list[Row] = []
    followed: list[tuple[Tree | None, LeafSource]] = []
    seen = [examples(case, export.where) for case in export.cases]
    _check_seen(export, seen)
    for kernel in export.kernels:
        for case, some in zip(export.cases, seen, strict=True):
            rule = _rule(export, kernel, case)
            usable_rows.append(usable.add(rule, reason))
            followed.append(launches(kernel, case, usable_examples(some, rule)))
    launches.compile()
    launch_rows = [launched.add(tree, leaf) for tree, leaf in followed]
    parts = [
        f"// {comment(facts)}\n// The op {export.name}: ranking, rules and launches of "
        f"{len(export.kernels)} kernels.\n",
        *(f"#include {name}" for name in _INCLUDES),
        f'\nextern "C" const unsigned char tilewise_data_{export.name}[];\n',
        "namespace tilewise::detail {\nnamespace {\n",
        _numbering(export),
        *(word_codes(export.model, name, words) for name, words in export.words.items()),
        _AT % export.name,
        "#define TW_API [[maybe_unused]] static\n",
        ranking_source(export.model, export.kernels, export.arch, blob),
        "// " + "-" * 70 + " rules and launches\n",
        _texts(texts) if texts.places else "",
        possible.source(),
        usable.source(),
        launched.source(),
        rows_table("possible_rows", possible_rows),
        rows_table("usable_rows", usable_rows),
        rows_table("launch_rows", launch_rows),
        _faces(export),
        "}  // namespace\n",
        _op_struct(export),
        "}  // namespace tilewise::detail\n",
    ]
    # Texts are numbered while rules are followed, so they are known last.
    return "\n".join(part for part in parts if part)


def _op_struct(export: OpExport) -> str:
    counts = (len(size_fields(export.op)), len(word_fields(export.op)))
    listed = ", ".join(map(str, (*counts, len(export.op.operands) + 1, len(export.kernels))))
    return (
        f'extern const Op {export.name}_op = {{\n    "{export.name}", {listed}, kernel_names,\n'
        "    word_counts, case_of, is_possible, is_usable, rank_problem, launched};\n"
    )


def _check_seen(export: OpExport, seen: Sequence[Examples]) -> None:
    for case, some in zip(export.cases, seen, strict=True):
        if not some.count:
            raise InputError(
                f"no problem of {case.op.name} ({' '.join(case.words.values())}) is left by --where"
            )


def _numbering(export: OpExport) -> str:
    sizes = ", ".join(f"{identifier(name)}_" for name in size_fields(export.op))
    words = ", ".join(f"word_{identifier(name)}" for name in word_fields(export.op))
    return f"enum {{ {sizes} }};\nenum {{ {words or 'no_words'} }};\n"


_AT = """\
// A place in the tables that are linked in.
struct At {
  size_t offset;
  template <class T>
  operator const T *() const { return reinterpret_cast<const T *>(tilewise_data_%s + offset); }
};
"""


def _texts(texts: Texts) -> str:
    listed = ",\n    ".join(text_literal(text) for text in texts.places)
    return f"""\
constexpr const char *texts[] = {{
    {listed}}};

// Writes a sentence from texts and numbers.
struct Words {{
  Text &out;
  explicit Words(Text &into) : out(into) {{}}
  Words &text(int64_t which) {{ return out.put(texts[which]), *this; }}
  Words &number(int64_t value) {{ return out.put(value), *this; }}
}};
"""


def _faces(export: OpExport) -> str:
    names = ",\n    ".join(f'"{identifier(kernel.name)}"' for kernel in export.kernels)
    counts = [len(export.words[name]) for name in word_fields(export.op)] or [0]
    return f"""\
constexpr const char *kernel_names[] = {{
    {names}}};
{array("constexpr int32_t word_counts", counts)}
constexpr int32_t kCases = {len(export.cases)};
{_bundle("possible")}{_bundle("usable")}{_bundle("launch")}
{_case_of(export)}
bool is_possible(int32_t which, const int64_t *p, Text *why) {{
{_where(export)}  return possible(which, p, why);
}}
bool is_usable(int32_t kernel, int32_t which, const int64_t *p, Text *why) {{
  return usable(kernel * kCases + which, p, why);
}}
bool launched(int32_t kernel, int32_t which, const int64_t *p, Launch *made, Text *why) {{
  return launch(kernel * kCases + which, p, why, made);
}}
"""


def _bundle(kind: str) -> str:
    parts = ", ".join(f"{kind}_{part}" for part in ("functions", "numbers", "fractions", "rows"))
    return f"constexpr Functions<decltype(&{kind}_0)> {kind}{{{parts}}};\n"


def _case_of(export: OpExport) -> str:
    lines = []
    for at, case in enumerate(export.cases):
        tests = [
            f"w[word_{name}] == {list(export.words[name]).index(case.words[name])}"
            for name in word_fields(export.op)
        ]
        said = " ".join(case.words[name] for name in word_fields(export.op))
        lines.append(f"  if ({' && '.join(tests) or 'true'}) return {at};  // {said}\n")
    return f"int32_t case_of(const int32_t *w) {{\n  (void)w;\n{''.join(lines)}  return -1;\n}}\n"


def _where(export: OpExport) -> str:
    if export.where is None:
        return ""
    names = {name: f"(double)p[{name}_]" for name in size_fields(export.op)}
    said = text_literal(f"the library was exported for problems with {export.where.source}")
    return (
        f"  if (!({to_c(export.where, names, {})} != 0.0)) {{\n"
        f"    if (why) why->put({said});\n    return false;\n  }}\n"
    )
