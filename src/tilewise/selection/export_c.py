"""A model as one C header: features, forest and ranking, without dependencies.

It compiles as C11 and as C++17. Names start with the model's name; a problem is a struct of
doubles, text fields are given as the constants above it, and the ranking equals Python's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import C_PRELUDE
from tilewise.core.features import KERNEL, MIXED, Rows
from tilewise.core.forest import Forest
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, Model
from tilewise.core.source import comment, identifier, number, word
from tilewise.ops.columns import arch_columns, kernel_columns
from tilewise.selection.codegen import SERVED, Layout

_HEAD = """\
/* {title}
   Ranks {count} kernels of {op} on {arch}. Written by tilewise {version}; do not edit. */
#ifndef {guard}
#define {guard}

/* Contracted products would round differently and could change the order of near ties. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

#ifdef __cplusplus
extern "C" {{
#endif

#define TW_RESTRICT
"""

_TAIL = """
#undef TW_RESTRICT

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#endif
"""

_WALK = """
static inline double tw_sum_%(name)s(const double *x) {
  long total = 0;
  int tree;
  for (tree = 0; tree < %(trees)d; ++tree) {
    int at = 0;
    do {
      const int node = tw_%(name)s_node_start[tree] + at;
      at = x[tw_%(name)s_feature[node]] <= tw_%(name)s_bound[node] ? tw_%(name)s_left[node]
                                                                   : tw_%(name)s_right[node];
    } while (at >= 0);
    total += tw_%(name)s_leaf[tw_%(name)s_leaf_start[tree] + ~at];
  }
  return (double)total * %(scale)s + %(offset)s;
}
"""

_RANK = """
/* Whether kernel a stands before kernel b. */
static inline int tw_before(const double *log2_us, int a, int b) {
  return log2_us[a] < log2_us[b] || (!(log2_us[b] < log2_us[a]) && a < b);
}

static inline void tw_sift(const double *log2_us, int *order, int at, int count) {
  for (;;) {
    int child = 2 * at + 1, held;
    if (child >= count) return;
    if (child + 1 < count && tw_before(log2_us, order[child], order[child + 1])) ++child;
    if (!tw_before(log2_us, order[at], order[child])) return;
    held = order[at];
    order[at] = order[child];
    order[child] = held;
    at = child;
  }
}

/* Fills `order` with kernel numbers, fastest first, and `log2_us` with the logarithm of each
   kernel's predicted microseconds (scores below the level, up to a constant per problem).
   Both have TW_COUNT entries. */
static inline void tw_rank(const tw_problem_t *problem, int *order, double *log2_us) {
  double fields[TW_FIELDS + 1], values[TW_VALUES + 1], mixed[TW_MIXED + 1];
  double x[TW_ROWS + 1];
  int i;
%(pack)s
  tw_problem(fields, tw_arch, values);
  for (i = 0; i < TW_COUNT; ++i) {
    double score;
    tw_mixed(values, tw_kernel_values + i, TW_COUNT, mixed);
%(rank)s
    score = tw_sum_rank(x);
%(vendor)s
%(base)s
%(valid)s
    score -= tw_handicap[i];
    log2_us[i] = -score;
    order[i] = i;
  }
  for (i = TW_COUNT / 2 - 1; i >= 0; --i) tw_sift(log2_us, order, i, TW_COUNT);
  for (i = TW_COUNT - 1; i > 0; --i) {
    const int held = order[0];
    order[0] = order[i];
    order[i] = held;
    tw_sift(log2_us, order, 0, i);
  }
%(level)s
  for (i = 0; i < TW_COUNT; ++i) log2_us[i] += values[TW_VALUES];
}

/* The number of the kernel to use. */
static inline int tw_select(const tw_problem_t *problem) {
  int order[TW_COUNT];
  double log2_us[TW_COUNT];
  tw_rank(problem, order, log2_us);
  return order[0];
}
"""


def export_c(model: Model, kernels: Sequence[Kernel], arch: Arch, name: str = "") -> str:
    """The header; kernels are numbered in the order given."""
    prefix = re.sub(r"\W|^(?=\d)", "_", name or model.name, flags=re.ASCII)
    layout = Layout(model)
    columns = kernel_columns(model, kernels)
    figures = arch_columns(model.features, arch)
    every = np.arange(len(kernels))
    rows = Rows({}, columns, figures, every, every)
    known = model.features.evaluate(rows, layout.kernel_values)
    from tilewise import __version__

    parts = [
        _HEAD.format(
            title=comment(model.name),
            count=len(kernels),
            op=identifier(model.op),
            arch=comment(arch.label),
            version=comment(__version__),
            guard=identifier(f"TILEWISE_{prefix.upper()}_H"),
        ),
        C_PRELUDE,
        _problem_type(layout, model),
        *_defines(layout, model, len(kernels)),
        _text_array("tw_kernels", [k.name for k in kernels]),
        _array("static const double tw_arch", [figures[n] for n in layout.arch_fields]),
        _array(
            "static const double tw_kernel_values",
            [v for n in layout.kernel_values for v in known[n].tolist()],
        ),
        _array("static const double tw_handicap", model.handicaps(kernels)),
        layout.problem_source(),
        layout.mixed_source(1),
    ]
    if VENDOR in model.forests:
        which = [int(k.engine == VENDOR) for k in kernels]
        parts.append(_array("static const unsigned char tw_is_vendor", which))
    fills = {}
    for title in SERVED:
        if title in model.forests:
            forest = model.forests[title]
            parts += [*_forest(title, forest), _kernel_rows(title, forest, model, rows)]
            fills[title] = _fill(title, forest, layout)
    parts.append(_RANK % _bodies(model, layout, fills))
    text = "\n".join(p for p in parts if p) + _TAIL
    return re.sub(r"\bTW_(?=[A-Z]+)(?!RESTRICT)", f"{prefix.upper()}_", text).replace(
        "tw_", f"{prefix}_"
    )


def _bodies(model: Model, layout: Layout, fills: dict[str, str]) -> dict[str, str]:
    pack = "\n".join(
        f"  fields[{i}] = problem->{identifier(n.removeprefix('p_'))};"
        for i, n in enumerate(layout.problem_fields)
    )
    base = ""
    if model.base:
        share = "" if model.share == 1 else f"{number(model.share)} * "
        base = f"    score -= {share}tw_log2(mixed[{len(layout.mixed_outputs) - 1}]);"
    valid = ""
    if "valid" in fills:
        valid = f"{fills['valid']}\n    if (tw_sum_valid(x) < 0.0) score -= 1000.0;"
    vendor = ""
    if VENDOR in fills:
        vendor = (
            f"    if (tw_is_vendor[i]) {{\n{fills[VENDOR]}\n    score = tw_sum_vendor(x);\n    }}"
        )
    level = f"  i = 0;\n{fills['level']}\n  values[TW_VALUES] = tw_sum_level(x);"
    return {
        "pack": pack,
        "rank": fills["rank"],
        "vendor": vendor,
        "base": base,
        "valid": valid,
        "level": level,
    }


def _problem_type(layout: Layout, model: Model) -> str:
    lines = []
    for name in layout.problem_fields:
        for code, text in enumerate(model.features.words.get(name, ()), 1):
            own = f"{identifier(name.removeprefix('p_'))}_{word(text)}"
            lines.append(f"#define TW_{own.upper()} {code}.0")
    lines.append("typedef struct {")
    lines += [f"  double {identifier(n.removeprefix('p_'))};" for n in layout.problem_fields]
    return "\n".join([*lines, "} tw_problem_t;"])


def _defines(layout: Layout, model: Model, count: int) -> list[str]:
    return [
        f"#define TW_COUNT {count}",
        f"#define TW_FIELDS {len(layout.problem_fields)}",
        f"#define TW_VALUES {len(layout.problem_values)}",
        f"#define TW_MIXED {len(layout.mixed_outputs)}",
        f"#define TW_ROWS {layout.most_columns}",
    ]


def _forest(title: str, forest: Forest) -> list[str]:
    bounds = [
        float(forest.thresholds[f][b])
        for f, b in zip(forest.node_feature, forest.node_bin, strict=True)
    ]
    walk = {
        "name": title,
        "trees": forest.num_trees,
        "scale": number(forest.scale),
        "offset": number(forest.offset),
    }
    return [
        _array(f"static const int tw_{title}_node_start", forest.node_start.tolist()),
        _array(f"static const int tw_{title}_leaf_start", forest.leaf_start.tolist()),
        _array(f"static const short tw_{title}_feature", forest.node_feature.tolist()),
        _array(f"static const short tw_{title}_left", forest.left.tolist()),
        _array(f"static const short tw_{title}_right", forest.right.tolist()),
        _array(f"static const double tw_{title}_bound", bounds),
        _array(f"static const int tw_{title}_leaf", forest.leaf.tolist()),
        _WALK % walk,
    ]


def _kernel_rows(title: str, forest: Forest, model: Model, rows: Rows) -> str:
    """Features that are known per kernel, as a table of kernels by features."""
    own = [n for n in forest.features if model.features.scopes[n] == KERNEL]
    if not own:
        return ""
    values = model.features.evaluate(rows, own)
    table = np.column_stack([values[n] for n in own])
    return _array(f"static const double tw_{title}_known", table.reshape(-1).tolist())


def _fill(title: str, forest: Forest, layout: Layout) -> str:
    """Statements that put a forest's columns into `x` for kernel `i`."""
    scopes = layout.features.scopes
    own = [n for n in forest.features if scopes[n] == KERNEL]
    lines = []
    for i, name in enumerate(forest.features):
        if scopes[name] == KERNEL:
            source = f"tw_{title}_known[i * {len(own)} + {own.index(name)}]"
        elif scopes[name] == MIXED:
            source = f"mixed[{layout.mixed_outputs.index(name)}]"
        else:
            source = f"values[{layout.problem_values.index(name)}]"
        lines.append(f"    x[{i}] = {source};")
    return "\n".join(lines)


def _array(declaration: str, values: Iterable[Any]) -> str:
    items = [number(v) for v in values] or ["0"]
    lines, line = [], ""
    for item in items:
        if len(line) + len(item) > 96:
            lines.append(line)
            line = ""
        line += f"{item}, "
    lines.append(line)
    return f"{declaration}[{len(items)}] = {{\n" + "\n".join(lines).rstrip(", ") + "};"


def _text_array(name: str, values: Sequence[str]) -> str:
    body = ",\n".join(f'"{identifier(v)}"' for v in values)
    return f"static const char *const {name}[{len(values)}] = {{\n{body}}};"
