"""Plain Python functions of a problem's sizes, followed down every path and kept as a tree.

A function is run with `Number`s in the place of sizes. Arithmetic on them is written down, and
wherever it asks whether something holds, both answers are followed, one run after the other. What
is left is a tree of questions with results at its leaves, which `core/render.py` turns into C++:
rules and launches are written once, in Python, and served without it.

Helpers that would loop over sizes or need their value (`cheapest`, `either`, `gcd`) are here too;
on plain numbers they compute as usual.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import TilewiseError

MOST = 2**31
"""Sizes of a traced problem lie below."""
MOST_PATHS = 4096
MOST_VALUES = 32
"""Of a size that has to be known; more are no longer cases of their own."""
MOST_TURNS = 1024
"""Of a loop, when examples are looked at."""
_TESTS = {"==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal}
_MARK = re.compile("\x02(\\d+)\x03")


class TraceError(TilewiseError):
    """A function does what cannot be followed."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation; equal ones are the same object."""

    op: str
    args: tuple[Any, ...]
    low: float
    high: float
    """Between which its value lies; of integers exactly."""
    is_float: bool = False
    is_test: bool = False


_NODES: dict[tuple[Any, ...], Node] = {}
_SPELT: list[Node] = []
"""Nodes that stand in texts, by number."""


def _node(op: str, *args: Any, low: float, high: float, **kind: bool) -> Node:
    key = (op, *args, *(type(a) for a in args), *sorted(kind.items()))
    found = _NODES.get(key)
    if found is None:
        found = _NODES[key] = Node(op, args, low, high, **kind)
    return found


class Number:
    """A size, or what was computed from sizes; told apart by what it is, never hashed."""

    __slots__ = ("node",)

    def __hash__(self) -> int:
        """None: a cache would answer for other sizes."""
        raise TraceError("a size that is not known cannot be looked up")

    def __init__(self, node: Node) -> None:
        self.node = node

    def __add__(self, other: Any) -> Any:
        return _arithmetic("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _arithmetic("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _arithmetic("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _arithmetic("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return _arithmetic("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _arithmetic("%", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _arithmetic("/", self, other)

    def __neg__(self) -> Any:
        return _arithmetic("-", 0, self)

    def __round__(self) -> Any:
        one = self.node
        return Number(_node("round", one, low=round(one.low), high=round(one.high)))

    def __eq__(self, other: object) -> Any:
        return _test("==", self, other)

    def __ne__(self, other: object) -> Any:
        return _test("!=", self, other)

    def __lt__(self, other: Any) -> Any:
        return _test("<", self, other)

    def __le__(self, other: Any) -> Any:
        return _test("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return _test("<", other, self)

    def __ge__(self, other: Any) -> Any:
        return _test("<=", other, self)

    def __bool__(self) -> bool:
        return bool(_test("!=", self, 0))

    def __format__(self, form: str) -> str:
        if form:
            raise TraceError(f"a size cannot be written as {form!r} without knowing it")
        _SPELT.append(self.node)
        return f"\x02{len(_SPELT) - 1}\x03"

    def __str__(self) -> str:
        return format(self)

    __repr__ = __str__

    def __index__(self) -> int:
        """The value, each of those that examples have followed on a path of its own."""
        return concrete(self)

    __int__ = __index__

    def __float__(self) -> NoReturn:
        raise TraceError("a size that is not known was asked for as a number")


class Truth:
    """Whether something holds, followed both ways where it is asked."""

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> bool:
        return _current().ask(self.node)

    def __index__(self) -> int:
        return int(bool(self))

    __int__ = __index__

    def __eq__(self, other: object) -> Any:
        return bool(self) == bool(other)


def _current() -> Tracer:
    if not _ACTIVE:
        raise TraceError("sizes that are not known were compared outside of a trace")
    return _ACTIVE[-1]


def as_node(value: Any) -> Node:
    """A number of either kind as a node."""
    if isinstance(value, Number):
        return value.node
    if isinstance(value, bool):
        value = int(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TraceError(f"{value!r} is no number that can be followed")
    return _node("const", value, low=value, high=value, is_float=isinstance(value, float))


def _value(node: Node) -> Any:
    return node.args[0] if node.op == "const" else Number(node)


def _arithmetic(op: str, left: Any, right: Any) -> Any:
    a, b = as_node(left), as_node(right)
    is_float = a.is_float or b.is_float or op == "/"
    if op == "//" and is_float:
        raise TraceError("floor division of fractions cannot be followed")
    for one, other, keeps in ((a, b, ("+", "-", "*", "//")), (b, a, ("+", "*"))):
        neutral = 0 if op in ("+", "-") else 1
        if op in keeps and other.op == "const" and other.args[0] == neutral and not is_float:
            return _value(one)
    if op == "*" and not is_float and 0 in (a.low, b.low) and (a.high == 0 or b.high == 0):
        return 0
    if op == "-" and a is b and not is_float:
        return 0
    low, high = _range(op, a, b)
    return Number(_node(op, a, b, low=low, high=high, is_float=is_float))


def _range(op: str, a: Node, b: Node) -> tuple[float, float]:
    if op == "%":
        return 0, b.high - 1
    if op == "+":
        return a.low + b.low, a.high + b.high
    if op == "-":
        return a.low - b.high, a.high - b.low
    act: Callable[[Any, Any], Any] = {
        "*": lambda x, y: x * y,
        "//": lambda x, y: x // y,
        "/": lambda x, y: x / y,
    }[op]
    # Whoever divides by a size knows it to be above zero.
    least = max(1, b.low) if op != "*" and not b.is_float else b.low
    ends = [act(x, y) for x in (a.low, a.high) for y in (least, b.high)]
    return min(ends), max(ends)


def _test(op: str, left: Any, right: Any) -> Any:
    if isinstance(left, str) or isinstance(right, str) or left is None or right is None:
        return op == "!="
    a, b = as_node(left), as_node(right)
    if a is b:
        return op in ("==", "<=")
    if op == "<" and (a.high < b.low or a.low >= b.high):
        return a.high < b.low
    if op == "<=" and (a.high <= b.low or a.low > b.high):
        return a.high <= b.low
    if op in ("==", "!=") and (a.high < b.low or a.low > b.high):
        return op == "!="
    return Truth(_node(op, a, b, low=0, high=1, is_test=True))


def either(test: Any, this: Any, that: Any) -> Any:
    """`this if test else that`, in places where both are worked out."""
    if not isinstance(test, Truth):
        return this if test else that
    a, b = as_node(this), as_node(that)
    low, high = min(a.low, b.low), max(a.high, b.high)
    return Number(
        _node("either", test.node, a, b, low=low, high=high, is_float=a.is_float or b.is_float)
    )


def gcd(a: Any, b: Any) -> Any:
    """The greatest common divisor."""
    if not isinstance(a, Number) and not isinstance(b, Number):
        return math.gcd(a, b)
    one, two = as_node(a), as_node(b)
    return Number(_node("gcd", one, two, low=0, high=max(one.high, two.high)))


_LOOPS = 0


def cheapest(first: int, last: Any, cost: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The least cost of the numbers from `first` to `last`, and the first number that has it."""
    global _LOOPS
    if not isinstance(last, Number):
        probe = [cost(place) for place in (first,)]
        if not isinstance(probe[0], Number):
            return min((cost(place), place) for place in range(first, last + 1))
    end, depth = as_node(last), _LOOPS
    _LOOPS += 1
    try:
        loop = _node("loop", depth, low=first, high=max(first, end.high))
        body = as_node(cost(Number(loop)))
    finally:
        _LOOPS -= 1
    parts = (as_node(first), end, depth, body)
    best = _node("cost", *parts, low=body.low, high=body.high, is_float=body.is_float)
    return Number(best), Number(_node("place", *parts, low=first, high=max(first, end.high)))


def concrete(number: Any) -> int:
    """A size's value, where it must be known: every value of the examples is a path."""
    if not isinstance(number, Number):
        return int(number)
    found = _current().values_of(number.node)
    if not 0 < len(found) <= MOST_VALUES:
        raise TraceError(
            f"{len(found)} values of one size are cases of their own; {MOST_VALUES} are possible"
        )
    for value in found[:-1]:
        if number == value:
            return value
    # Asked all the same: a value that no example has must not pass for the last.
    if number == found[-1]:
        return found[-1]
    raise _Unseen


class _Unseen(BaseException):
    """A path that no example takes."""


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
            return np.gcd(of(args[0]), of(args[1]))
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
    forks: list[int] = field(default_factory=list)
    """Places of the path where the other answer is worth following, too."""

    def ask(self, test: Node) -> bool:
        """Whether a question holds on this path."""
        known = dict(self.path).get(test)
        if known is not None:
            return known
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
        return answer

    def values_of(self, node: Node) -> list[int]:
        """Every value that the examples of this path have."""
        if self.examples is None or self.mask is None:
            raise TraceError("a size has to be known, and there are no examples of it")
        return [int(v) for v in np.unique(self.examples.evaluate(node)[self.mask])]


_ACTIVE: list[Tracer] = []


@contextmanager
def _tracing(tracer: Tracer) -> Iterator[None]:
    _ACTIVE.append(tracer)
    try:
        yield
    finally:
        _ACTIVE.pop()


def fields_of(names: Sequence[str], least: Mapping[str, int]) -> dict[str, Number]:
    """Sizes that are not known, by name."""
    return {n: Number(_node("field", n, low=least.get(n, 0), high=MOST - 1)) for n in names}


def trace(function: Callable[[], Any], examples: Examples | None = None) -> Tree | None:
    """The tree of what `function` gives, over the sizes that it uses.

    With examples only paths that some of them take are followed; without any, all. None where no
    example is left at all.
    """
    if examples is not None and not examples.count:
        return None
    root: list[Tree | None] = [None]
    waiting: list[list[tuple[Node, bool]]] = [[]]
    runs = 0
    while waiting:
        runs += 1
        if runs > MOST_PATHS:
            raise TraceError(f"more than {MOST_PATHS} paths lead through it")
        prefix = waiting.pop()
        mask = None if examples is None else np.ones(examples.count, bool)
        tracer = Tracer(examples, dict(prefix), mask)
        with _tracing(tracer):
            try:
                leaf: Leaf | None = Leaf(function())
            except _Unseen:
                leaf = None
        _insert(root, tracer.path, leaf)
        for at in tracer.forks:
            test, answer = tracer.path[at]
            waiting.append([*tracer.path[:at], (test, not answer)])
    return _settled(root[0])


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


def _insert(root: list[Tree | None], path: Sequence[tuple[Node, bool]], leaf: Leaf | None) -> None:
    def put(place: Callable[[Tree | None], None], tree: Tree | None, at: int) -> None:
        if at == len(path):
            place(leaf)
            return
        test, answer = path[at]
        if tree is None:
            tree = Branch(test)
            place(tree)
        assert isinstance(tree, Branch)
        branch = tree
        if answer:
            put(lambda made: setattr(branch, "yes", made), branch.yes, at + 1)
        else:
            put(lambda made: setattr(branch, "no", made), branch.no, at + 1)

    put(lambda made: root.__setitem__(0, made), root[0], 0)


def leaves(tree: Tree | None) -> Iterator[Leaf]:
    """Every result of a tree."""
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        yield from leaves(tree.yes)
        yield from leaves(tree.no)


def pieces(text: str) -> list[str | Node]:
    """A text that sizes were written into, as its parts."""
    parts = _MARK.split(text)
    return [_SPELT[int(part)] if at % 2 else part for at, part in enumerate(parts) if part]


def follow(tree: Tree | None, fields: Mapping[str, int]) -> Any:
    """The leaf's value for known sizes, as C++ would find it; None where nobody went."""
    one = Examples({name: np.array([value]) for name, value in fields.items()})
    while isinstance(tree, Branch):
        tree = tree.yes if one.evaluate(tree.test)[0] else tree.no
    return None if tree is None else tree.value
