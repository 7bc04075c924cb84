"""C source of a model's features: what the problem fixes once, and what each kernel adds."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.core.compile_expr import to_c
from tilewise.core.features import ARCH, KERNEL, MIXED, PROBLEM, FeatureSet
from tilewise.core.model import VENDOR, Model
from tilewise.core.simplify import Facts, simplified
from tilewise.core.source import identifier
from tilewise.errors import ModelError
from tilewise.forks import cached_property

BLOCK = 64
"""Kernels that are scored together."""
SERVED = ("rank", VENDOR, "valid", "level")
"""Forests that selection needs; absolute targets are predicted on request, in NumPy."""


@dataclass(frozen=True)
class Layout:
    """Where the values of a model's features live when they are served."""

    model: Model
    facts: Facts = field(default_factory=dict)
    """Words that kernels and architecture are known to have; they make the source shorter."""

    def __post_init__(self) -> None:
        # C finds the estimated time behind all other values that kernels differ in.
        if self.model.base and self.model.base not in self.mixed_outputs:
            raise ModelError(f"{self.model.base} does not depend on both problem and kernel")

    @cached_property
    def features(self) -> FeatureSet:
        whole = self.model.features
        short = simplified(whole, self.facts) if self.facts else whole
        # All kernels of a pool may be the vendor's, whose estimate does not depend on which.
        return short if not self.model.base or short.scopes[self.model.base] == MIXED else whole

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Every name that some forest, the estimated time or the distance needs."""
        forests = [f for name, f in self.model.forests.items() if name in SERVED]
        wanted = [n for f in forests for n in f.features]
        wanted += [*self.model.measured.axes, *([self.model.base] if self.model.base else [])]
        return tuple(dict.fromkeys(wanted))

    @property
    def most_columns(self) -> int:
        """Of any forest that is served."""
        served = [f for name, f in self.model.forests.items() if name in SERVED]
        return max((len(f.features) for f in served), default=0)

    @cached_property
    def _live(self) -> set[str]:
        return self.features._needed(list(self.needed))

    def _in_scope(self, *scopes: int) -> list[str]:
        return [
            n
            for n in self.features.expressions
            if n in self._live and self.features.scopes[n] in scopes
        ]

    @cached_property
    def problem_fields(self) -> tuple[str, ...]:
        """In the order in which they are handed over: numbers, text, the vendor's tactic."""
        fields = sorted(self.features.fields_of(PROBLEM), key=lambda f: (f.is_asked, bool(f.words)))
        return tuple(f.name for f in fields)

    @cached_property
    def arch_fields(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features.fields_of(ARCH))

    @cached_property
    def problem_values(self) -> tuple[str, ...]:
        """Computed once per problem: fields that mixed expressions use, then expressions."""
        used = self._used_by_mixed
        fields = [f for f in (*self.problem_fields, *self.arch_fields) if f in used]
        return (*fields, *self._in_scope(ARCH, PROBLEM))

    @cached_property
    def _used_by_mixed(self) -> set[str]:
        return {used for n in self._in_scope(MIXED) for used in self.features.expressions[n].fields}

    @cached_property
    def kernel_values(self) -> tuple[str, ...]:
        """Known per pool: what mixed expressions take from the kernel's side."""
        names = [f.name for f in self.features.fields] + list(self.features.expressions)
        return tuple(
            n for n in names if n in self._used_by_mixed and self.features.scopes[n] == KERNEL
        )

    @cached_property
    def mixed_outputs(self) -> tuple[str, ...]:
        """Mixed values that leave the generated code: features, and the estimated time last."""
        names = [n for n in self.needed if self.features.scopes[n] == MIXED]
        return tuple(sorted(names, key=lambda n: n == self.model.base))

    def problem_source(self) -> str:
        """`tw_problem`: fields of problem and architecture in, values out."""
        words = self.features.words
        names = {n: f"p[{i}]" for i, n in enumerate(self.problem_fields)}
        names |= {n: f"a[{i}]" for i, n in enumerate(self.arch_fields)}
        lines = []
        for index, name in enumerate(self.problem_values):
            if name in names:
                lines.append(f"  v[{index}] = {names[name]};")
                continue
            source = to_c(self.features.expressions[name], names, words)
            names[name] = own = _variable(name)
            lines.append(f"  const double {own} = {source};\n  v[{index}] = {own};")
        body = "\n".join(lines)
        return (
            "static void tw_problem(const double *p, const double *a, double *v) {\n"
            f"  (void)p; (void)a; (void)v;\n{body}\n}}\n"
        )

    def mixed_source(self, block: int = BLOCK) -> str:
        """`tw_mixed`: values of the problem and of a block of kernels in, feature rows out."""
        words = self.features.words
        place = {n: i for i, n in enumerate(self.problem_values)}
        kernel = {n: i for i, n in enumerate(self.kernel_values)}
        names: dict[str, str] = {}
        outside, inside = [], []
        for name in place:
            if name in self._used_by_mixed:
                names[name] = _variable(name)
                outside.append(f"  const double {names[name]} = v[{place[name]}];")
        for name, index in kernel.items():
            names[name] = _variable(name)
            inside.append(f"    const double {names[name]} = k[{index} * stride + i];")
        outputs = {n: i for i, n in enumerate(self.mixed_outputs)}
        for name in self._in_scope(MIXED):
            source = to_c(self.features.expressions[name], names, words)
            names[name] = own = _variable(name)
            inside.append(f"    const double {own} = {source};")
            if name in outputs:
                inside.append(f"    out[{outputs[name]} * {block} + i] = {own};")
        lines = "\n".join([*outside, f"  for (i = 0; i < {block}; ++i) {{", *inside, "  }"])
        return (
            "static void tw_mixed(const double *TW_RESTRICT v, const double *TW_RESTRICT k,\n"
            "                     long stride, double *TW_RESTRICT out) {\n"
            f"  int i;\n  (void)v; (void)k; (void)stride; (void)out;\n{lines}\n}}\n"
        )


def _variable(name: str) -> str:
    """The C variable of a field, helper or feature."""
    return f"x_{identifier(name)}"
