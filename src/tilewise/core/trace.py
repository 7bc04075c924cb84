"""Plain Python functions of a problem's sizes, followed down every path and kept as a tree.

A function is run with `Number`s (`core/sizes.py`) in the place of sizes. Wherever it asks whether
something holds, both answers are followed, one run after the other. What is left is a tree of
questions with results at its leaves, which `export/render.py` turns into C++: rules and launches
are written once, in Python, and served without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.sizes import Node, TraceError, Unseen, answering

MOST_PATHS = 4096
MOST_QUESTIONS = 600
"""On one path."""
MOST_TURNS = 1024
"""Of a loop, when examples are looked at."""
_TESTS = {"==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal}


@dataclass(slots=True, eq=False)
class Branch:
    """A question, and what follows from either answer."""

    test: Node
    yes: Tree | None = None
    no: Tree | None = None


@dataclass(slots=True, eq=False)
class Leaf:
    """What the function gave."""

    value: Any


Tree = Branch | Leaf
"""Where a side is missing, no example went there."""


class Examples:
    """Problems that show which paths are taken: fields as arrays."""

    def __init__(self, fields: Mapping[str, NDArray[np.int64]]) -> None:
        self.fields = fields
        self.count = len(next(iter(fields.values())))
        self._known: dict[Node, NDArray[Any]] = {}

    def evaluate(self, node: Node) -> NDArray[Any]:
        """A node's value on every example; of integers beyond 63 bits nearly."""
        if node not in self._known:
            with np.errstate(all="ignore"):
                self._known[node] = _evaluated(node, self)
        return self._known[node]

    def where(self, mask: NDArray[np.bool_]) -> Examples:
        """Those that are marked."""
        return Examples({name: values[mask] for name, values in self.fields.items()})


def _evaluated(node: Node, examples: Examples, loops: Mapping[int, Any] = {}) -> Any:
    def of(one: Node) -> Any:
        return _evaluated(one, examples, loops) if loops else examples.evaluate(one)

    op, args = node.op, node.args
    wide = max(abs(node.low), abs(node.high)) >= 2**62
    kind = np.float64 if node.is_float or wide else np.int64
    match op:
        case "const":
            return np.full(examples.count, args[0], kind)
        case "field":
            return examples.fields[args[0]]
        case "loop":
            return np.full(examples.count, loops[args[0]])
        case "+" | "-" | "*":
            a, b = of(args[0]).astype(kind), of(args[1]).astype(kind)
            return a + b if op == "+" else a - b if op == "-" else a * b
        case "//":
            return of(args[0]) // of(args[1])
        case "%":
            return of(args[0]) % of(args[1])
        case "/":
            return of(args[0]) / of(args[1])
        case "round":
            return np.rint(of(args[0])).astype(np.int64)
        case "gcd":
            return np.gcd(of(args[0]).astype(np.int64), of(args[1]).astype(np.int64))
        case "either":
            return np.where(of(args[0]), of(args[1]), of(args[2]))
        case "cost" | "place":
            return _looped(node, examples, loops)
    return _TESTS[op](of(args[0]), of(args[1]))


def _looped(node: Node, examples: Examples, loops: Mapping[int, Any]) -> Any:
    first, last, depth, body = node.args
    ends = _evaluated(last, examples, loops)
    best = np.full(examples.count, np.inf)
    place = np.full(examples.count, first.args[0])
    # Ends beyond belong to examples of other paths, where this loop is not asked about.
    for at in range(first.args[0], min(int(ends.max(initial=first.args[0])), MOST_TURNS) + 1):
        cost = _evaluated(body, examples, {**loops, depth: at})
        better = (cost < best) & ((at <= ends) | (at == first.args[0]))
        best, place = np.where(better, cost, best), np.where(better, at, place)
    return best if node.op == "cost" else place


@dataclass(slots=True)
class Tracer:
    """One run of a function: the answers it was given, and those it chose by itself."""

    examples: Examples | None
    given: dict[Node, bool]
    mask: NDArray[np.bool_] | None = None
    path: list[tuple[Node, bool]] = field(default_factory=list)
    answers: dict[Node, bool] = field(default_factory=dict)
    """The path's, by question."""
    forks: list[int] = field(default_factory=list)
    """Places of the path where the other answer is worth following, too."""

    def ask(self, test: Node) -> bool:
        """Whether a question holds on this path."""
        known = self.answers.get(test)
        if known is not None:
            return known
        if len(self.path) >= MOST_QUESTIONS:
            raise TraceError(f"more than {MOST_QUESTIONS} questions lead through it")
        holds = self.examples.evaluate(test) if self.examples else None
        answer = self.given.get(test)
        if answer is None:
            can = [True, True]
            if holds is not None and self.mask is not None:
                seen = holds[self.mask]
                can = [bool(seen.any()), bool((~seen).any())]
            answer = can[0]
            if all(can):
                self.forks.append(len(self.path))
        if holds is not None and self.mask is not None:
            self.mask = self.mask & (holds if answer else ~holds)
        self.path.append((test, answer))
        self.answers[test] = answer
        return answer

    def values_of(self, node: Node) -> list[int]:
        """Every value that the examples of this path have."""
        if self.examples is None or self.mask is None:
            raise TraceError("a size has to be known, and there are no examples of it")
        return [int(v) for v in np.unique(self.examples.evaluate(node)[self.mask])]


def trace(function: Callable[[], Any], examples: Examples | None = None) -> Tree | None:
    """The tree of what `function` gives, over the sizes that it uses.

    With examples only paths that some of them take are followed; without any, all. None where no
    example is left at all.
    """
    if examples is not None and not examples.count:
        return None
    tree: Tree | None = None
    waiting: list[list[tuple[Node, bool]]] = [[]]
    runs = 0
    while waiting:
        runs += 1
        if runs > MOST_PATHS:
            raise TraceError(f"more than {MOST_PATHS} paths lead through it")
        prefix = waiting.pop()
        mask = None if examples is None else np.ones(examples.count, bool)
        tracer = Tracer(examples, dict(prefix), mask)
        with answering(tracer):
            try:
                leaf: Leaf | None = Leaf(function())
            except Unseen:
                leaf = None
        tree = _inserted(tree, tracer.path, leaf)
        for at in tracer.forks:
            test, answer = tracer.path[at]
            waiting.append([*tracer.path[:at], (test, not answer)])
    return _settled(tree)


def _settled(tree: Tree | None) -> Tree | None:
    """The tree without questions whose answers make no difference."""
    if not isinstance(tree, Branch):
        return tree
    tree.yes, tree.no = _settled(tree.yes), _settled(tree.no)
    yes, no = tree.yes, tree.no
    if not isinstance(yes, Leaf) or not isinstance(no, Leaf):
        return tree
    is_plain = all(one.value is None or isinstance(one.value, str) for one in (yes, no))
    return yes if is_plain and yes.value == no.value else tree


def _inserted(
    tree: Tree | None, path: Sequence[tuple[Node, bool]], leaf: Leaf | None, at: int = 0
) -> Tree | None:
    """The tree with a leaf where a path, which leads to the tree by its first `at` steps, ends."""
    if at == len(path):
        return leaf
    test, answer = path[at]
    branch = tree or Branch(test)
    assert isinstance(branch, Branch)
    if answer:
        branch.yes = _inserted(branch.yes, path, leaf, at + 1)
    else:
        branch.no = _inserted(branch.no, path, leaf, at + 1)
    return branch


def leaves(tree: Tree | None) -> Iterator[Leaf]:
    """Every result of a tree."""
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        yield from leaves(tree.yes)
        yield from leaves(tree.no)
