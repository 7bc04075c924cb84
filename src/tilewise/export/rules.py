"""The C++ of one op: which problems can be, which kernels can serve, and what launching takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from tilewise.errors import InputError, ProblemError, TilewiseError
from tilewise.export.cases import Case, Sizes, examples, known_names, size_fields, word_fields
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
RANKING = "const int64_t *p, const int32_t *w, int32_t *order, double *us"
_RANKING_NEEDS = """\
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <algorithm>
"""


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
    layers: tuple[Sizes, ...] | None = None
    """Sizes of the layers that are served, where kernels are compiled for such; each case has some
    of their sizes, then."""
    serving: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Kernel -> the layers that it is compiled for; those that are not named serve all."""

    @property
    def name(self) -> str:
        return identifier(self.op.name)

    def layers_of(self, kernel: Kernel) -> frozenset[int]:
        """Which layers a kernel is compiled for."""
        return self.serving.get(kernel.name, frozenset(range(len(self.layers or ()))))


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

    def why() -> str | None:
        try:
            return export.op.why_unusable(kernel, case.problem(), export.arch)
        except ProblemError as error:  # where another rule has answered, which a path cannot know
            return str(error)

    with following(kernel):
        return trace(why)


def _followed(
    export: OpExport, launches: Launches, kernel: Kernel, case: Case, seen: Examples
) -> tuple[Tree | None, tuple[Tree | None, LeafSource]]:
    """The rule and the launches of a kernel on problems of a case.

    Where a library is for layers, a kernel that cannot be followed for some answers so for them.
    """
    if not seen.count:
        return None, (None, reason)
    try:
        rule = _rule(export, kernel, case)
        return rule, launches(kernel, case, usable_examples(seen, rule))
    except InputError as error:
        if export.layers is None:
            raise
        launches.tell(str(error))
        return Leaf(str(error)), (None, reason)


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

    def tell(self, line: str) -> None:
        """Says what is left out."""

    def compile(self) -> None:
        """Called once all kernels were asked about, before leaves are written."""


def op_sources(export: OpExport, launches: Launches, blob: Blob, facts: str) -> dict[str, str]:
    """The generated files of an op: its ranking, and its rules and launches."""
    texts = Texts()
    possible = Functions("possible", RULE, texts)
    usable = Functions("usable", RULE, texts)
    launched = Functions("launch", LAUNCH, texts)
    possible_rows = [possible.add(case.why_impossible(), reason) for case in export.cases]
    usable_rows: list[Row] = []
    followed: list[tuple[Tree | None, LeafSource]] = []
    for kernel, case, seen in _seen(export):
        rule, launch = _followed(export, launches, kernel, case, seen)
        usable_rows.append(usable.add(rule, reason))
        followed.append(launch)
    launches.compile()
    launch_rows = [launched.add(tree, leaf) for tree, leaf in followed]
    name, described = export.name, f"of {len(export.kernels)} kernels of {export.op.name}"
    ranking = [
        _head(facts, f"Ranking {described}.") + _RANKING_NEEDS,
        f'extern "C" const unsigned char tilewise_data_{name}[];\n',
        "namespace tilewise::detail {\nnamespace {\n",
        _numbering(export),
        *(word_codes(export.model, field, words) for field, words in export.words.items()),
        _AT % name,
        "#define TW_API [[maybe_unused]] static\n",
        ranking_source(export.model, export.kernels, export.arch, blob),
        "}  // namespace\n",
        f"void rank_{name}({RANKING}) {{ rank_problem(p, w, order, us); }}\n",
        _wanted(export),
        "}  // namespace tilewise::detail\n",
    ]
    rules = [
        _head(facts, f"Rules and launches {described}."),
        f"namespace tilewise::detail {{\nvoid rank_{name}({RANKING});\n"
        f"bool is_wanted_{name}(const int64_t *p);\n\nnamespace {{\n",
        _numbering(export),
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
    return {
        f"src/{name}.cpp": "\n".join(part for part in ranking if part),
        f"src/{name}_rules.cpp": "\n".join(part for part in rules if part),
    }


def _head(facts: str, what: str) -> str:
    return f'// {comment(facts)}\n// {what}\n#include "internal.hpp"\n'


def _op_struct(export: OpExport) -> str:
    counts = (len(size_fields(export.op)), len(word_fields(export.op)))
    listed = ", ".join(map(str, (*counts, len(export.op.operands) + 1, len(export.kernels))))
    names = known_names(export.op, export.arch)
    known = f" with these {', '.join(names)}" if names else ""
    said = text_literal(f"the library was not exported for this dtype, out_dtype or layout{known}")
    return (
        f'extern const Op {export.name}_op = {{\n    "{export.name}", {listed}, kernel_names,\n'
        f"    {said},\n"
        f"    word_counts, case_of, is_possible, is_usable, rank_{export.name}, launched}};\n"
    )


def _seen(export: OpExport) -> Iterator[tuple[Kernel, Case, Examples]]:
    """Every kernel with every case, and problems of both."""
    known: dict[frozenset[int], list[Examples]] = {}
    everything = examples_of(export, frozenset(range(len(export.layers or ()))))
    for case, some in zip(export.cases, everything, strict=True):
        if not some.count:
            raise InputError(
                f"no problem of {case.op.name} ({' '.join(case.words.values())}) is left by --where"
            )
    for kernel in export.kernels:
        served = export.layers_of(kernel)
        if served not in known:
            known[served] = examples_of(export, served)
        for case, some in zip(export.cases, known[served], strict=True):
            yield kernel, case, some


def examples_of(export: OpExport, served: frozenset[int]) -> list[Examples]:
    """Of each case, problems of these layers; of all drawn ones where there are no layers."""
    layers = export.layers and [export.layers[at] for at in sorted(served)]
    return [examples(case, export.where, layers) for case in export.cases]


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
        tests += [f"p[{name}_] == {size}" for name, size in case.known.items()]
        said = " ".join(case.words[name] for name in word_fields(export.op))
        lines.append(f"  if ({' && '.join(tests) or 'true'}) return {at};  // {said}\n")
    return (
        "int32_t case_of(const int32_t *w, const int64_t *p) {\n  (void)w, (void)p;\n"
        f"{''.join(lines)}  return -1;\n}}\n"
    )


def _where(export: OpExport) -> str:
    """The question of whether a problem is one that the library was exported for."""
    if export.where is None:
        return ""
    said = text_literal(f"the library was exported for problems with {export.where.source}")
    return (
        f"  if (!is_wanted_{export.name}(p)) {{\n"
        f"    if (why) why->put({said});\n    return false;\n  }}\n"
    )


def _wanted(export: OpExport) -> str:
    """The answer, beside the scorer, whose arithmetic it uses."""
    if export.where is None:
        return ""
    names = {name: f"(double)p[{name}_]" for name in size_fields(export.op)}
    return (
        f"bool is_wanted_{export.name}(const int64_t *p) {{\n"
        f"  return {to_c(export.where, names, {})} != 0.0;\n}}\n"
    )
