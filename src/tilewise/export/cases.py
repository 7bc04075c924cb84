"""The problems that a library serves, with sizes left open, and examples of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import evaluate
from tilewise.core.expressions import Expression, parse
from tilewise.core.problem import Problem
from tilewise.core.sizes import MOST, fields_of
from tilewise.core.trace import Examples, Tree, trace
from tilewise.errors import ProblemError
from tilewise.ops.contract import Op, get_op

EXAMPLES = 24_000
"""Problems that show which ways through a launch there are; some ways are taken by few."""
VARIANTS, LAYER_EXAMPLES = 200, 4000
"""Problems that a layer is seen at besides its own, other numbers and sizes of images: so many, and
more where a kernel is for few layers."""
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Problems of an op that differ in sizes alone."""

    op: Op
    words: Mapping[str, str]
    """Every text field."""
    known: Sizes = field(default_factory=dict)
    """Sizes that are not left open."""

    @property
    def sizes(self) -> tuple[str, ...]:
        return size_fields(self.op)

    def problem(self) -> Problem:
        """A problem of this case whose sizes are not known; to be made inside of a trace."""
        kind = _open_type(self.op.problem)
        made = object.__new__(kind)
        open_sizes = fields_of(self.sizes, _least(self.op.name))
        for name, value in (open_sizes | dict(self.words) | dict(self.known)).items():
            object.__setattr__(made, name, value)
        return made

    def why_impossible(self) -> Tree | None:
        """What the problem's own type says about sizes, as a tree."""

        def why() -> str | None:
            try:
                self.problem().__post_init__()  # type: ignore[attr-defined]  # dataclasses' own
            except ProblemError as error:
                return str(error)
            return None

        return trace(why)

    def at(self, sizes: Sizes) -> Problem:
        """The problem with these sizes."""
        return self.op.problem(**self.words, **sizes)

    def holds(self, sizes: Sizes) -> bool:
        """Whether a problem with these sizes is of this case."""
        return all(sizes[name] == value for name, value in self.known.items())


def size_fields(op: Op) -> tuple[str, ...]:
    """Fields that are numbers."""
    return tuple(f.name for f in fields(op.problem) if str(f.type) == "int")


def word_fields(op: Op) -> tuple[str, ...]:
    """Fields that are text and not fixed by the op."""
    named = [f.name for f in fields(op.problem) if str(f.type) == "str"]
    return tuple(name for name in named if name not in op.implied_fields)


@cache
def _open_type(kind: type[Problem]) -> type[Problem]:
    """The same type, which does not hash its fields: sizes that are not known have no hash."""
    return type(f"Open{kind.__name__}", (kind,), {"__slots__": (), "_settle": lambda self: None})


@cache
def _least(name: str) -> Mapping[str, int]:
    """The smallest value of each size that a problem of the op may have by itself."""
    op, found = get_op(name), {}
    drawn = next(_drawn(op, 1))
    for name in size_fields(op):
        try:
            op.problem(**(drawn | {name: 0}))
            found[name] = 0
        except ProblemError:
            found[name] = 1
    return found


def known_names(op: Op, arch: Arch) -> tuple[str, ...]:
    """Sizes that have to be known before kernels for `arch` can be compiled."""
    return getattr(op.module("launch"), "KNOWN", ()) if arch.kind == "gpu" else ()


def of_layers(case: Case, names: Sequence[str], layers: Sequence[Sizes]) -> list[Case]:
    """The case, once for each set of sizes that the layers have for `names`."""
    ones = case.op.module("launch").EXTENTS
    met = dict.fromkeys(
        tuple((name, sizes[name]) for name in (*names, *ones) if name in names or sizes[name] == 1)
        for sizes in layers
    )
    # The first that holds is taken: dimensions of one before any size.
    return [replace(case, known=dict(known)) for known in sorted(met, key=len, reverse=True)]


def cases(op: Op, words: Mapping[str, Sequence[str]]) -> list[Case]:
    """One for every combination of words; fields of the op's own kind are filled in."""
    names, implied = word_fields(op), op.implied_fields
    choices = product(*(words[name] for name in names))
    return [Case(op=op, words=implied | dict(zip(names, of, strict=True))) for of in choices]


def _drawn(op: Op, count: int) -> Iterator[dict[str, Any]]:
    """Fields of problems that can be, from the op's own families."""
    implied, rng = op.implied_fields, random.Random(25)
    problems = op.problems
    draws = [*problems.families.values(), problems.uniform(1), problems.uniform(8)]
    made = 0
    while made < count:
        values = implied | dict(rng.choice(draws)(rng))
        try:
            op.problem(**values)
        except ProblemError:
            continue
        made += 1
        yield values


@cache
def _sizes_drawn(name: str, count: int) -> tuple[dict[str, int], ...]:
    """Sizes of many problems: as drawn, and with some of them changed to what rules ask about."""
    op, rng = get_op(name), random.Random(26)
    names = size_fields(op)
    usual = {f.name: f.default for f in fields(op.problem) if f.name in names}
    found = []
    for values in _drawn(op, count):
        sizes = {name: int(values.get(name, usual[name])) for name in names}
        # A third as drawn; the others meet edges, odd sizes and very long sides.
        for name in op.problems.sizes if rng.random() < 0.66 else ():
            if rng.random() < 0.3:
                sizes[name] = _edge(rng, sizes[name])
        found.append(sizes)
    return tuple(found)


def _edge(rng: random.Random, size: int) -> int:
    """Another size: near, a multiple of a power of two, tiny, or huge."""
    kind = rng.randrange(5)
    if kind == 0:
        return max(1, size + rng.randrange(-3, 4))
    if kind == 1:
        step = 1 << rng.randrange(1, 8)
        return max(1, size // step) * step
    if kind == 2:
        return rng.randrange(1, 65)
    if kind == 3:
        return 1 << rng.randrange(0, 22)
    return int(min(MOST - 4096, size * 2 ** rng.uniform(0, 12)))


def varied(case: Case, layers: Sequence[Sizes]) -> Iterator[Sizes]:
    """The layers of a case, as they are and with other images."""
    rng = random.Random(27)
    launch, own = case.op.module("launch"), list(filter(case.holds, layers))
    for sizes in own:
        yield sizes
        open_names = [n for n in launch.VARIED if sizes[n] > 1 or n not in launch.EXTENTS]
        for _ in range(max(VARIANTS, LAYER_EXAMPLES // len(own))):
            yield {**sizes, **{name: _edge(rng, sizes[name]) for name in open_names}}


def examples(
    case: Case, where: Expression | None, layers: Sequence[Sizes] | None = None
) -> Examples:
    """Problems of a case that `where` allows, sizes as columns; of `layers` if they are given."""
    kept = []
    drawn = _sizes_drawn(case.op.name, EXAMPLES) if layers is None else varied(case, layers)
    for sizes in drawn:
        try:
            case.at(sizes)
        except ProblemError:
            continue
        kept.append([sizes[name] for name in case.sizes])
    table = np.array(kept, np.int64).reshape(len(kept), len(case.sizes))
    made = Examples({name: table[:, at].copy() for at, name in enumerate(case.sizes)})
    if where is None or not made.count:
        return made
    columns = {name: values.astype(np.float64) for name, values in made.fields.items()}
    return made.where(evaluate(where, columns, {}) != 0)


def parse_where(text: str, op: Op) -> Expression | None:
    """Which sizes a library shall serve; raises where it asks for other fields."""
    if not text:
        return None
    return parse(text, size_fields(op))
